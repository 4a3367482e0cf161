//! Asks the GPU's driver what it drives, through its C interface: loaded at run time, so that no header is needed to build
//! and no driver to start.

use super::amd_sysfs::{self, KFD_NODES, PCI_DEVICES};
use super::facts::{GpuFacts, GpuMemory};
use anyhow::{Context, Result, ensure};
use libloading::os::unix::{Library, Symbol};
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::path::Path;

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR` and `_MINOR` of cuda.h.
const CAPABILITY: [c_int; 2] = [75, 76];

/// NVIDIA's driver library, initialised.
pub struct Cuda(Library);

impl Cuda {
    /// Loads it.
    ///
    /// # Errors
    /// If there is none.
    pub fn load() -> Result<Self> {
        // SAFETY: the library is the driver's own, which libtorch loads as well.
        let library = unsafe { Library::new("libcuda.so.1") }?;
        Ok(Self(library))
    }

    /// The newest CUDA that the driver can run, as 1000 · major + 10 · minor.
    ///
    /// # Errors
    /// If the driver does not say.
    pub fn version(&self) -> Result<c_int> {
        type CuDriverGetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;
        let mut version = 0;
        // SAFETY: the signature is cuda.h's.
        call("cuDriverGetVersion", unsafe {
            function::<CuDriverGetVersion>(&self.0, c"cuDriverGetVersion")?(&mut version)
        })?;
        Ok(version)
    }

    /// Facts on the GPU that libtorch numbers `index`: both go by `CUDA_VISIBLE_DEVICES`.
    ///
    /// # Errors
    /// If the driver does not say.
    pub fn facts(&self, index: c_int) -> Result<GpuFacts> {
        type CuInit = unsafe extern "C" fn(c_uint) -> c_int;
        type CuDeviceGet = unsafe extern "C" fn(*mut c_int, c_int) -> c_int;
        type CuDeviceGetName = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
        type CuDeviceGetAttribute = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int;
        type CuDeviceTotalMem = unsafe extern "C" fn(*mut usize, c_int) -> c_int;
        let (mut device, mut bytes) = (0, 0);
        // SAFETY: the signatures are cuda.h's; pointers are to variables that outlive the calls.
        unsafe {
            call("cuInit", function::<CuInit>(&self.0, c"cuInit")?(0))?;
            call("cuDeviceGet", function::<CuDeviceGet>(&self.0, c"cuDeviceGet")?(&mut device, index))?;
            let get_name = function::<CuDeviceGetName>(&self.0, c"cuDeviceGetName")?;
            let name = text("cuDeviceGetName", |buffer, length| get_name(buffer, length, device))?;
            let get_attribute = function::<CuDeviceGetAttribute>(&self.0, c"cuDeviceGetAttribute")?;
            let mut capability = [0, 0];
            for (number, attribute) in capability.iter_mut().zip(CAPABILITY) {
                call("cuDeviceGetAttribute", get_attribute(number, attribute, device))?;
            }
            let total_memory = function::<CuDeviceTotalMem>(&self.0, c"cuDeviceTotalMem_v2")?;
            call("cuDeviceTotalMem", total_memory(&mut bytes, device))?;
            Ok(GpuFacts {
                name,
                architecture: Some(format!("sm_{}{}", capability[0], capability[1])),
                memory: GpuMemory { by_driver: Some(bytes as u64), by_kernel: None },
            })
        }
    }
}

/// Facts on the AMD GPU that libtorch numbers `index`, by the HIP library that libtorch brought along.
///
/// # Errors
/// If the library is not there or does not say.
pub fn amd_facts(index: c_int) -> Result<GpuFacts> {
    type HipDeviceGetName = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
    type HipDeviceGetPciBusId = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
    type HipDeviceTotalMem = unsafe extern "C" fn(*mut usize, c_int) -> c_int;
    let process = Library::this();
    let mut bytes = 0;
    // SAFETY: the signatures are those of hip_runtime_api.h, where a device is its number; pointers are to variables that
    // outlive the calls.
    let (name, address) = unsafe {
        let get_name = function::<HipDeviceGetName>(&process, c"hipDeviceGetName")?;
        let name = text("hipDeviceGetName", |buffer, length| get_name(buffer, length, index))?;
        let get_address = function::<HipDeviceGetPciBusId>(&process, c"hipDeviceGetPCIBusId")?;
        let address = text("hipDeviceGetPCIBusId", |buffer, length| get_address(buffer, length, index))?;
        let total_memory = function::<HipDeviceTotalMem>(&process, c"hipDeviceTotalMem")?;
        call("hipDeviceTotalMem", total_memory(&mut bytes, index))?;
        (name, address)
    };
    Ok(GpuFacts {
        // The library has a list of names, on which the newest GPUs are missing.
        name: if name.is_empty() { "AMD GPU".to_owned() } else { name },
        architecture: amd_sysfs::architecture(Path::new(KFD_NODES), &address),
        memory: GpuMemory {
            by_driver: Some(bytes as u64),
            by_kernel: amd_sysfs::memory(Path::new(PCI_DEVICES), &address),
        },
    })
}

/// The function `name` of `library`.
///
/// # Safety
/// `F` must be its type.
unsafe fn function<F>(library: &Library, name: &CStr) -> Result<Symbol<F>> {
    // SAFETY: the caller knows the type.
    unsafe { library.get(name) }.with_context(|| format!("no {name:?}"))
}

/// What `write` puts into the buffer of the given length.
fn text(name: &str, write: impl FnOnce(*mut c_char, c_int) -> c_int) -> Result<String> {
    let mut buffer = [0u8; 256];
    call(name, write(buffer.as_mut_ptr().cast(), buffer.len() as c_int))?;
    let text = CStr::from_bytes_until_nul(&buffer).with_context(|| format!("{name} gave no text"))?;
    Ok(text.to_string_lossy().trim().to_owned())
}

/// Turns the driver's error codes into errors.
fn call(name: &str, status: c_int) -> Result<()> {
    ensure!(status == 0, "{name} failed with error {status}");
    Ok(())
}
