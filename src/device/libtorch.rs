//! Devices through libtorch, which calls GPUs of both makers "cuda".

use super::compute_type::ComputeType;
use super::diagnosis::{Cause, Maker, diagnose};
use super::driver::{Cuda, amd_facts};
use super::facts::{GpuFacts, GpuMemory, computes_in_bf16};
use super::observation::observe;
use super::{ComputeDevice, MemoryCounter, cpu_device};
use anyhow::{Result, bail};
use burn::backend::LibTorchDevice;
use burn::tensor::{Device, FloatDType};
use std::ffi::{CStr, c_char};
use std::sync::OnceLock;

// libtorch.cpp: each gives a number, or -1 and an error's text in the buffer.
unsafe extern "C" {
    fn autoresearch_gpu_part_is_loaded(text: *mut c_char, capacity: usize) -> i64;
    fn autoresearch_gpu_count(text: *mut c_char, capacity: usize) -> i64;
    fn autoresearch_gpu_peak_bytes(index: i64, text: *mut c_char, capacity: usize) -> i64;
}

/// A GPU that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("--device {device}: expected a GPU that libtorch can compute on, found {cause}")]
pub struct Unusable {
    device: String,
    cause: Cause,
    /// Whether the machine has one at all: else it is no news that it cannot be used.
    pub has_gpu: bool,
}

/// The CPU.
///
/// # Errors
/// If `compute_type` is none of libtorch's.
pub fn cpu(compute_type: ComputeType) -> Result<ComputeDevice> {
    let dtype = dtype(compute_type, FloatDType::F32)?;
    Ok(cpu_device(Device::new(LibTorchDevice::Cpu), "cpu (libtorch)".to_owned(), dtype))
}

/// The type that is asked for; `usual` if none is.
fn dtype(compute_type: ComputeType, usual: FloatDType) -> Result<FloatDType> {
    match compute_type {
        ComputeType::Auto => Ok(usual),
        ComputeType::Float32 => Ok(FloatDType::F32),
        ComputeType::Bfloat16 => Ok(FloatDType::BF16),
        ComputeType::Float16 => bail!(
            "--compute-type float16: expected float32 or bfloat16 for --device libtorch; hint: float16 is for wgpu, on GPUs without bfloat16"
        ),
    }
}

/// The GPU of number `index`, from 0; messages call it `--device NAME`.
///
/// # Errors
/// [`Unusable`] if it is not there or cannot compute.
pub fn gpu(index: usize, name: &str, compute_type: ComputeType) -> Result<ComputeDevice> {
    let dtype = dtype(compute_type, FloatDType::BF16)?;
    let (count, warnings) = count_gpus()?;
    let unusable = |cause, has_gpu| Unusable { device: name.to_owned(), cause, has_gpu };
    if index >= count {
        let observed = observe(count, warnings);
        bail!(unusable(diagnose(&observed), observed.has_gpu()));
    }
    let facts = match facts(index) {
        Ok(facts) => facts,
        Err(error) => {
            tracing::warn!("the driver says nothing of GPU {index} ({error:#}); hint: everything else works without");
            GpuFacts {
                name: format!("GPU {index}"),
                architecture: None,
                memory: GpuMemory::default(),
                through: "libtorch".to_owned(),
            }
        }
    };
    let has_bf16 = facts.architecture.as_ref().is_none_or(|architecture| computes_in_bf16(architecture));
    if dtype == FloatDType::BF16 && !has_bf16 {
        bail!(unusable(Cause::NoBf16 { gpu: facts.to_string() }, true));
    }
    if let Err(error) = first_sum(index) {
        let disguise = std::env::var("HSA_OVERRIDE_GFX_VERSION").ok();
        bail!(unusable(Cause::CannotCompute { gpu: facts.to_string(), error, disguise }, true));
    }
    Ok(ComputeDevice {
        device: Device::new(LibTorchDevice::Cuda(index)),
        name: facts.to_string(),
        compute_type: dtype,
        product_type: dtype,
        is_cpu: false,
        gpu: Some(facts),
        memory: MemoryCounter::LibtorchGpu(index),
    })
}

/// Whose GPUs the libtorch is for that this program was built with; none if it is for CPUs only.
pub fn built_for() -> Option<Maker> {
    if cfg!(libtorch_gpu = "hip") {
        Some(Maker::Amd)
    } else if cfg!(libtorch_gpu = "cuda") {
        Some(Maker::Nvidia)
    } else {
        None
    }
}

/// Whether libtorch's GPU part is in this process.
pub fn gpu_part_is_loaded() -> bool {
    // SAFETY: `asked` gives a buffer and its length.
    asked(|text, capacity| unsafe { autoresearch_gpu_part_is_loaded(text, capacity) }).is_ok_and(|(is, _)| is == 1)
}

/// Largest amount of memory that tensors on GPU `index` have taken so far, in MiB.
///
/// # Errors
/// If libtorch does not say.
pub fn peak_memory_mib(index: usize) -> Result<f64> {
    // SAFETY: as above.
    let peak = asked(|text, capacity| unsafe { autoresearch_gpu_peak_bytes(index as i64, text, capacity) });
    Ok(peak?.0 as f64 / f64::from(1 << 20))
}

/// How many GPUs libtorch sees, and what it warned of while it looked.
fn count_gpus() -> Result<(usize, String)> {
    // It looks only once in a process.
    static FIRST: OnceLock<(usize, String)> = OnceLock::new();
    if let Some(first) = FIRST.get() {
        return Ok(first.clone());
    }
    // SAFETY: as above.
    let (count, warnings) = asked(|text, capacity| unsafe { autoresearch_gpu_count(text, capacity) })?;
    Ok(FIRST.get_or_init(|| (count as usize, warnings)).clone())
}

fn facts(index: usize) -> Result<GpuFacts> {
    let index = i32::try_from(index)?;
    match built_for() {
        Some(Maker::Amd) => amd_facts(index),
        _ => Cuda::load()?.facts(index),
    }
}

/// Makes the GPU compute, in the type that training computes in: libtorch sees GPUs that it has no kernels for.
fn first_sum(index: usize) -> Result<(), String> {
    let options = (tch::Kind::BFloat16, tch::Device::Cuda(index));
    let sum = tch::Tensor::f_ones([2], options).and_then(|ones| ones.f_add(&ones)?.f_double_value(&[1]));
    match sum {
        Ok(2.0) => Ok(()),
        Ok(wrong) => Err(format!("1 + 1 gives {wrong}")),
        Err(error) => Err(first_line(&error.to_string())),
    }
}

/// The number that `ask` gives and the text that it writes.
fn asked(ask: impl FnOnce(*mut c_char, usize) -> i64) -> Result<(i64, String)> {
    let mut buffer = [0u8; 4096];
    let number = ask(buffer.as_mut_ptr().cast(), buffer.len());
    let text = CStr::from_bytes_until_nul(&buffer).map(CStr::to_string_lossy).unwrap_or_default();
    if number < 0 {
        bail!("libtorch failed ({}); hint: its GPU part may not fit its CPU part", first_line(&text));
    }
    Ok((number, first_line(&text)))
}

/// Messages from C++ go on with a stack trace.
fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_c_plus_plus_side_answers_and_its_errors_come_as_text() {
        assert_eq!(gpu_part_is_loaded(), built_for().is_some());
        let (count, _) = count_gpus().unwrap();
        assert_eq!(count_gpus().unwrap().0, count);
        // No machine has a GPU of this number.
        let beyond = peak_memory_mib(100);
        if count > 0 {
            assert!(beyond.is_err() || beyond.is_ok_and(|peak| peak == 0.0));
            assert_eq!(first_sum(0), Ok(()));
            assert!(peak_memory_mib(0).unwrap() > 0.0 && peak_memory_mib(0).unwrap() < 1e6);
            let facts = facts(0).unwrap();
            assert!(!facts.name.is_empty() && facts.architecture.is_some(), "{facts:?}");
        } else {
            let error = first_sum(0).unwrap_err();
            assert!(!error.is_empty() && !error.contains('\n'), "{error}");
        }
        let refused = gpu(4096, "libtorch:4096", ComputeType::Auto).unwrap_err();
        assert!(refused.is::<Unusable>() && refused.to_string().contains("--device libtorch:4096"), "{refused}");
    }
}
