//! Where to compute: the backends that are compiled in, the choice among them, and what is known of the hardware.
//!
//! - [`facts`] describes a GPU, [`peak`] knows how fast it can be.
//! - With the feature `tch`: `libtorch` takes GPUs through libtorch, `driver` and `amd_sysfs` ask about them,
//!   `observation` and `diagnosis` find out why one cannot be used, `environment` corrects what ROCm reads when it starts.

#[cfg(feature = "tch")]
mod amd_sysfs;
#[cfg(feature = "tch")]
pub mod diagnosis;
#[cfg(feature = "tch")]
mod driver;
#[cfg(feature = "tch")]
pub mod environment;
pub mod facts;
#[cfg(feature = "tch")]
mod libtorch;
#[cfg(feature = "tch")]
mod observation;
pub mod peak;

use anyhow::{Result, bail};
use burn::tensor::{Device, FloatDType};
use facts::GpuFacts;
use std::collections::BTreeSet;
use std::sync::Mutex;

/// What `--device` takes, for help texts and messages.
pub const DEVICE_NAMES: &str =
    "auto, cpu, libtorch (the first GPU), libtorch:N (GPU number N, from 0), libtorch:cpu, wgpu, vulkan";

/// A device to compute on.
#[derive(Clone, Debug)]
pub struct ComputeDevice {
    /// burn's handle, without autodiff.
    pub device: Device,
    /// What it is, for people.
    pub name: String,
    /// Type of embeddings, activations and matrix products.
    pub compute_type: FloatDType,
    /// Whether this is a CPU: the right hyperparameter profile is then `cpu`.
    pub is_cpu: bool,
    /// What is known of it if it is a GPU.
    gpu: Option<GpuFacts>,
    /// Who counts the memory that is taken on it.
    memory: MemoryCounter,
}

/// Who counts a device's memory.
#[derive(Clone, Copy, Debug)]
enum MemoryCounter {
    /// The operating system, for the whole process.
    Process,
    /// libtorch's allocator for the GPU of this number.
    #[cfg(feature = "tch")]
    LibtorchGpu(usize),
}

impl ComputeDevice {
    /// The device that `name` stands for: one of [`DEVICE_NAMES`].
    ///
    /// # Errors
    /// If the name is unknown, its backend is not compiled into this program, or its hardware cannot be used.
    pub fn select(name: &str) -> Result<Self> {
        match name {
            "auto" => Self::fastest(),
            "cpu" => cpu(),
            "libtorch" => libtorch_gpu(0, name),
            "libtorch:cpu" => libtorch_cpu(),
            "wgpu" => wgpu(),
            "vulkan" => vulkan(),
            _ => match name.strip_prefix("libtorch:").and_then(|number| number.parse().ok()) {
                Some(number) => libtorch_gpu(number, name),
                None => bail!(
                    "--device: expected one of {DEVICE_NAMES}, found '{name}'; hint: 'auto' takes the fastest there is"
                ),
            },
        }
    }

    /// The fastest device whose backend is compiled in and whose hardware is there.
    fn fastest() -> Result<Self> {
        let compiled_in = |feature: bool, name: &'static str| feature.then_some(name);
        let candidates = [
            compiled_in(cfg!(feature = "tch"), "libtorch"),
            compiled_in(cfg!(feature = "wgpu"), "wgpu"),
            compiled_in(cfg!(feature = "flex"), "cpu"),
            compiled_in(cfg!(feature = "tch"), "libtorch:cpu"),
        ];
        let fastest =
            candidates.into_iter().flatten().find_map(|name| Self::select(name).inspect_err(say_why_not_used).ok());
        match fastest {
            Some(device) => Ok(device),
            None => bail!(
                "--device auto: no backend is compiled in; hint: build with the default features, or `--features flex`"
            ),
        }
    }

    /// Peak operations a second in the compute type; none where it is not known. Says so where it is a GPU's.
    ///
    /// # Errors
    /// If [`peak::VARIABLE`] is set to something else than a number of operations a second.
    pub fn peak_flops(&self) -> Result<Option<f64>> {
        let Some(gpu) = &self.gpu else { return Ok(None) };
        let stated = std::env::var_os(peak::VARIABLE);
        let flops = peak::bf16_peak_flops(stated.as_deref(), &gpu.name, gpu.architecture.as_deref())?;
        if flops.is_none() {
            tracing::warn!(
                "the peak speed of '{}' is not known, mfu will be n/a; hint: set {}, such as 49.6e12, to the operations a second that its maker promises for dense bfloat16",
                gpu.name,
                peak::VARIABLE
            );
        }
        Ok(flops)
    }

    /// Largest amount of memory that was taken so far, in MiB; none where nobody tells.
    ///
    /// On a GPU this is what tensors took of the GPU's memory, on a CPU what the process did.
    pub fn peak_memory_mib(&self) -> Option<f64> {
        match self.memory {
            MemoryCounter::Process => peak_host_memory_mib(),
            #[cfg(feature = "tch")]
            MemoryCounter::LibtorchGpu(index) => {
                libtorch::peak_memory_mib(index).inspect_err(|error| tracing::warn!("peak_vram_mb: {error}")).ok()
            }
        }
    }
}

/// Tells why `auto` passes a device over: loudly, unless the machine has no such device.
fn say_why_not_used(error: &anyhow::Error) {
    // A command may choose several times; once is enough to say it.
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    #[cfg(feature = "tch")]
    if error.downcast_ref::<libtorch::Unusable>().is_some_and(|unusable| !unusable.has_gpu) {
        tracing::debug!("not used: {error}");
        return;
    }
    let is_news = SAID.lock().is_ok_and(|mut said| said.insert(error.to_string()));
    if is_news {
        tracing::warn!("not used: {error}");
    }
}

fn peak_host_memory_mib() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib / 1024.0)
}

/// A CPU by `device`, called `name`.
#[cfg(any(feature = "flex", feature = "tch"))]
fn cpu_device(device: Device, name: String) -> ComputeDevice {
    ComputeDevice {
        device,
        name,
        compute_type: FloatDType::F32,
        is_cpu: true,
        gpu: None,
        memory: MemoryCounter::Process,
    }
}

#[cfg(feature = "flex")]
fn cpu() -> Result<ComputeDevice> {
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
    Ok(cpu_device(Device::flex(), format!("cpu ({threads} threads, burn-flex)")))
}

#[cfg(not(feature = "flex"))]
fn cpu() -> Result<ComputeDevice> {
    not_compiled_in("cpu", "flex")
}

#[cfg(feature = "tch")]
fn libtorch_cpu() -> Result<ComputeDevice> {
    Ok(libtorch::cpu())
}

#[cfg(not(feature = "tch"))]
fn libtorch_cpu() -> Result<ComputeDevice> {
    not_compiled_in("libtorch:cpu", "tch")
}

#[cfg(feature = "tch")]
fn libtorch_gpu(number: usize, name: &str) -> Result<ComputeDevice> {
    libtorch::gpu(number, name)
}

#[cfg(not(feature = "tch"))]
fn libtorch_gpu(_number: usize, name: &str) -> Result<ComputeDevice> {
    not_compiled_in(name, "tch")
}

#[cfg(feature = "wgpu")]
fn wgpu() -> Result<ComputeDevice> {
    bail!("--device wgpu: GPUs through wgpu are not supported yet; hint: `--device cpu` is")
}

#[cfg(not(feature = "wgpu"))]
fn wgpu() -> Result<ComputeDevice> {
    not_compiled_in("wgpu", "wgpu")
}

#[cfg(feature = "vulkan")]
fn vulkan() -> Result<ComputeDevice> {
    bail!("--device vulkan: GPUs through Vulkan are not supported yet; hint: `--device cpu` is")
}

#[cfg(not(feature = "vulkan"))]
fn vulkan() -> Result<ComputeDevice> {
    not_compiled_in("vulkan", "vulkan")
}

fn not_compiled_in(device: &str, feature: &str) -> Result<ComputeDevice> {
    bail!(
        "--device {device}: this program was built without the backend for it; hint: build with `--features {feature}`, or use another of {DEVICE_NAMES}"
    )
}
