//! The GPU makers' run-time compilers and launchers, by their C interfaces: NVRTC and the CUDA driver, or HIPRTC and HIP.
//!
//! Nothing of them is linked: libtorch brings them along, and a machine without a GPU need not have them. Both makers'
//! functions have the same signatures under different names.

use libloading::Library;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

/// What a call gives that went well, for every function here.
const SUCCESS: c_int = 0;
/// CUDA's numbers of the two parts of a device's compute capability.
const COMPUTE_CAPABILITY: [c_int; 2] = [75, 76];

type Handle = *mut c_void;
type Create = unsafe extern "C" fn(
    *mut Handle,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type Compile = unsafe extern "C" fn(Handle, c_int, *const *const c_char) -> c_int;
type Size = unsafe extern "C" fn(Handle, *mut usize) -> c_int;
type Bytes = unsafe extern "C" fn(Handle, *mut c_char) -> c_int;
type LoadModule = unsafe extern "C" fn(*mut Handle, *const c_void) -> c_int;
type GetFunction = unsafe extern "C" fn(*mut Handle, Handle, *const c_char) -> c_int;
type Launch = unsafe extern "C" fn(
    Handle,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    Handle,
    *mut *mut c_void,
    *mut *mut c_void,
) -> c_int;

/// A maker's run-time compiler.
pub struct Compiler {
    create: Create,
    compile: Compile,
    code_size: Size,
    code: Bytes,
    log_size: Size,
    log: Bytes,
    /// They stay loaded as long as their functions are here.
    _libraries: Arc<Libraries>,
}

/// How a thread is told which device its launches go to.
enum Selector {
    Cuda {
        get_device: unsafe extern "C" fn(*mut c_int, c_int) -> c_int,
        retain: unsafe extern "C" fn(*mut Handle, c_int) -> c_int,
        set_current: unsafe extern "C" fn(Handle) -> c_int,
        attribute: unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int,
    },
    Hip {
        set_device: unsafe extern "C" fn(c_int) -> c_int,
    },
}

/// A device, as launches name it.
#[derive(Clone, Copy)]
pub struct Place {
    device: c_int,
    /// CUDA's primary context of the device, which libtorch uses too.
    context: Handle,
}

// SAFETY: the handle names something in the driver, which may be used from every thread.
unsafe impl Send for Place {}
// SAFETY: as above.
unsafe impl Sync for Place {}

/// The functions of one maker.
pub struct Driver {
    compiler: Compiler,
    load_module: LoadModule,
    get_function: GetFunction,
    launch: Launch,
    selector: Selector,
    _libraries: Arc<Libraries>,
}

/// A kernel that is loaded on a device.
#[derive(Clone, Copy)]
pub struct Function(Handle);

// SAFETY: the handle names something in the driver, which may be used from every thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// An argument of a kernel.
#[derive(Clone, Copy)]
pub enum Argument {
    Pointer(*mut c_void),
    Long(i64),
    Int(i32),
    Float(f32),
}

impl Argument {
    /// The argument in the first bytes of eight, as the driver reads it.
    fn slot(self) -> u64 {
        match self {
            Self::Pointer(pointer) => pointer as u64,
            Self::Long(value) => value as u64,
            Self::Int(value) => value as u32 as u64,
            Self::Float(value) => value.to_bits() as u64,
        }
    }
}

impl Compiler {
    /// NVRTC or, with the prefix `hiprtc`, HIPRTC; `code` is what they call a compiled program.
    fn find(libraries: &Arc<Libraries>, prefix: &str, code: &str) -> Result<Self, String> {
        let name = |function: &str| format!("{prefix}{function}");
        // SAFETY: the signatures are those of "NVRTC" and "HIP runtime compilation", which are alike.
        unsafe {
            Ok(Self {
                create: symbol(libraries, &name("CreateProgram"))?,
                compile: symbol(libraries, &name("CompileProgram"))?,
                code_size: symbol(libraries, &name(&format!("Get{code}Size")))?,
                code: symbol(libraries, &name(&format!("Get{code}")))?,
                log_size: symbol(libraries, &name("GetProgramLogSize"))?,
                log: symbol(libraries, &name("GetProgramLog"))?,
                _libraries: libraries.clone(),
            })
        }
    }

    /// NVIDIA's compiler in `libraries`.
    ///
    /// # Errors
    /// If functions are missing.
    pub fn cuda(libraries: &Arc<Libraries>) -> Result<Self, String> {
        Self::find(libraries, "nvrtc", "CUBIN")
    }

    /// AMD's compiler in `libraries`.
    ///
    /// # Errors
    /// If functions are missing.
    pub fn hip(libraries: &Arc<Libraries>) -> Result<Self, String> {
        Self::find(libraries, "hiprtc", "Code")
    }

    /// `source` as a program for the GPU that `options` name.
    ///
    /// # Errors
    /// The compiler's log.
    pub fn compile(&self, source: &str, options: &[CString]) -> Result<Vec<u8>, String> {
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let (source, file) = (c_string(source)?, c"kernels.cu");
        let mut program = null_mut();
        // SAFETY: all strings end with a zero and outlive the calls; buffers have the sizes that the compiler asked for.
        unsafe {
            let none = std::ptr::null();
            let created = (self.create)(&mut program, source.as_ptr(), file.as_ptr(), 0, none, none);
            check("create program", created)?;
            if (self.compile)(program, options.len() as c_int, options.as_ptr()) != SUCCESS {
                let log = self.output(program, self.log_size, self.log)?;
                return Err(format!("the kernels do not compile: {}", String::from_utf8_lossy(&log)));
            }
            self.output(program, self.code_size, self.code)
        }
    }

    /// # Safety
    /// `program` must be one of this compiler's.
    unsafe fn output(&self, program: Handle, size: Size, bytes: Bytes) -> Result<Vec<u8>, String> {
        let mut length = 0;
        // SAFETY: the caller's.
        check("size of the compiler's output", unsafe { size(program, &mut length) })?;
        let mut output = vec![0u8; length];
        // SAFETY: the buffer has the size that was asked for.
        check("the compiler's output", unsafe { bytes(program, output.as_mut_ptr().cast()) })?;
        Ok(output)
    }
}

impl Driver {
    /// The functions of the maker whose GPUs this libtorch computes on.
    ///
    /// # Errors
    /// If libraries or functions are missing.
    pub fn open() -> Result<Self, String> {
        if cfg!(libtorch_gpu = "hip") { Self::hip() } else { Self::cuda() }
    }

    fn cuda() -> Result<Self, String> {
        // libtorch's own door to both libraries: it knows where its NVRTC lies.
        let libraries = libraries(&["libcaffe2_nvrtc.so", "libcuda.so.1"]);
        // SAFETY: the signatures are those of "CUDA Driver API".
        unsafe {
            Ok(Self {
                compiler: Compiler::cuda(&libraries)?,
                load_module: symbol(&libraries, "cuModuleLoadData")?,
                get_function: symbol(&libraries, "cuModuleGetFunction")?,
                launch: symbol(&libraries, "cuLaunchKernel")?,
                selector: Selector::Cuda {
                    get_device: symbol(&libraries, "cuDeviceGet")?,
                    retain: symbol(&libraries, "cuDevicePrimaryCtxRetain")?,
                    set_current: symbol(&libraries, "cuCtxSetCurrent")?,
                    attribute: symbol(&libraries, "cuDeviceGetAttribute")?,
                },
                _libraries: libraries,
            })
        }
    }

    fn hip() -> Result<Self, String> {
        // The program links libtorch's HIP part, and that HIP itself: another one beside it would not know its memory.
        let libraries = libraries(&["", "libcaffe2_nvrtc.so"]);
        // The compiler is mostly linked as well; from ROCm 6 on it is a library of its own.
        let compiler = Compiler::hip(&libraries)
            .or_else(|_| Compiler::hip(&self::libraries(&["libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so"])))?;
        // SAFETY: the signatures are those of "HIP runtime API".
        unsafe {
            Ok(Self {
                compiler,
                load_module: symbol(&libraries, "hipModuleLoadData")?,
                get_function: symbol(&libraries, "hipModuleGetFunction")?,
                launch: symbol(&libraries, "hipModuleLaunchKernel")?,
                selector: Selector::Hip { set_device: symbol(&libraries, "hipSetDevice")? },
                _libraries: libraries,
            })
        }
    }

    /// The device of the number `index`.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn place(&self, index: i32) -> Result<Place, String> {
        let (mut device, mut context) = (index, null_mut());
        if let Selector::Cuda { get_device, retain, .. } = &self.selector {
            // SAFETY: the out-pointers are valid; the context is never released, as libtorch holds it too.
            unsafe {
                check("cuDeviceGet", get_device(&mut device, index))?;
                check("cuDevicePrimaryCtxRetain", retain(&mut context, device))?;
            }
        }
        Ok(Place { device, context })
    }

    /// Makes `place` the one that this thread's launches go to.
    fn enter(&self, place: Place) -> Result<(), String> {
        // SAFETY: the place is one of this driver's.
        unsafe {
            match &self.selector {
                Selector::Cuda { set_current, .. } => check("cuCtxSetCurrent", set_current(place.context)),
                Selector::Hip { set_device } => check("hipSetDevice", set_device(place.device)),
            }
        }
    }

    /// Compiles `source` for `place` and loads it; gives its kernels by `names`.
    ///
    /// # Errors
    /// The compiler's log, or what the driver refuses.
    pub fn build(
        &self,
        source: &str,
        options: &[String],
        place: Place,
        names: &[&'static str],
    ) -> Result<Vec<Function>, String> {
        let mut options: Vec<CString> = options.iter().map(|option| c_string(option)).collect::<Result<_, _>>()?;
        self.enter(place)?;
        options.extend(self.architecture(place.device)?);
        let code = self.compiler.compile(source, &options)?;
        let mut module = null_mut();
        // SAFETY: the code is the compiler's, out-pointers are valid and the names end with a zero.
        unsafe {
            check("load module", (self.load_module)(&mut module, code.as_ptr().cast()))?;
            names
                .iter()
                .map(|name| {
                    let (mut function, name) = (null_mut(), c_string(name)?);
                    check("get function", (self.get_function)(&mut function, module, name.as_ptr()))?;
                    Ok(Function(function))
                })
                .collect()
        }
    }

    /// The option that names `device`'s architecture; HIPRTC takes the current device's without one.
    fn architecture(&self, device: i32) -> Result<Option<CString>, String> {
        let Selector::Cuda { attribute, .. } = &self.selector else { return Ok(None) };
        let mut capability = [0; 2];
        for (value, number) in capability.iter_mut().zip(COMPUTE_CAPABILITY) {
            // SAFETY: the out-pointer is valid.
            check("cuDeviceGetAttribute", unsafe { attribute(value, number, device) })?;
        }
        c_string(&format!("--gpu-architecture=sm_{}{}", capability[0], capability[1])).map(Some)
    }

    /// Starts `function` on the default stream of `place`, where libtorch computes too.
    ///
    /// # Safety
    /// Arguments must be those of the kernel, and every pointer memory of `place` that is large enough.
    pub unsafe fn launch(
        &self,
        place: Place,
        function: Function,
        blocks: u32,
        threads: u32,
        arguments: &[Argument],
    ) -> Result<(), String> {
        self.enter(place)?;
        let mut slots: Vec<u64> = arguments.iter().map(|argument| argument.slot()).collect();
        let mut pointers: Vec<*mut c_void> = slots.iter_mut().map(|slot| (slot as *mut u64).cast()).collect();
        // SAFETY: the caller's; the driver copies the arguments before it returns.
        let status = unsafe {
            let arguments = pointers.as_mut_ptr();
            (self.launch)(function.0, blocks, 1, 1, threads, 1, 1, 0, null_mut(), arguments, null_mut())
        };
        check("launch", status)
    }
}

/// Libraries that are loaded, and why others are not.
pub struct Libraries {
    pub loaded: Vec<Library>,
    pub problems: Vec<String>,
}

/// The libraries among `names` that can be loaded; an empty name is the program itself.
fn libraries(names: &[&str]) -> Arc<Libraries> {
    let (mut loaded, mut problems) = (Vec::new(), Vec::new());
    for name in names {
        if name.is_empty() {
            loaded.push(Library::from(libloading::os::unix::Library::this()));
            continue;
        }
        // SAFETY: libraries of the GPU's maker, which libtorch loads too.
        match unsafe { Library::new(*name) } {
            Ok(library) => loaded.push(library),
            Err(error) => problems.push(error.to_string()),
        }
    }
    Arc::new(Libraries { loaded, problems })
}

/// The function `name` of the first of `libraries`, or of what they depend on, that has it.
///
/// # Safety
/// `F` must be the function's type; it may be called only while the libraries are loaded.
unsafe fn symbol<F: Copy>(libraries: &Libraries, name: &str) -> Result<F, String> {
    // SAFETY: the caller's.
    let function =
        libraries.loaded.iter().find_map(|library| unsafe { library.get::<F>(name).ok().map(|symbol| *symbol) });
    function.ok_or_else(|| {
        let problems = libraries.problems.join("; ");
        format!("no library of the GPU's maker has the function {name} ({problems})")
    })
}

fn check(what: &str, status: c_int) -> Result<(), String> {
    if status == SUCCESS { Ok(()) } else { Err(format!("{what}: the GPU's driver answers {status}")) }
}

pub fn c_string(text: &str) -> Result<CString, String> {
    CString::new(text).map_err(|error| error.to_string())
}
