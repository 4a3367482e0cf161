//! GPUs through wgpu and CubeCL: Vulkan, Metal, DX12, and a software adapter where there is no GPU.

mod adapters;
mod memory_watch;
mod pools;
pub mod trial;
mod tuned;

pub use adapters::{Adapter, AdapterKind, adapters};
pub use memory_watch::MemoryWatch;
pub use pools::Pools;

use super::compute_type::ComputeType;
use super::{ComputeDevice, MemoryCounter};
use crate::ops::cube;
use anyhow::{Result, anyhow, bail};
use burn::tensor::{Device, FloatDType};
use cubecl::ir::features::TypeUsage;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::wgpu::{AutoGraphicsApi, RuntimeOptions, WgpuBackend, try_init_setup};
use std::sync::Mutex;

/// What to do where no adapter is found.
pub const HINT_ON_DRIVERS: &str = if cfg!(target_os = "linux") {
    "install Vulkan's loader and the GPU's Vulkan driver (Debian and Ubuntu: mesa-vulkan-drivers for AMD and Intel, which brings both; libvulkan1 beside NVIDIA's own driver)"
} else {
    "install the GPU's driver"
};

/// A device that this process has started, and the adapter it computes on.
static STARTED: Mutex<Vec<(Adapter, Device)>> = Mutex::new(Vec::new());

/// Tells Mesa not to look for a window system when it lists adapters: where there is none it complains, and we choose among the
/// adapters ourselves. To be called before there are threads.
pub fn leave_out_window_systems() {
    const LAYER: &str = "NODEVICE_SELECT";
    if std::env::var_os(LAYER).is_none() {
        // SAFETY: there is no other thread that could read the environment meanwhile.
        unsafe { std::env::set_var(LAYER, "1") };
    }
}

/// Adapter number `number` of [`adapters`]; messages call it `--device NAME`.
///
/// # Errors
/// If there is none of this number, or it cannot be used.
pub fn device(number: usize, name: &str, compute_type: ComputeType) -> Result<ComputeDevice> {
    let adapters = adapters();
    let Some(adapter) = adapters.get(number) else {
        if adapters.is_empty() {
            bail!(
                "--device {name}: expected an adapter that wgpu can use, found no adapter at all; hint: {HINT_ON_DRIVERS}"
            );
        }
        let last = adapters.len() - 1;
        bail!(
            "--device {name}: expected an adapter from wgpu:0 to wgpu:{last}, found none of this number; hint: `autoresearch devices` lists them"
        );
    };
    // Before this process computes on it.
    let compute_type = trial::product_type(adapter, number, compute_type)?.unwrap_or(compute_type);
    let device = start(adapter)?;
    let products = product_type(adapter, compute_type)?;
    cube::multiply_in(products);
    let is_cpu = adapter.kind == AdapterKind::Software;
    let facts = adapter.facts(compiler(adapter));
    Ok(ComputeDevice {
        name: facts.to_string(),
        compute_type: FloatDType::F32,
        product_type: products,
        is_cpu,
        gpu: (!is_cpu).then_some(facts),
        memory: MemoryCounter::Pools(Pools::of(device.clone())),
        device,
    })
}

fn start(adapter: &Adapter) -> Result<Device> {
    let mut started = STARTED.lock().expect("no one panics with the list in hand");
    if let Some((_, device)) = started.iter().find(|(other, _)| other == adapter) {
        return Ok(device.clone());
    }
    tuned::keep(adapter)?;
    let device = adapter.device();
    RuntimeOptions::try_default().and_then(|options| try_init_setup::<AutoGraphicsApi>(&device, options)).map_err(
        |error| {
            anyhow!(
                "--device wgpu: {adapter} cannot be started ({error}); hint: update its driver, or use --device cpu"
            )
        },
    )?;
    let device = Device::from(device);
    started.push((adapter.clone(), device.clone()));
    Ok(device)
}

/// The language that CubeCL gives the adapter's driver.
fn compiler(adapter: &Adapter) -> &'static str {
    if cfg!(feature = "vulkan") && adapter.api == WgpuBackend::Vulkan { "SPIR-V" } else { "WGSL" }
}

/// What matrices are multiplied in. By itself an adapter takes float16 if it has instructions for such products with sums in
/// float32, else float32.
///
/// Measured on an NVIDIA H200 (2026-12-01, driver 580.159, configs/halo.toml): with products in float16 training is 2.6 times as
/// fast as in float32. bfloat16 has 3 bits less, and on this road gradients are 1.3 % off with it, more than rounding explains,
/// which the trial refuses.
fn product_type(adapter: &Adapter, compute_type: ComputeType) -> Result<FloatDType> {
    let client = cubecl::Device::Wgpu(adapter.device()).client();
    let properties = client.properties();
    let float32 = ElemType::Float(FloatKind::F32);
    let has_products = |kind: FloatKind| {
        let operand = ElemType::Float(kind);
        let mut shapes = properties.features.matmul.cmma.iter();
        shapes.any(|shape| shape.a_type == operand && shape.b_type == operand && shape.cd_type == float32)
    };
    let found = match compute_type {
        ComputeType::Auto if has_products(FloatKind::F16) => Some(FloatDType::F16),
        ComputeType::Auto | ComputeType::Float32 => Some(FloatDType::F32),
        // Who asks for it gets it without such instructions, too: slower than float32, but it can be tried.
        ComputeType::Float16 => {
            let usage = properties.type_usage(ElemType::Float(FloatKind::F16));
            usage.is_superset(TypeUsage::Buffer | TypeUsage::Arithmetic).then_some(FloatDType::F16)
        }
        ComputeType::Bfloat16 => has_products(FloatKind::BF16).then_some(FloatDType::BF16),
    };
    match found {
        Some(dtype) => Ok(dtype),
        None => bail!(
            "--compute-type {compute_type}: expected an adapter that computes in it, found {adapter}; hint: 'auto' takes what it has; NVIDIA's and AMD's matrix instructions need the feature `vulkan`"
        ),
    }
}
