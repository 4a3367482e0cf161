//! Adapters are listed and tried in processes of their own, before this one asks their drivers and computes on them: drivers
//! have been seen to end a program without a word, or never to answer, and that must not happen in the midst of a night.

use super::{Adapter, tuned};
use crate::atomic_file::write_atomically;
use crate::device::ComputeDevice;
use crate::device::compute_type::ComputeType;
use crate::ops;
use crate::output::note;
use crate::process::{self, How, Input, Output};
use anyhow::{Context, Result, anyhow, bail, ensure};
use burn::tensor::{FloatDType, Int, Tensor, TensorData};
use chacha20::ChaCha8Rng;
use clap::ValueEnum;
use rand::{RngExt, SeedableRng};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

/// A trial computes for a moment; what takes so long is the compilation of its kernels, in several forms, at the first time.
const LIMIT: Duration = Duration::from_secs(240);
/// Drivers are listed in a moment; what takes longer is the start of a program with libtorch on a busy machine.
const LISTING_LIMIT: Duration = Duration::from_secs(60);
/// What a process that has listed all adapters says: a driver may end it as if all were well.
pub(crate) const LISTED: &str = "listed";

/// The program that is started for a trial.
static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Has adapters listed and tried with `program`, which must have the commands `list-adapters` and `try-adapter`. Without a call
/// there are no trials.
pub fn use_program(program: PathBuf) {
    PROGRAM.set(program).ok();
}

/// What came of a trial; kept in the cache folder.
#[derive(Debug, Serialize, Deserialize)]
struct Verdict {
    /// In which type the adapter multiplies matrices.
    products: ComputeType,
    /// Why it is not the type that it has instructions for.
    fell_back: Option<String>,
}

/// In which type `adapter`, which `wgpu:NUMBER` names, multiplies matrices if `wanted` is asked for: what a trial showed, the
/// first time that this driver is used. None if there are no trials.
///
/// # Errors
/// If the adapter does not compute what it should, does not answer, or ends its process.
pub(super) fn product_type(adapter: &Adapter, number: usize, wanted: ComputeType) -> Result<Option<ComputeType>> {
    let Some(program) = PROGRAM.get() else { return Ok(None) };
    let path = tuned::folder()?.join(format!("{}-{wanted}.json", tuned::environment_name(adapter)));
    let known = fs::read(&path).ok().and_then(|bytes| serde_json::from_slice::<Verdict>(&bytes).ok());
    let verdict = match known {
        Some(verdict) => verdict,
        None => {
            let tried = |wanted| tried(program, adapter, number, wanted, LIMIT);
            let verdict = match tried(wanted) {
                Ok(products) => Verdict { products, fell_back: None },
                Err(error) if wanted == ComputeType::Auto => {
                    let products = tried(ComputeType::Float32)?;
                    Verdict { products, fell_back: Some(format!("{error:#}")) }
                }
                Err(error) => return Err(error),
            };
            if let Err(error) = write_atomically(&path, &serde_json::to_vec(&verdict)?) {
                tracing::warn!("the trial will be made again: {error:#}");
            }
            verdict
        }
    };
    if let Some(reason) = &verdict.fell_back {
        tracing::warn!("{reason}; {} is taken; hint: remove {} to try again", verdict.products, path.display());
    }
    Ok(Some(verdict.products))
}

/// The type that a trial of `limit` at most came out well in.
fn tried(
    program: &Path,
    adapter: &Adapter,
    number: usize,
    wanted: ComputeType,
    limit: Duration,
) -> Result<ComputeType> {
    note(format_args!("{adapter}: is tried before its first use (compute type {wanted}, {limit:?} at most)"));
    let mut command = Command::new(program);
    command.env("RUST_BACKTRACE", "0").args([
        "try-adapter",
        "--device",
        &format!("wgpu:{number}"),
        "--compute-type",
        &wanted.to_string(),
    ]);
    // It ends when its input does, which is when this process does, in whatever way.
    let Output { how, stdout, stderr } = process::output_within(command, Input::HeldOpen, limit)?;
    let said = String::from_utf8_lossy(&stdout);
    if let How::Exited(0) = how {
        return ComputeType::from_str(said.trim(), true)
            .map_err(|error| anyhow!("{adapter}: a trial answered '{said}' ({error}); hint: {HINT}"));
    }
    let (ending, complained) = (ending(how, limit), String::from_utf8_lossy(&stderr));
    let last = last_words(&complained);
    // What it refuses itself has a hint of its own.
    if let Some(message) = last.strip_prefix("error: ").filter(|message| message.contains("; hint: ")) {
        bail!("{message}");
    }
    bail!("{adapter}: a trial with compute type {wanted} {ending} ({last}); hint: {HINT}");
}

/// Has the drivers list their adapters, which this process may do then.
///
/// # Errors
/// If a driver ends the process that does it, or does not answer.
pub(super) fn listing() -> Result<()> {
    let Some(program) = PROGRAM.get() else { return Ok(()) };
    let mut command = Command::new(program);
    command.env("RUST_BACKTRACE", "0").arg("list-adapters");
    let Output { how, stdout, stderr } = process::output_within(command, Input::HeldOpen, LISTING_LIMIT)?;
    ensure!(
        String::from_utf8_lossy(&stdout).lines().any(|line| line == LISTED),
        "wgpu: expected the drivers of this machine to list their adapters, found that a process which asks them {} ({}); hint: one of them is broken: without it, or with VK_DRIVER_FILES set to the file (*.json) of another, wgpu can be used",
        ending(how, LISTING_LIMIT),
        last_words(&String::from_utf8_lossy(&stderr))
    );
    Ok(())
}

/// How a process ended that should have answered within `limit`.
fn ending(how: How, limit: Duration) -> String {
    if how == How::TimedOut { format!("did not end within {limit:?}") } else { how.to_string() }
}

/// The last line of what a process complained of; after a panic a note on backtraces follows it.
fn last_words(complained: &str) -> &str {
    let is_news = |line: &&str| !line.trim().is_empty() && !line.starts_with("note: ");
    complained.lines().rev().find(is_news).map_or("nothing was said", str::trim)
}

const HINT: &str = if cfg!(feature = "vulkan") {
    "another version of its driver may help, and so may a build with the feature `wgpu` in place of `vulkan`, which gives it WGSL instead of SPIR-V; --device cpu does without it"
} else {
    "another version of its driver may help; --device cpu does without it"
};

/// The trial itself: products of every form that training takes of them, with their gradients, and attention.
///
/// # Errors
/// If `device` computes something else than the CPU.
pub fn run(compute: &ComputeDevice) -> Result<()> {
    let device = compute.device.clone().autodiff();
    // The largest relative error: float32 sums in another order, the others round operands and results.
    let tolerance = if compute.product_type == FloatDType::F32 { 1e-5 } else { 1e-2 };
    let (n, c, v) = (256, 128, 192);
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut draw = |count: usize| (0..count).map(|_| rng.random_range(-1.0..1.0)).collect::<Vec<f32>>();
    let (x, weight) = (draw(n * c), draw(v * c));
    let on_device = |values: &[f32], shape: [usize; 2]| {
        Tensor::<2>::from_data(TensorData::new(values.to_vec(), shape), &device).require_grad()
    };
    let (x_there, weight_there) = (on_device(&x, [n, c]), on_device(&weight, [v, c]));
    let y = ops::project(x_there.clone(), weight_there.clone());
    let expected = product(&x, &weight, c);
    agree("a product", y.clone().into_data(), &expected, tolerance)?;

    // The gradient of Σ y² / 2 is y itself: both gradients are products with it.
    let gradients = (y.clone() * y).sum().div_scalar(2).backward();
    let transposed = |values: &[f32], rows: usize, columns: usize| -> Vec<f32> {
        (0..columns)
            .flat_map(|column| (0..rows).map(move |row| (row, column)))
            .map(|(row, column)| values[row * columns + column])
            .collect()
    };
    let dx = product(&expected, &transposed(&weight, v, c), v);
    let dweight = product(&transposed(&expected, n, v), &transposed(&x, n, c), n);
    let gradient =
        |of: &Tensor<2>| of.grad(&gradients).context("a product's operand has no gradient").map(Tensor::into_data);
    agree("a gradient", gradient(&x_there)?, &dx, tolerance)?;
    agree("a weight's gradient", gradient(&weight_there)?, &dweight, tolerance)?;

    // Attention over equal keys is the mean of the values that a query sees.
    let (t, d) = (n, 32);
    let queries = Tensor::<4>::from_data(TensorData::new(draw(t * d), [1, t, 1, d]), &device);
    let keys = Tensor::<4>::ones([1, t, 1, d], &device);
    let values: Vec<f32> = (0..t * d).map(|at| ((at / d) % 7) as f32).collect();
    let seen = Tensor::<4>::from_data(TensorData::new(values.clone(), [1, t, 1, d]), &device);
    let window = 100;
    let means = ops::causal_attention(queries, keys, seen, window);
    let expected: Vec<f32> = (0..t)
        .flat_map(|i| {
            let visible = i.saturating_sub(window)..=i;
            let count = visible.clone().count() as f32;
            let mean = visible.map(|j| values[j * d]).sum::<f32>() / count;
            std::iter::repeat_n(mean, d)
        })
        .collect();
    agree("attention", means.into_data(), &expected, tolerance)?;

    let targets = Tensor::<1, Int>::zeros([n], &device);
    let loss = ops::softcap_cross_entropy(x_there, weight_there.clone() * 0.0, targets, 15.0);
    let gradients = loss.backward();
    ensure!(weight_there.grad(&gradients).is_some(), "the loss has no gradient");
    agree("a loss", loss.into_data(), &[(v as f32).ln()], tolerance)
}

/// x·yᵀ: `[n, c]`, `[m, c]` to `[n, m]`.
fn product(x: &[f32], y: &[f32], c: usize) -> Vec<f32> {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() as f32;
    x.chunks_exact(c).flat_map(|row| y.chunks_exact(c).map(move |other| dot(row, other))).collect()
}

fn agree(what: &str, found: TensorData, expected: &[f32], tolerance: f64) -> Result<()> {
    let (mut difference, mut norm, mut count) = (0.0, 0.0, 0);
    for (found, expected) in found.iter::<f64>().zip(expected) {
        difference += (found - f64::from(*expected)).powi(2);
        norm += f64::from(*expected).powi(2);
        count += 1;
    }
    let error = (difference / norm).sqrt();
    ensure!(
        count == expected.len() && error <= tolerance,
        "{what} of {count} numbers differs from the CPU's {} by a relative error of {error:.1e}, expected at most {tolerance:.0e}",
        expected.len()
    );
    Ok(())
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// What becomes of a trial in which the program does `script`.
    fn trial(script: &str, limit: Duration) -> Result<ComputeType> {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("program");
        fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        tried(&program, &Adapter::stand_in("Crashing GPU"), 3, ComputeType::Float16, limit)
    }

    #[test]
    fn what_a_driver_does_to_a_trial_is_told_with_the_adapters_name() {
        let minute = Duration::from_secs(60);
        assert_eq!(trial("echo float16", minute).unwrap(), ComputeType::Float16);
        let arguments = "[ \"$*\" = 'try-adapter --device wgpu:3 --compute-type float16' ] && echo float16";
        assert!(trial(arguments, minute).is_ok());
        for (script, limit, told) in [
            ("kill -SEGV $$", minute, "was ended by signal 11 (nothing was said)"),
            (
                "echo first >&2; echo 'error: lost the device' >&2; exit 7",
                minute,
                "ended with code 7 (error: lost the device)",
            ),
            // As a panic ends.
            (
                "printf 'lost the device\\nnote: run with' >&2; exit 101",
                minute,
                "ended with code 101 (lost the device)",
            ),
            ("exec sleep 60", Duration::from_millis(50), "did not end within 50ms"),
            ("echo banana", minute, "answered 'banana"),
        ] {
            let message = format!("{:#}", trial(script, limit).unwrap_err());
            for part in ["Crashing GPU", told, "; hint: "] {
                assert!(message.contains(part), "{script}: {message}");
            }
        }
    }

    #[test]
    fn numbers_that_differ_are_noticed() {
        let data = |values: &[f32]| TensorData::new(values.to_vec(), [values.len()]);
        assert!(agree("a sum", data(&[1.0, 2.0]), &[1.0, 2.0], 1e-5).is_ok());
        for wrong in [&[1.0, 2.1][..], &[1.0, f32::NAN], &[1.0]] {
            assert!(agree("a sum", data(wrong), &[1.0, 2.0], 1e-2).is_err(), "{wrong:?}");
        }
    }
}
