//! The bodies for libtorch against the portable ones in float32: on the CPU, and on the first GPU where there is one.

use super::super::{AttentionState, FusedOps, Kernels as _, MixState, portable};
use super::attention::{Kernel, Plan, Windowing};
use super::choice::Sample;
use super::driver::{Compiler, Libraries, c_string};
use super::*;
use libloading::Library;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tch::Device;

fn devices() -> Vec<Device> {
    let gpu = tch::Cuda::is_available().then_some(Device::Cuda(0));
    if gpu.is_none() {
        eprintln!("there is no GPU: the kernels for GPUs are left out");
    }
    [Device::Cpu].into_iter().chain(gpu).collect()
}

/// Every device, element type and largest relative error.
fn cases() -> impl Iterator<Item = (Device, Kind, f64)> {
    devices().into_iter().flat_map(|device| [(device, Kind::Float, 2e-5), (device, Kind::BFloat16, 1.2e-2)])
}

fn random(shape: &[i64], (kind, device): (Kind, Device)) -> Tensor {
    Tensor::randn(shape, (Kind::Float, device)).to_kind(kind)
}

fn burn(x: &Tensor) -> TchTensor {
    TchTensor::new(x.copy())
}

/// The same values in float32.
fn wide(x: &Tensor) -> TchTensor {
    TchTensor::new(x.to_kind(Kind::Float).copy())
}

fn assert_close(found: &TchTensor, expected: &TchTensor, largest: f64, what: &str) {
    assert_eq!(found.tensor.size(), expected.tensor.size(), "{what}");
    let error = choice::relative_error(&found.tensor, &expected.tensor);
    assert!(error <= largest, "{what}: relative error {error:.2e}, largest {largest:.0e}");
}

#[test]
fn rows_agree_with_the_portable_bodies() {
    for (device, kind, largest) in cases() {
        for shape in [[1i64, 3, 2, 16], [2, 37, 3, 64], [2, 8, 4, 128], [1, 5, 1, 520], [1, 70, 2, 12]] {
            let what = format!("{device:?} {kind:?} {shape:?}");
            let (x, grad) = (random(&shape, (kind, device)), random(&shape, (kind, device)));
            let (out, state) = LibTorch::rms_norm_forward(burn(&x));
            assert_close(&out, &portable::rms_norm::<LibTorch>(wide(&x)), largest, &format!("rms_norm {what}"));
            let expected = portable::rms_norm_backward::<LibTorch>(wide(&x), wide(&grad));
            let found = LibTorch::rms_norm_backward(state, burn(&grad));
            assert_close(&found, &expected, largest, &format!("rms_norm_backward {what}"));

            let angles = random(&[shape[1], shape[3] / 2], (Kind::Float, device));
            let (cos, sin) = (angles.cos().to_kind(kind), angles.sin().to_kind(kind));
            let (out, state) = LibTorch::rotary_rms_norm_forward(burn(&x), burn(&cos), burn(&sin));
            let rotated = portable::rotary::<LibTorch>(wide(&x), wide(&cos), wide(&sin));
            // cos² + sin² of rounded angles is not quite 1, which the kernel takes it for.
            assert_close(
                &out,
                &portable::rms_norm::<LibTorch>(rotated.clone()),
                largest,
                &format!("rotary_rms_norm {what}"),
            );
            let inner = portable::rms_norm_backward::<LibTorch>(rotated, wide(&grad));
            let expected = portable::rotary::<LibTorch>(inner, wide(&cos), LibTorch::float_neg(wide(&sin)));
            let found = LibTorch::rotary_rms_norm_backward(state, burn(&cos), burn(&sin), burn(&grad));
            assert_close(&found, &expected, largest, &format!("rotary_rms_norm_backward {what}"));

            let gate = random(&shape[..3], (kind, device));
            let out = LibTorch::gated_add(burn(&x), burn(&gate), burn(&grad));
            let expected = portable::gated_add::<LibTorch>(wide(&x), wide(&gate), wide(&grad));
            assert_close(&out, &expected, largest, &format!("gated_add {what}"));
            let found = LibTorch::gated_add_backward(burn(&gate), burn(&x), burn(&grad));
            let expected = portable::gated_add_backward::<LibTorch>(wide(&gate), wide(&x), wide(&grad));
            for (found, expected) in found.iter().zip(&expected) {
                assert_close(found, expected, 2.0 * largest, &format!("gated_add_backward {what}"));
            }

            let out = LibTorch::squared_relu(burn(&x));
            assert_close(&out, &portable::squared_relu::<LibTorch>(wide(&x)), largest, &format!("squared_relu {what}"));
            let expected = portable::squared_relu_backward::<LibTorch>(wide(&out.tensor), wide(&grad));
            let found = LibTorch::squared_relu_backward(out, burn(&grad));
            assert_close(&found, &expected, largest, &format!("squared_relu_backward {what}"));
        }
    }
}

#[test]
fn gradients_of_embeddings_agree_with_the_portable_body() {
    for (device, kind, largest) in cases() {
        for (b, t, v, c) in [(1, 1, 3, 8), (2, 70, 11, 24), (3, 50, 1000, 136), (2, 600, 5, 512)] {
            let what = format!("{device:?} {kind:?} b {b}, t {t}, v {v}, c {c}");
            let weight = random(&[v, c], (kind, device));
            // Two batches and two tables each: the order of tokens is kept in between.
            for _ in 0..2 {
                // Some tokens are in no place, and the columns of the tokens lie apart, as those of rows with targets do.
                let rows = TchTensor::new(Tensor::randint((v - 1).max(1), [b, t + 1], (Kind::Int64, device)));
                let tokens = TchTensor::partial(rows.tensor.narrow(1, 0, t), rows.storage.clone());
                for _ in 0..2 {
                    let grad = random(&[b, t, c], (kind, device));
                    let found = LibTorch::embed_backward(burn(&weight), tokens.clone(), burn(&grad));
                    let one_hot = tokens.tensor.reshape([-1]).one_hot(v).to_kind(Kind::Float);
                    let expected = one_hot.tr().mm(&grad.to_kind(Kind::Float).view([b * t, c]));
                    assert_eq!(found.tensor.kind(), kind);
                    // libtorch's own, on the CPU, adds up in bfloat16.
                    if device.is_cuda() || kind == Kind::Float {
                        assert_close(&found, &TchTensor::new(expected), largest, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn token_order_lists_the_places_of_each_token() {
    for device in devices() {
        let place = |values: &[i64]| Tensor::from_slice(values).to_device(device);
        let tokens = TchTensor::new(place(&[3, 0, 3, 1, 3, 1]).view([2, 3]));
        for v in [4, 6] {
            let TokenOrder { order, starts } = token_order(&tokens, v);
            assert_eq!(Vec::<i64>::try_from(order).unwrap(), [1, 3, 5, 0, 2, 4]);
            assert_eq!(
                Vec::<i64>::try_from(starts).unwrap(),
                [&[0, 1, 3, 3, 6][..], &[6; 2][..v as usize - 4]].concat()
            );
        }
        let others = TchTensor::new(place(&[1, 0]).view([2, 1]));
        assert_eq!(Vec::<i64>::try_from(token_order(&others, 2).order).unwrap(), [1, 0]);
    }
}

#[test]
fn mix_agrees_with_the_portable_body() {
    for (device, kind, largest) in cases() {
        // The last: more than the summing blocks take in one round.
        for shape in [[1i64, 1, 8], [3, 50, 64], [1, 3, 7], [40, 512, 512]] {
            let what = format!("{device:?} {kind:?} {shape:?}");
            let [x, y, grad] = [0; 3].map(|_| random(&shape, (kind, device)));
            let [x_scale, y_scale] = [1.5, -0.25].map(|value| Tensor::full([1], value, (Kind::Float, device)));
            let state = |cast: fn(&Tensor) -> TchTensor| MixState::<LibTorch> {
                x: cast(&x),
                x_scale: burn(&x_scale),
                y: cast(&y),
                y_scale: burn(&y_scale),
            };
            let out = LibTorch::mix(burn(&x), burn(&x_scale), burn(&y), burn(&y_scale));
            let expected = portable::mix::<LibTorch>(wide(&x), burn(&x_scale), wide(&y), burn(&y_scale));
            assert_close(&out, &expected, largest, &format!("mix {what}"));
            let found = LibTorch::mix_backward(state(burn), burn(&grad));
            let expected = portable::mix_backward::<LibTorch>(state(wide), wide(&grad));
            for (found, expected) in found.iter().zip(&expected) {
                assert_close(found, expected, largest, &format!("mix_backward {what}"));
            }
        }
    }
}

#[test]
fn loss_agrees_with_the_portable_body_over_several_chunks() {
    for (device, kind, largest) in cases() {
        for (n, c, v) in [(3, 8, 16), (50, 64, 1000), (ROW_CHUNK + 5, 16, 64), (4, 8, 13)] {
            let what = format!("{device:?} {kind:?} n {n}, c {c}, v {v}");
            let (hidden, weight) = (random(&[n, c], (kind, device)), random(&[v, c], (kind, device)));
            let targets = TchTensor::new(Tensor::randint(v, [n], (Kind::Int64, device)));
            let run = |cast: fn(&Tensor) -> TchTensor| (cast(&hidden), cast(&weight), targets.clone());
            let (h, w, t) = run(burn);
            let (loss, gradients) = LibTorch::softcap_cross_entropy_gradients(h, w, t, 15.0);
            let (h, w, t) = run(wide);
            let (expected_loss, expected) = portable::softcap_cross_entropy_gradients::<LibTorch>(h, w, t, 15.0);
            assert_close(&loss, &expected_loss, largest, &format!("loss {what}"));
            for (found, expected) in gradients.iter().zip(&expected) {
                assert_eq!(found.tensor.kind(), kind);
                assert_close(found, expected, 2.0 * largest, &format!("gradient of the loss {what}"));
            }
        }
    }
}

#[test]
fn attention_agrees_with_the_portable_body_for_windows_of_any_length() {
    for (device, kind, largest) in cases() {
        for (t, h, g, d, window) in [
            (1, 1, 1, 8, 1),
            (64, 2, 2, 32, 64),
            (65, 4, 1, 64, 7),
            (130, 2, 1, 128, 65),
            (128, 2, 2, 96, 64),
            (100, 2, 2, 16, 99),
            (100, 2, 2, 16, 98),
            (33, 2, 2, 64, 0),
            (40, 2, 1, 20, 9),
        ] {
            let what = format!("{device:?} {kind:?} t {t}, h {h}, g {g}, d {d}, window {window}");
            let [q, k, v, grad] = [h, g, g, h].map(|heads| random(&[2, t, heads, d], (kind, device)));
            let run = |cast: fn(&Tensor) -> TchTensor| {
                let [q, k, v] = [&q, &k, &v].map(cast);
                (q, k, v, cast(&grad))
            };
            let (q32, k32, v32, grad32) = run(wide);
            let (expected, expected_sums) =
                portable::attention_forward::<LibTorch>(q32.clone(), k32.clone(), v32.clone(), window);
            let (out, log_sum_exp) = {
                let (q, k, v, _) = run(burn);
                LibTorch::attention_forward(q, k, v, window)
            };
            assert_close(&out, &expected, largest, &format!("attention {what}"));
            assert_close(&log_sum_exp, &expected_sums, largest, &format!("log-sum-exp {what}"));
            let (q, k, v, grad) = run(burn);
            let found = LibTorch::attention_backward(AttentionState { q, k, v, out, log_sum_exp, window }, grad);
            let (q, k, v) = (q32, k32, v32);
            let state = AttentionState { q, k, v, out: expected, log_sum_exp: expected_sums, window };
            let expected = portable::attention_backward::<LibTorch>(state, grad32);
            for (name, (found, expected)) in ["q", "k", "v"].iter().zip(found.iter().zip(&expected)) {
                // A query that sees one key only has a weight of 1: the gradients of q and k are nought but rounding.
                if expected.tensor.norm().double_value(&[]) > 1e-3 {
                    assert_close(found, expected, 2.0 * largest, &format!("gradient of {name}, attention {what}"));
                }
            }
        }
    }
}

#[test]
fn fused_attention_is_there_for_the_usual_heads() {
    for (device, kind, _) in cases() {
        for (h, g, d, window) in [(4, 4, 128, 1 << 10), (4, 4, 128, 64), (8, 2, 64, 64), (2, 1, 32, 100)] {
            let (q, k) = (random(&[1, 128, h, d], (kind, device)), random(&[1, 128, g, d], (kind, device)));
            let plan = choice::plan(&q, &k, window);
            assert!(plan.is_some(), "{device:?} {kind:?} h {h}, g {g}, d {d}, window {window}");
        }
    }
}

#[test]
fn newton_schulz_agrees_with_the_portable_body() {
    for (device, kind, largest) in cases() {
        for shape in [[3i64, 64, 64], [2, 96, 32], [2, 32, 96]] {
            let (x, coefficients) = (random(&shape, (kind, device)), vec![(3.0, -2.5, 0.5); 3]);
            let found = LibTorch::newton_schulz(burn(&x), coefficients.clone());
            let expected = portable::newton_schulz::<LibTorch>(wide(&x), coefficients);
            assert_eq!(found.tensor.kind(), kind);
            // Five roundings of every product.
            assert_close(&found, &expected, 5.0 * largest, &format!("{device:?} {kind:?} {shape:?}"));
        }
    }
}

// The makers' compilers need no GPU.

/// It comes with a libtorch for CUDA.
#[test]
fn kernels_compile_for_nvidias_gpus() {
    match Compiler::cuda(&libraries(&["libnvrtc-builtins.so", "libnvrtc.so"])) {
        Ok(compiler) => assert_compiles(&compiler, &["--gpu-architecture=sm_80", "--gpu-architecture=sm_90"]),
        // A program that was built elsewhere does not find it where it was built.
        Err(problem) if cfg!(libtorch_gpu = "cuda") && Path::new(env!("LIBTORCH_LIBRARIES")).exists() => {
            panic!("libtorch is for CUDA, expected NVRTC with it: {problem}")
        }
        Err(problem) => eprintln!("compiling the kernels with NVRTC is left out: {problem}"),
    }
}

/// It comes with a libtorch for ROCm, and Linux distributions have it.
#[test]
fn kernels_compile_for_amds_gpus() {
    match Compiler::hip(&libraries(&["libhiprtc.so", "libamdhip64.so"])) {
        Ok(compiler) => assert_compiles(&compiler, &["--offload-arch=gfx1030", "--offload-arch=gfx90a"]),
        Err(problem) => eprintln!("compiling the kernels with HIPRTC is left out: {problem}"),
    }
}

fn assert_compiles(compiler: &Compiler, architectures: &[&str]) {
    for architecture in architectures {
        for kind in [Kind::Float, Kind::BFloat16] {
            let options = kernels::options(kind).into_iter().chain([architecture.to_string()]);
            let options: Vec<_> = options.map(|option| c_string(&option).unwrap()).collect();
            let code = compiler.compile(kernels::SOURCE, &options);
            let code = code.unwrap_or_else(|problem| panic!("{options:?}: {problem}"));
            let missing = kernels::NAMES.iter().filter(|name| !contains(&code, format!("\0{name}\0").as_bytes()));
            assert_eq!(missing.collect::<Vec<_>>(), Vec::<&&str>::new(), "{options:?}: missing kernels");
        }
    }
}

fn libraries(names: &[&str]) -> Arc<Libraries> {
    let files = names.iter().flat_map(|name| files_of(name));
    // SAFETY: the makers' compilers.
    let loaded = files.filter_map(|file| unsafe { Library::new(file) }.ok()).collect();
    Arc::new(Libraries { loaded, problems: Vec::new() })
}

fn contains(code: &[u8], name: &[u8]) -> bool {
    code.windows(name.len()).any(|window| window == name)
}

/// Files of a library, whatever the version, in libtorch's folder, its neighbours and the system's.
fn files_of(library: &str) -> Vec<PathBuf> {
    let packages = Path::new(env!("LIBTORCH_LIBRARIES")).join("../..");
    let neighbours = std::fs::read_dir(packages.join("nvidia")).into_iter().flatten().flatten();
    let folders = neighbours
        .map(|entry| entry.path().join("lib"))
        .chain([env!("LIBTORCH_LIBRARIES"), "/opt/rocm/lib", "/usr/lib/x86_64-linux-gnu"].map(PathBuf::from));
    let files = folders.flat_map(|folder| std::fs::read_dir(folder).into_iter().flatten().flatten());
    let of_library = |file: &std::fs::DirEntry| file.file_name().to_string_lossy().starts_with(library);
    files.filter(of_library).map(|entry| entry.path()).collect()
}

/// The kernels above are compared with the portable bodies, by which they are replaced where they cannot be had.
#[test]
fn gpus_have_the_kernels() {
    for (device, kind, _) in cases().filter(|(device, ..)| device.is_cuda()) {
        assert!(kernels::of(&[&random(&[16, 16], (kind, device))]).is_some(), "{device:?} {kind:?}");
    }
}

/// Where a kernel with a window of its own is the fastest, the way that every GPU can go would not be tried otherwise.
#[test]
fn windows_in_blocks_agree_with_the_portable_body() {
    for (device, kind, _) in cases() {
        let kernels: &[Kernel] = match (device, kind) {
            (Device::Cpu, _) => &[Kernel::Cpu],
            (_, Kind::BFloat16) => &[Kernel::Flash, Kernel::Efficient],
            _ => &[Kernel::Efficient],
        };
        for (kernel, (t, h, g, window)) in kernels
            .iter()
            .flat_map(|kernel| [(130, 2, 1, 65), (200, 2, 2, 96), (256, 4, 4, 32)].map(|call| (*kernel, call)))
        {
            let operands = [h, g, g].map(|heads| random(&[2, t, heads, 64], (kind, device)));
            let sample = Sample::of(operands, random(&[2, t, h, 64], (kind, device)), window);
            let checked = sample.check(Plan { kernel, windowing: Windowing::Blocks });
            checked
                .unwrap_or_else(|problem| panic!("{device:?} {kind:?} {kernel:?} t {t}, window {window}: {problem}"));
        }
    }
}
