//! Where to compute: the backends that are compiled in, the choice among them, and what is known of the hardware.

use anyhow::{Result, bail};
use burn::tensor::{Device, FloatDType};

/// What `--device` takes, for help texts and messages.
pub const DEVICE_NAMES: &str = "auto, cpu, libtorch[:cpu], wgpu, vulkan";

/// A device to compute on.
#[derive(Clone, Debug)]
pub struct ComputeDevice {
    /// burn's handle, without autodiff.
    pub device: Device,
    /// What it is, for people.
    pub name: String,
    /// Type of embeddings, activations and matrix products.
    pub compute_type: FloatDType,
    /// Peak floating-point operations per second in the compute type, where known.
    pub peak_flops: Option<f64>,
    /// Whether this is a CPU: the right hyperparameter profile is then `cpu`.
    pub is_cpu: bool,
}

impl ComputeDevice {
    /// The device that `name` stands for: one of [`DEVICE_NAMES`].
    ///
    /// # Errors
    /// If the name is unknown or its backend is not compiled into this program.
    pub fn select(name: &str) -> Result<Self> {
        match name {
            "auto" => Self::fastest(),
            "cpu" => cpu(),
            "libtorch" => libtorch_gpu(),
            "libtorch:cpu" => libtorch_cpu(),
            "wgpu" => wgpu(),
            "vulkan" => vulkan(),
            _ => bail!(
                "--device: expected one of {DEVICE_NAMES}, found '{name}'; hint: 'auto' takes the fastest there is"
            ),
        }
    }

    /// The fastest device whose backend is compiled in.
    fn fastest() -> Result<Self> {
        let compiled_in = |feature: bool, name: &'static str| feature.then_some(name);
        let candidates = [
            compiled_in(cfg!(feature = "tch"), "libtorch"),
            compiled_in(cfg!(feature = "wgpu"), "wgpu"),
            compiled_in(cfg!(feature = "flex"), "cpu"),
            compiled_in(cfg!(feature = "tch"), "libtorch:cpu"),
        ];
        let fastest = candidates
            .into_iter()
            .flatten()
            .find_map(|name| Self::select(name).inspect_err(|error| tracing::warn!("not used: {error}")).ok());
        match fastest {
            Some(device) => Ok(device),
            None => bail!(
                "--device auto: no backend is compiled in; hint: build with the default features, or `--features flex`"
            ),
        }
    }
}

/// Largest amount of memory that this process has held so far, in MiB; none where the system does not tell.
///
/// On a CPU device this is what the model and its data take; accelerators count their own.
pub fn peak_host_memory_mib() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib / 1024.0)
}

#[cfg(feature = "flex")]
fn cpu() -> Result<ComputeDevice> {
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
    Ok(ComputeDevice {
        device: Device::flex(),
        name: format!("cpu ({threads} threads, burn-flex)"),
        compute_type: FloatDType::F32,
        peak_flops: None,
        is_cpu: true,
    })
}

#[cfg(not(feature = "flex"))]
fn cpu() -> Result<ComputeDevice> {
    not_compiled_in("cpu", "flex")
}

#[cfg(feature = "tch")]
fn libtorch_cpu() -> Result<ComputeDevice> {
    Ok(ComputeDevice {
        device: Device::new(burn::backend::LibTorchDevice::Cpu),
        name: "cpu (libtorch)".to_owned(),
        compute_type: FloatDType::F32,
        peak_flops: None,
        is_cpu: true,
    })
}

#[cfg(not(feature = "tch"))]
fn libtorch_cpu() -> Result<ComputeDevice> {
    not_compiled_in("libtorch:cpu", "tch")
}

#[cfg(feature = "tch")]
fn libtorch_gpu() -> Result<ComputeDevice> {
    if !tch::Cuda::is_available() {
        bail!("--device libtorch: libtorch sees no GPU; hint: `--device libtorch:cpu` needs none");
    }
    Ok(ComputeDevice {
        device: Device::new(burn::backend::LibTorchDevice::Cuda(0)),
        name: "GPU (libtorch)".to_owned(),
        compute_type: FloatDType::BF16,
        peak_flops: None,
        is_cpu: false,
    })
}

#[cfg(not(feature = "tch"))]
fn libtorch_gpu() -> Result<ComputeDevice> {
    not_compiled_in("libtorch", "tch")
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
