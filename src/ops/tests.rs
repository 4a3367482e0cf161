//! Each operation against its plain form under burn's own autodiff, and the fast bodies against the portable ones.

use super::*;
use burn::backend::Flex;
use burn::tensor::{Bool, DType, Device, Distribution, TensorData, activation};
use chacha20::ChaCha8Rng;
use rand::SeedableRng;

fn random(shape: &[usize], seed: u64) -> TensorData {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    TensorData::random::<f32, _, _>(shape.to_vec(), Distribution::Normal(0.0, 1.0), &mut rng)
}

fn relative_error(found: &TensorData, expected: &TensorData) -> f64 {
    assert_eq!(found.shape(), expected.shape());
    let (mut difference, mut norm) = (0f64, 0f64);
    for (a, b) in found.iter::<f64>().zip(expected.iter::<f64>()) {
        difference += (a - b).powi(2);
        norm += b.powi(2);
    }
    difference.sqrt() / norm.sqrt().max(1e-30)
}

fn assert_close(found: TensorData, expected: TensorData, what: &str) {
    let error = relative_error(&found, &expected);
    assert!(error < 1e-5, "{what}: relative error {error}");
}

/// Runs `fused` on `devices` and `plain` on the CPU, on the same inputs; outputs and the gradients of all inputs must agree.
fn agree<const D: usize, const E: usize, const N: usize>(
    devices: Vec<Device>,
    shapes: [[usize; D]; N],
    fused: impl Fn([Tensor<D>; N]) -> Tensor<E>,
    plain: impl Fn([Tensor<D>; N]) -> Tensor<E>,
) {
    let run = |device: &Device, f: &dyn Fn([Tensor<D>; N]) -> Tensor<E>| {
        let device = device.clone().autodiff();
        let mut seed = 0;
        let inputs = shapes.map(|shape| {
            seed += 1;
            Tensor::<D>::from_data(random(&shape, seed), &device).require_grad()
        });
        let out = f(inputs.clone());
        let weights = Tensor::<E>::from_data(random(&out.dims(), 99), &device);
        let gradients = (out.clone() * weights).sum().backward();
        let gradients = inputs.map(|input| input.grad(&gradients).expect("every input has a gradient").into_data());
        (out.into_data(), gradients)
    };
    let (expected, expected_gradients) = run(&Device::flex(), &plain);
    for device in devices {
        let (found, found_gradients) = run(&device, &fused);
        assert_close(found, expected.clone(), &format!("output on {device:?}"));
        for (i, (found, expected)) in found_gradients.into_iter().zip(expected_gradients.clone()).enumerate() {
            assert_close(found, expected, &format!("gradient of input {i} on {device:?}"));
        }
    }
}

fn cpu() -> Vec<Device> {
    vec![Device::flex()]
}

/// The CPU, and the best adapter of wgpu if there is one. Mesa's for the CPU takes a minute to compile the kernels of each new
/// shape: the case that goes through most of an operation's code is enough there.
fn all_devices() -> Vec<Device> {
    cpu().into_iter().chain(best_adapter()).collect()
}

#[cfg(feature = "wgpu")]
fn best_adapter() -> Option<Device> {
    if crate::device::wgpu::adapters().is_empty() {
        eprintln!("left out: wgpu finds no adapter");
        return None;
    }
    let compute = crate::device::wgpu::device(0, "wgpu", crate::device::compute_type::ComputeType::Float32);
    Some(compute.expect("the adapter can be used").device)
}

#[cfg(not(feature = "wgpu"))]
fn best_adapter() -> Option<Device> {
    None
}

fn plain_rms_norm<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let mean_square = x.clone().square().mean_dim(D - 1);
    x / (mean_square + f32::EPSILON).sqrt()
}

fn plain_attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, window: usize) -> Tensor<4> {
    let ([b, t, h, d], [_, _, g, _]) = (q.dims(), k.dims());
    let repeated = |x: Tensor<4>| x.unsqueeze_dim::<5>(3).repeat_dim(3, h / g).reshape([b, t, h, d]).swap_dims(1, 2);
    let scores = q.swap_dims(1, 2).matmul(repeated(k).swap_dims(2, 3)) / (d as f64).sqrt();
    let hidden: Vec<bool> = (0..t * t).map(|at| (at / t, at % t)).map(|(i, j)| j > i || i - j > window).collect();
    let mask = Tensor::<2, Bool>::from_data(TensorData::new(hidden, [t, t]), &scores.device());
    let scores = scores.mask_fill(mask.reshape([1, 1, t, t]).expand([b, h, t, t]), f32::NEG_INFINITY);
    activation::softmax(scores, 3).matmul(repeated(v)).swap_dims(1, 2)
}

#[test]
fn rms_norm_agrees_with_its_formula() {
    for (c, devices) in [(4, cpu()), (5, cpu()), (32, cpu()), (100, all_devices())] {
        agree(devices, [[3, 7, c]], |[x]| rms_norm(x), |[x]| plain_rms_norm(x));
    }
}

#[test]
fn rotary_turns_pairs_by_the_angle() {
    let device = Device::flex();
    let angles = Tensor::<2>::from_data(random(&[6, 4], 5), &device);
    let (cos, sin) = (angles.clone().cos(), angles.sin());
    let plain = |[x]: [Tensor<4>; 1]| {
        let (cos, sin) = (cos.clone().reshape([1, 6, 1, 4]), sin.clone().reshape([1, 6, 1, 4]));
        let (a, b) = (x.clone().slice([0..2, 0..6, 0..3, 0..4]), x.slice([0..2, 0..6, 0..3, 4..8]));
        Tensor::cat(vec![a.clone() * cos.clone() + b.clone() * sin.clone(), b * cos - a * sin], 3)
    };
    let at = |angles: &Tensor<2>, x: &Tensor<4>| angles.clone().to_device(&x.device());
    agree(all_devices(), [[2, 6, 3, 8]], |[x]| rotary(x.clone(), at(&cos, &x), at(&sin, &x)), plain);
}

#[test]
fn embedding_takes_rows_and_adds_up_their_gradients() {
    // More tokens than a chunk holds, too.
    for (b, t, devices) in [(2, 3, cpu()), (1, 5000, all_devices())] {
        let ids: Vec<i32> = (0..b * t).map(|at| [3, 0, 3, 1, 3, 1][at % 6]).collect();
        let one_hot = ids.iter().flat_map(|&id| (0..4).map(move |row| f32::from(id == row))).collect::<Vec<f32>>();
        let tokens = Tensor::<2, Int>::from_data(TensorData::new(ids, [b, t]), &Device::flex());
        let one_hot = Tensor::<2>::from_data(TensorData::new(one_hot, [b * t, 4]), &Device::flex());
        agree(
            devices,
            [[4, 5]],
            |[w]| embedding(w.clone(), tokens.clone().to_device(&w.device())),
            |[w]| one_hot.clone().matmul(w).reshape([b, t, 5]),
        );
    }
}

#[test]
fn squared_relu_agrees_with_its_formula() {
    agree(all_devices(), [[3, 50]], |[x]| squared_relu(x), |[x]| activation::relu(x).square());
}

#[test]
fn gated_add_agrees_with_its_formula() {
    let gate = |x: Tensor<4>| x.slice([0..2, 0..3, 0..4, 0..1]).reshape([2, 3, 4]);
    agree(
        all_devices(),
        [[2, 3, 4, 5]; 3],
        |[x, g, y]| gated_add(x, gate(g), y),
        |[x, g, y]| x + activation::sigmoid(gate(g)).reshape([2, 3, 4, 1]) * 2.0 * y,
    );
}

#[test]
fn project_agrees_with_matmul() {
    // Of many rows a weight's gradient may be a sum of products.
    for (n, devices) in [(9, cpu()), (8192, all_devices())] {
        agree(devices, [[n, 5], [4, 5]], |[x, w]| project(x, w), |[x, w]| x.matmul(w.transpose()));
    }
}

#[test]
fn mix_agrees_with_its_formula() {
    let one = |x: Tensor<3>| x.slice([0..1, 0..1, 0..1]).reshape([1]);
    agree(
        all_devices(),
        [[2, 3, 70], [2, 3, 70], [2, 3, 70]],
        |[x, y, scales]| mix(x, one(scales.clone()), y, one(scales.slice([1..2, 0..1, 0..1]))),
        |[x, y, scales]| x * scales.clone().slice([0..1, 0..1, 0..1]) + y * scales.slice([1..2, 0..1, 0..1]),
    );
}

#[test]
fn attention_agrees_with_full_scores_for_any_length_window_and_grouping() {
    for (t, h, g, window, devices) in [
        (1, 1, 1, 1, cpu()),
        (5, 2, 2, 2, cpu()),
        (64, 4, 2, 64, cpu()),
        (65, 4, 1, 7, cpu()),
        (130, 2, 1, 65, cpu()),
        (130, 2, 2, 0, cpu()),
        (300, 2, 1, 100, all_devices()),
    ] {
        let (q, k) = ([2, t, h, 8], [2, t, g, 8]);
        let run = |device: &Device, f: &dyn Fn(Tensor<4>, Tensor<4>, Tensor<4>, usize) -> Tensor<4>| {
            let device = device.clone().autodiff();
            let inputs = [(q, 1), (k, 2), (k, 3)]
                .map(|(shape, seed)| Tensor::<4>::from_data(random(&shape, seed), &device).require_grad());
            let [q, k, v] = inputs.clone();
            let out = f(q, k, v, window);
            let weights = Tensor::<4>::from_data(random(&out.dims(), 9), &device);
            let gradients = (out.clone() * weights).sum().backward();
            (out.into_data(), inputs.map(|x| x.grad(&gradients).expect("a gradient").into_data()))
        };
        let (expected, expected_gradients) = run(&Device::flex(), &plain_attention);
        for device in devices {
            let (found, found_gradients) = run(&device, &causal_attention);
            let case = format!("t {t}, h {h}, g {g}, window {window} on {device:?}");
            assert_close(found, expected.clone(), &case);
            for (found, expected) in found_gradients.into_iter().zip(expected_gradients.clone()) {
                // With no token back the weights are all 1: the gradients of q and k are nought but rounding.
                let size: f64 = expected.iter::<f64>().map(f64::abs).sum();
                if size > 1e-3 {
                    assert_close(found, expected, &format!("{case}, gradients"));
                }
            }
        }
    }
}

#[test]
fn window_limits_what_a_query_sees() {
    let device = Device::flex();
    let (t, window) = (100, 10);
    let [q, k, v] = [1, 2, 3].map(|seed| Tensor::<4>::from_data(random(&[1, t, 1, 4], seed), &device));
    let before = causal_attention(q.clone(), k.clone(), v.clone(), window).into_data();
    let changed = v.slice_assign([0..1, 50..51, 0..1, 0..4], Tensor::full([1, 1, 1, 4], 1e3, &device));
    let after = causal_attention(q, k, changed, window).into_data();
    let differs: Vec<usize> = before
        .iter::<f32>()
        .zip(after.iter::<f32>())
        .enumerate()
        .filter(|(_, (a, b))| a != b)
        .map(|(i, _)| i / 4)
        .collect();
    assert_eq!((differs.first(), differs.last()), (Some(&50), Some(&60)));
}

fn plain_loss(hidden: Tensor<2>, weight: Tensor<2>, targets: &Tensor<1, Int>) -> Tensor<1> {
    let [n, _] = hidden.dims();
    let logits = (hidden.matmul(weight.transpose()) / 15.0).tanh() * 15.0;
    activation::log_softmax(logits, 1).gather(1, targets.clone().reshape([n, 1])).mean().neg()
}

#[test]
fn loss_agrees_with_log_softmax_over_several_chunks() {
    // More logits than a chunk holds.
    for (n, c, v, devices) in [(1, 3, 5, cpu()), (7, 16, 33, cpu()), (300, 8, 9000, all_devices())] {
        let targets: Vec<i32> = (0..n).map(|i| (i * 31 % v) as i32).collect();
        let targets = Tensor::<1, Int>::from_data(TensorData::new(targets, [n]), &Device::flex());
        agree(
            devices,
            [[n, c], [v, c]],
            |[h, w]| softcap_cross_entropy(h.clone(), w, targets.clone().to_device(&h.device()), 15.0),
            |[h, w]| plain_loss(h, w, &targets),
        );
    }
}

#[test]
fn softcap_and_cross_entropy_agree_with_their_formulas() {
    agree(all_devices(), [[5, 70]], |[x]| softcap(x, 15.0), |[x]| (x / 15.0).tanh() * 15.0);
    let targets = Tensor::<1, Int>::from_data([3, 0, 69, 7, 7], &Device::flex());
    let plain = |[x]: [Tensor<2>; 1]| {
        activation::log_softmax(x, 1).gather(1, targets.clone().reshape([5, 1])).reshape([5]).neg()
    };
    agree(all_devices(), [[5, 70]], |[x]| cross_entropy(x.clone(), targets.clone().to_device(&x.device())), plain);
    let device = Device::flex();
    let logits = Tensor::<2>::from_data(random(&[5, 70], 3), &device) * 10.0;
    assert_close(
        cross_entropy(logits.clone(), targets.clone()).into_data(),
        plain([logits.clone()]).into_data(),
        "rows",
    );
    assert_close(softcap(logits.clone(), 15.0).into_data(), ((logits / 15.0).tanh() * 15.0).into_data(), "softcap");
}

#[test]
fn large_logits_stay_finite() {
    let device = Device::flex().autodiff();
    let hidden = (Tensor::<2>::from_data(random(&[4, 8], 1), &device) * 1e6).require_grad();
    let weight = Tensor::<2>::from_data(random(&[10, 8], 2), &device);
    let targets = Tensor::<1, Int>::from_data([1, 2, 3, 4], &device);
    let loss = softcap_cross_entropy(hidden.clone(), weight, targets, 15.0);
    let gradient = hidden.grad(&loss.backward()).expect("a gradient").into_data();
    assert!(loss.into_scalar::<f32>().is_finite());
    assert!(gradient.iter::<f32>().all(f32::is_finite));
}

#[test]
fn a_nan_in_the_input_reaches_the_loss() {
    let device = Device::flex();
    let hidden = Tensor::<2>::full([2, 4], f32::NAN, &device);
    let weight = Tensor::<2>::from_data(random(&[10, 4], 2), &device);
    let loss = softcap_cross_entropy(hidden, weight, Tensor::from_data([1, 2], &device), 15.0);
    assert!(loss.into_scalar::<f32>().is_nan());
}

/// Values and gradients of both, on the CPU backend's tensors.
#[test]
fn the_fast_bodies_agree_with_the_portable_ones() {
    let float = |shape: &[usize], seed| FloatTensor::<Flex>::from_data(random(shape, seed));
    let close = |found: FloatTensor<Flex>, expected: FloatTensor<Flex>, what: &str| {
        assert_close(found.into_data(), expected.into_data(), what);
    };
    let (x, grad) = (float(&[3, 5, 40], 1), float(&[3, 5, 40], 2));
    close(Flex::rms_norm(x.clone()), portable::rms_norm::<Flex>(x.clone()), "rms_norm");
    close(
        Flex::rms_norm_backward(x.clone(), grad.clone()),
        portable::rms_norm_backward::<Flex>(x.clone(), grad.clone()),
        "rms_norm_backward",
    );
    let squares = Flex::squared_relu(x.clone());
    close(
        Flex::squared_relu_backward(squares.clone(), grad.clone()),
        portable::squared_relu_backward::<Flex>(squares, grad.clone()),
        "squared_relu_backward",
    );
    let mix = MixState { x: x.clone(), x_scale: float(&[1], 3), y: float(&[3, 5, 40], 4), y_scale: float(&[1], 5) };
    let (found, expected) = (Flex::mix_backward(mix.clone(), grad.clone()), portable::mix_backward::<Flex>(mix, grad));
    for (found, expected) in found.into_iter().zip(expected) {
        close(found, expected, "mix_backward");
    }
    // Longer than the portable body's block of queries.
    let (q, k, v) = (float(&[2, 300, 4, 8], 6), float(&[2, 300, 2, 8], 7), float(&[2, 300, 2, 8], 8));
    let (out, log_sum_exp) = Flex::attention_forward(q.clone(), k.clone(), v.clone(), 100);
    let (out_portable, log_sum_exp_portable) =
        portable::attention_forward::<Flex>(q.clone(), k.clone(), v.clone(), 100);
    close(out.clone(), out_portable, "attention");
    close(log_sum_exp.clone(), log_sum_exp_portable, "log-sum-exp");
    let state = AttentionState { q, k, v, out, log_sum_exp, window: 100 };
    let grad = float(&[2, 300, 4, 8], 9);
    let found = Flex::attention_backward(state.clone(), grad.clone());
    for (found, expected) in found.into_iter().zip(portable::attention_backward::<Flex>(state, grad)) {
        close(found, expected, "attention_backward");
    }
    let targets = IntTensor::<Flex>::from_data(TensorData::new(vec![1i64, 2, 3, 0, 6], [5]));
    let (hidden, weight) = (float(&[5, 8], 10), float(&[7, 8], 11));
    let (loss, gradients) =
        Flex::softcap_cross_entropy_gradients(hidden.clone(), weight.clone(), targets.clone(), 15.0);
    let (expected, expected_gradients) =
        portable::softcap_cross_entropy_gradients::<Flex>(hidden.clone(), weight.clone(), targets.clone(), 15.0);
    close(loss.clone(), expected, "loss");
    let plain = Flex::softcap_cross_entropy(hidden.clone(), weight.clone(), targets.clone(), 15.0);
    close(loss, plain.clone(), "loss without gradients");
    close(plain, portable::softcap_cross_entropy::<Flex>(hidden, weight, targets, 15.0), "portable loss");
    for (found, expected) in gradients.into_iter().zip(expected_gradients) {
        close(found, expected, "loss gradients");
    }
    for shape in [[3, 130, 130], [2, 200, 60], [2, 60, 200], [4, 2, 32]] {
        let (x, coefficients) = (float(&shape, 12), vec![(4.0, -2.8, 0.5); 3]);
        close(
            Flex::newton_schulz(x.clone(), coefficients.clone()),
            portable::newton_schulz::<Flex>(x, coefficients),
            &format!("newton_schulz {shape:?}"),
        );
    }
}

#[test]
fn small_rows_are_normalised_in_half_precision_too() {
    let x = Tensor::<2>::full([1, 16], 2f64.powi(-6), &Device::flex()).cast(DType::BF16);
    let error = (rms_norm(x).cast(DType::F32) - 1.0).abs().max().into_scalar::<f32>();
    assert!(error < 1e-2, "{error}");
}

#[test]
fn half_precision_keeps_its_type() {
    let device = Device::flex();
    let x = Tensor::<3>::from_data(random(&[2, 3, 16], 1), &device);
    let half = rms_norm(x.clone().cast(DType::BF16));
    assert_eq!(half.dtype(), DType::BF16);
    let error = relative_error(&half.into_data_as::<f32>(), &rms_norm(x).into_data());
    assert!(error < 1e-2, "{error}");
}
