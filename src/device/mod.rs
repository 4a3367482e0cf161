//! Where to compute: the backends that are compiled in, the choice among them, and what is known of the hardware.
//!
//! - [`facts`] describes a GPU, [`peak`] knows how fast it can be, [`compute_type`] names the types to compute in, [`list`]
//!   tells what there is.
//! - With the feature `wgpu`: `wgpu` takes GPUs through Vulkan, Metal and DX12.
//! - With the feature `tch`: `libtorch` takes GPUs through libtorch, `driver` and `amd_sysfs` ask about them,
//!   `observation` and `diagnosis` find out why one cannot be used, `environment` corrects what ROCm reads when it starts.

#[cfg(feature = "tch")]
mod amd_sysfs;
pub mod compute_type;
#[cfg(feature = "tch")]
pub mod diagnosis;
#[cfg(feature = "tch")]
mod driver;
#[cfg(feature = "tch")]
pub mod environment;
pub mod facts;
#[cfg(feature = "tch")]
mod libtorch;
pub mod list;
#[cfg(feature = "tch")]
mod observation;
pub mod peak;
#[cfg(feature = "wgpu")]
pub mod wgpu;

use anyhow::{Result, bail};
use burn::tensor::{Device, FloatDType};
use compute_type::{ComputeType, type_name};
use facts::GpuFacts;
use std::collections::BTreeSet;
use std::sync::Mutex;

/// What `--device` takes, for help texts and messages.
pub const DEVICE_NAMES: &str = "auto, cpu, libtorch (the first GPU), libtorch:N (GPU number N, from 0), libtorch:cpu, wgpu (the best adapter), wgpu:N";

/// A device to compute on.
#[derive(Clone, Debug)]
pub struct ComputeDevice {
    /// burn's handle, without autodiff.
    pub device: Device,
    /// What it is, for people.
    pub name: String,
    /// Type of embeddings and activations.
    pub compute_type: FloatDType,
    /// Type in which matrices are multiplied.
    pub product_type: FloatDType,
    /// Whether this is a CPU: the right hyperparameter profile is then `cpu`.
    pub is_cpu: bool,
    /// What is known of it if it is a GPU.
    gpu: Option<GpuFacts>,
    /// Who counts the memory that is taken on it.
    memory: MemoryCounter,
}

/// Who counts a device's memory.
#[derive(Clone, Debug)]
enum MemoryCounter {
    /// The operating system, for the whole process.
    Process,
    /// libtorch's allocator for the GPU of this number.
    #[cfg(feature = "tch")]
    LibtorchGpu(usize),
    /// The pools that CubeCL takes a device's memory through.
    #[cfg(feature = "wgpu")]
    Pools(wgpu::Pools),
}

impl ComputeDevice {
    /// The device that `name` stands for: one of [`DEVICE_NAMES`].
    ///
    /// # Errors
    /// If the name is unknown, its backend is not compiled into this program, or its hardware cannot be used.
    pub fn select(name: &str, compute_type: ComputeType) -> Result<Self> {
        let numbered = |kind: &str| {
            let digits = name.strip_prefix(kind)?.strip_prefix(':')?;
            // One number has one name: none with a sign or zeros before it.
            digits.parse().ok().filter(|number: &usize| number.to_string() == digits)
        };
        match name {
            "auto" => Self::fastest(compute_type),
            "cpu" => cpu(compute_type),
            "libtorch" => libtorch_gpu(0, name, compute_type),
            "libtorch:cpu" => libtorch_cpu(compute_type),
            "wgpu" => wgpu_adapter(0, name, compute_type),
            _ => match (numbered("libtorch"), numbered("wgpu")) {
                (Some(number), _) => libtorch_gpu(number, name, compute_type),
                (_, Some(number)) => wgpu_adapter(number, name, compute_type),
                _ => bail!(
                    "--device: expected one of {DEVICE_NAMES}, found '{name}'; hint: 'auto' takes the fastest there is"
                ),
            },
        }
    }

    /// The fastest device whose backend is compiled in and whose hardware is there.
    fn fastest(compute_type: ComputeType) -> Result<Self> {
        let compiled_in = |feature: bool, name: &'static str| feature.then_some(name);
        let has_wgpu_gpu = has_wgpu_gpu();
        let candidates = [
            compiled_in(cfg!(feature = "tch"), "libtorch"),
            compiled_in(has_wgpu_gpu, "wgpu"),
            compiled_in(cfg!(feature = "flex"), "cpu"),
            compiled_in(cfg!(feature = "tch"), "libtorch:cpu"),
            // A software adapter, where nothing else is compiled in: it is slower than any of the above.
            compiled_in(
                cfg!(all(feature = "wgpu", not(any(feature = "flex", feature = "tch")))) && !has_wgpu_gpu,
                "wgpu",
            ),
        ];
        let mut candidates = candidates.into_iter().flatten().peekable();
        while let Some(name) = candidates.next() {
            match Self::select(name, compute_type) {
                Err(error) if candidates.peek().is_some() => say_why_not_used(&error),
                last => return last,
            }
        }
        bail!("--device auto: no backend is compiled in; hint: build with the default features, or `--features flex`")
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

    /// The types that it computes in, as PyTorch names them.
    pub fn types(&self) -> String {
        match self.compute_type == self.product_type {
            true => type_name(self.compute_type),
            false => format!("{}, products in {}", type_name(self.compute_type), type_name(self.product_type)),
        }
    }

    /// Whether kernels for it are tuned and compiled as they are needed: then the first step may take minutes.
    pub fn tunes_kernels(&self) -> bool {
        match self.memory {
            #[cfg(feature = "wgpu")]
            MemoryCounter::Pools(_) => true,
            _ => false,
        }
    }

    /// Largest amount of memory that was taken so far, in MiB; none where nobody tells.
    ///
    /// On a GPU this is what tensors took of the GPU's memory, on a CPU what the process did.
    pub fn peak_memory_mib(&self) -> Option<f64> {
        match &self.memory {
            MemoryCounter::Process => peak_host_memory_mib(),
            #[cfg(feature = "wgpu")]
            MemoryCounter::Pools(pools) => pools.peak_mib(),
            #[cfg(feature = "tch")]
            MemoryCounter::LibtorchGpu(index) => {
                libtorch::peak_memory_mib(*index).inspect_err(|error| tracing::warn!("peak_vram_mb: {error}")).ok()
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
        tracing::debug!("passed over: {error}");
        return;
    }
    let is_news = SAID.lock().is_ok_and(|mut said| said.insert(error.to_string()));
    if is_news {
        tracing::warn!("passed over: {error}");
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
fn cpu_device(device: Device, name: String, dtype: FloatDType) -> ComputeDevice {
    ComputeDevice {
        device,
        name,
        compute_type: dtype,
        product_type: dtype,
        is_cpu: true,
        gpu: None,
        memory: MemoryCounter::Process,
    }
}

#[cfg(feature = "flex")]
fn cpu(compute_type: ComputeType) -> Result<ComputeDevice> {
    if !matches!(compute_type, ComputeType::Auto | ComputeType::Float32) {
        bail!(
            "--compute-type {compute_type}: expected float32 for --device cpu; hint: GPUs and libtorch:cpu have others"
        );
    }
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
    Ok(cpu_device(Device::flex(), format!("cpu ({threads} threads, burn-flex)"), FloatDType::F32))
}

#[cfg(not(feature = "flex"))]
fn cpu(_compute_type: ComputeType) -> Result<ComputeDevice> {
    not_compiled_in("cpu", "flex")
}

#[cfg(feature = "tch")]
fn libtorch_cpu(compute_type: ComputeType) -> Result<ComputeDevice> {
    libtorch::cpu(compute_type)
}

#[cfg(not(feature = "tch"))]
fn libtorch_cpu(_compute_type: ComputeType) -> Result<ComputeDevice> {
    not_compiled_in("libtorch:cpu", "tch")
}

#[cfg(feature = "tch")]
fn libtorch_gpu(number: usize, name: &str, compute_type: ComputeType) -> Result<ComputeDevice> {
    libtorch::gpu(number, name, compute_type)
}

#[cfg(not(feature = "tch"))]
fn libtorch_gpu(_number: usize, name: &str, _compute_type: ComputeType) -> Result<ComputeDevice> {
    not_compiled_in(name, "tch")
}

#[cfg(feature = "wgpu")]
fn wgpu_adapter(number: usize, name: &str, compute_type: ComputeType) -> Result<ComputeDevice> {
    wgpu::device(number, name, compute_type)
}

#[cfg(not(feature = "wgpu"))]
fn wgpu_adapter(_number: usize, name: &str, _compute_type: ComputeType) -> Result<ComputeDevice> {
    // Where there is Vulkan, it is the faster road.
    not_compiled_in(name, if cfg!(target_vendor = "apple") { "wgpu" } else { "vulkan" })
}

/// Whether wgpu sees a GPU that is one.
#[cfg(feature = "wgpu")]
fn has_wgpu_gpu() -> bool {
    wgpu::adapters().first().is_some_and(|adapter| adapter.kind != wgpu::AdapterKind::Software)
}

#[cfg(not(feature = "wgpu"))]
fn has_wgpu_gpu() -> bool {
    false
}

#[cfg(not(all(feature = "flex", feature = "tch", feature = "wgpu")))]
fn not_compiled_in(device: &str, feature: &str) -> Result<ComputeDevice> {
    bail!(
        "--device {device}: this program was built without the backend for it; hint: build with `--features {feature}`, or use another of {DEVICE_NAMES}"
    )
}
