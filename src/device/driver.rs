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
        Self::open(Path::new("libcuda.so.1"))
    }

    fn open(path: &Path) -> Result<Self> {
        // SAFETY: the library is the driver's own, which libtorch loads as well.
        Ok(Self(unsafe { Library::new(path) }?))
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
                through: "libtorch".to_owned(),
            })
        }
    }
}

/// Facts on the AMD GPU that libtorch numbers `index`, by the HIP library that libtorch brought along.
///
/// # Errors
/// If the library is not there or does not say.
pub fn amd_facts(index: c_int) -> Result<GpuFacts> {
    amd_facts_by(&Library::this(), index, Path::new(KFD_NODES), Path::new(PCI_DEVICES))
}

fn amd_facts_by(hip: &Library, index: c_int, kfd_nodes: &Path, pci_devices: &Path) -> Result<GpuFacts> {
    type HipDeviceGetName = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
    type HipDeviceGetPciBusId = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
    type HipDeviceTotalMem = unsafe extern "C" fn(*mut usize, c_int) -> c_int;
    let mut bytes = 0;
    // SAFETY: the signatures are those of hip_runtime_api.h, where a device is its number; pointers are to variables that
    // outlive the calls.
    let (name, address) = unsafe {
        let get_name = function::<HipDeviceGetName>(hip, c"hipDeviceGetName")?;
        let name = text("hipDeviceGetName", |buffer, length| get_name(buffer, length, index))?;
        let get_address = function::<HipDeviceGetPciBusId>(hip, c"hipDeviceGetPCIBusId")?;
        let address = text("hipDeviceGetPCIBusId", |buffer, length| get_address(buffer, length, index))?;
        let total_memory = function::<HipDeviceTotalMem>(hip, c"hipDeviceTotalMem")?;
        call("hipDeviceTotalMem", total_memory(&mut bytes, index))?;
        (name, address)
    };
    Ok(GpuFacts {
        // The library has a list of names, on which the newest GPUs are missing.
        name: if name.is_empty() { "AMD GPU".to_owned() } else { name },
        architecture: amd_sysfs::architecture(kfd_nodes, &address),
        memory: GpuMemory { by_driver: Some(bytes as u64), by_kernel: amd_sysfs::memory(pci_devices, &address) },
        through: "libtorch".to_owned(),
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::PathBuf;
    use std::process::Command;
    use tempfile::TempDir;

    /// Both makers' functions for two GPUs, as their headers declare them.
    const STAND_IN: &str = r#"
        #include <stddef.h>
        #include <stdio.h>
        int cuDriverGetVersion(int *version) { *version = 12040; return 0; }
        int cuInit(unsigned int flags) { return flags; }
        int cuDeviceGet(int *device, int index) { *device = 70 + index; return index < 2 ? 0 : 101; }
        int cuDeviceGetName(char *name, int length, int device) { return snprintf(name, length, "NVIDIA %d", device) < 0; }
        int cuDeviceGetAttribute(int *value, int attribute, int device) {
            *value = attribute == 75 ? 9 : attribute == 76 ? 0 : -1;
            return device < 70;
        }
        int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)device << 30; return 0; }
        int hipDeviceGetName(char *name, int length, int device) {
            return snprintf(name, length, device ? "" : "AMD Radeon 8060S ") < 0;
        }
        int hipDeviceGetPCIBusId(char *address, int length, int device) {
            return snprintf(address, length, "0000:c%d:00.0", 3 + device) < 0;
        }
        int hipDeviceTotalMem(size_t *bytes, int device) { *bytes = (size_t)62 << 30; return device < 2 ? 0 : 101; }
    "#;

    fn stand_in() -> (TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let (source, library) = (folder.path().join("driver.c"), folder.path().join("driver.so"));
        fs::write(&source, STAND_IN).unwrap();
        let compiler = std::env::var_os("CC").unwrap_or("cc".into());
        let compiled =
            Command::new(compiler).args(["-shared", "-fPIC", "-o"]).args([&library, &source]).output().unwrap();
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        (folder, library)
    }

    #[test]
    fn nvidias_driver_is_asked_by_its_interface() {
        let (_folder, library) = stand_in();
        let cuda = Cuda::open(&library).unwrap();
        assert_eq!(cuda.version().unwrap(), 12_040);
        let facts = cuda.facts(1).unwrap();
        assert_eq!(facts.to_string(), "NVIDIA 71 (sm_90, 71.0 GiB by the driver, libtorch)");
        let error = cuda.facts(2).unwrap_err().to_string();
        assert!(error.contains("cuDeviceGet failed with error 101"), "{error}");
        assert!(Cuda::open(Path::new("/nowhere/libcuda.so.1")).is_err());
    }

    #[test]
    fn hip_and_the_kernel_describe_an_amd_gpu_together() {
        let (folder, library) = stand_in();
        // SAFETY: has no code that runs when it is loaded.
        let hip = unsafe { Library::new(library) }.unwrap();
        let (nodes, devices) = (folder.path().join("nodes"), folder.path().join("devices"));
        let device = devices.join("0000:c3:00.0");
        fs::create_dir_all(nodes.join("1")).unwrap();
        fs::create_dir_all(&device).unwrap();
        fs::write(nodes.join("1/properties"), "gfx_target_version 110501\nlocation_id 49920\ndomain 0\n").unwrap();
        fs::write(device.join("mem_info_vram_total"), "536870912\n").unwrap();
        fs::write(device.join("mem_info_gtt_total"), "66571993088\n").unwrap();
        let facts = amd_facts_by(&hip, 0, &nodes, &devices).unwrap();
        let line = "AMD Radeon 8060S (gfx1151, 62.0 GiB by the driver, 0.5 GiB own + 62.0 GiB of main memory by the kernel, libtorch)";
        assert_eq!(facts.to_string(), line);
        // One that the library has no name for and the kernel does not list.
        let other = amd_facts_by(&hip, 1, &nodes, &devices).unwrap();
        assert_eq!(other.to_string(), "AMD GPU (62.0 GiB by the driver, libtorch)");
        let error = amd_facts_by(&hip, 2, &nodes, &devices).unwrap_err().to_string();
        assert!(error.contains("hipDeviceTotalMem failed with error 101"), "{error}");
        // In a program without ROCm there is no such function.
        if super::super::libtorch::built_for() != Some(super::super::diagnosis::Maker::Amd) {
            let error = amd_facts(0).unwrap_err().to_string();
            assert!(error.contains("hipDeviceGetName"), "{error}");
        }
    }
}
