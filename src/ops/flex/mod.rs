//! Bodies for the portable CPU backend: row-wise float32 kernels over slices, parallel over rows or heads.
//!
//! Each takes the portable road for tensors that are not float32.

mod attention;
mod loss;
mod math;
mod matrix;
mod newton_schulz;
mod rows;

use super::{AttentionState, FusedOps, Kernels, MixState, portable};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Flex, TensorMetadata};
use burn::tensor::{DType, TensorData};

type Float = FloatTensor<Flex>;

/// Elements that one parallel task should have at least: below, hand-over costs more than it saves.
const TASK_ELEMENTS: usize = 1 << 14;

fn all_f32(tensors: &[&Float]) -> bool {
    tensors.iter().all(|x| x.dtype() == DType::F32)
}

/// The elements of a contiguous float32 tensor in row-major order.
fn elements(x: &Float) -> &[f32] {
    x.as_slice::<f32>().expect("a contiguous float32 tensor")
}

/// The only element of a one-element float32 tensor.
fn scalar(x: &Float) -> f32 {
    elements(&x.to_contiguous())[0]
}

fn tensor(values: Vec<f32>, shape: impl Into<burn::tensor::Shape>) -> Float {
    Float::from_data(TensorData::new(values, shape))
}

impl FusedOps for Flex {
    fn rms_norm(x: Float) -> Float {
        if !all_f32(&[&x]) {
            return portable::rms_norm::<Self>(x);
        }
        let x = x.to_contiguous();
        tensor(rows::rms_norm(elements(&x), last_axis(&x)), x.shape())
    }

    fn rotary(x: Float, cos: Float, sin: Float) -> Float {
        if !all_f32(&[&x, &cos, &sin]) {
            return portable::rotary::<Self>(x, cos, sin);
        }
        let (x, cos, sin) = (x.to_contiguous(), cos.to_contiguous(), sin.to_contiguous());
        let shape = x.shape();
        let values = rows::rotary(elements(&x), elements(&cos), elements(&sin), shape[1], shape[2], shape[3]);
        tensor(values, shape)
    }

    fn squared_relu(x: Float) -> Float {
        if !all_f32(&[&x]) {
            return portable::squared_relu::<Self>(x);
        }
        let x = x.to_contiguous();
        tensor(rows::squared_relu(elements(&x)), x.shape())
    }

    fn mix(x: Float, x_scale: Float, y: Float, y_scale: Float) -> Float {
        if !all_f32(&[&x, &x_scale, &y, &y_scale]) {
            return portable::mix::<Self>(x, x_scale, y, y_scale);
        }
        let (x, y) = (x.to_contiguous(), y.to_contiguous());
        tensor(rows::mix(elements(&x), scalar(&x_scale), elements(&y), scalar(&y_scale)), x.shape())
    }

    fn causal_attention(q: Float, k: Float, v: Float, window: usize) -> Float {
        Self::attention_forward(q, k, v, window).0
    }

    fn softcap_cross_entropy(hidden: Float, weight: Float, targets: IntTensor<Self>, cap: f64) -> Float {
        if !all_f32(&[&hidden, &weight]) {
            return portable::softcap_cross_entropy::<Self>(hidden, weight, targets, cap);
        }
        let (hidden, weight) = (hidden.to_contiguous(), weight.to_contiguous());
        let targets = indices(targets);
        let loss = loss::Head::new(elements(&hidden), elements(&weight), &targets, cap as f32).loss();
        tensor(vec![loss], [1])
    }

    fn softcap(x: Float, cap: f64) -> Float {
        if !all_f32(&[&x]) {
            return portable::softcap::<Self>(x, cap);
        }
        let x = x.to_contiguous();
        tensor(rows::softcap(elements(&x), cap as f32), x.shape())
    }

    fn cross_entropy(logits: Float, targets: IntTensor<Self>) -> Float {
        if !all_f32(&[&logits]) {
            return portable::cross_entropy::<Self>(logits, targets);
        }
        let (logits, targets) = (logits.to_contiguous(), indices(targets));
        let n = targets.len();
        tensor(loss::cross_entropy(elements(&logits), &targets), [n])
    }

    fn newton_schulz(x: Float, coefficients: Vec<(f64, f64, f64)>) -> Float {
        if !all_f32(&[&x]) {
            return portable::newton_schulz::<Self>(x, coefficients);
        }
        let (x, shape) = (x.to_contiguous(), x.shape());
        let coefficients: Vec<[f32; 3]> =
            coefficients.into_iter().map(|(a, b, c)| [a as f32, b as f32, c as f32]).collect();
        tensor(newton_schulz::newton_schulz(elements(&x), shape[1], shape[2], &coefficients), shape)
    }
}

impl Kernels for Flex {
    type RmsNormState = Float;

    fn rms_norm_forward(x: Float) -> (Float, Float) {
        (Self::rms_norm(x.clone()), x)
    }

    fn rms_norm_backward(x: Float, grad: Float) -> Float {
        if !all_f32(&[&x, &grad]) {
            return portable::rms_norm_backward::<Self>(x, grad);
        }
        let (x, grad) = (x.to_contiguous(), grad.to_contiguous());
        tensor(rows::rms_norm_backward(elements(&x), elements(&grad), last_axis(&x)), x.shape())
    }

    fn mix_backward(saved: MixState<Self>, grad: Float) -> [Float; 4] {
        let MixState { x, x_scale, y, y_scale } = &saved;
        if !all_f32(&[x, x_scale, y, y_scale, &grad]) {
            return portable::mix_backward::<Self>(saved, grad);
        }
        let (x, y, grad) = (x.to_contiguous(), y.to_contiguous(), grad.to_contiguous());
        let scaled = |scale: &Float| tensor(rows::scale(elements(&grad), scalar(scale)), grad.shape());
        let dot = |x: &Float| tensor(vec![rows::dot(elements(&grad), elements(x))], [1]);
        [scaled(x_scale), dot(&x), scaled(y_scale), dot(&y)]
    }

    fn squared_relu_backward(out: Float, grad: Float) -> Float {
        if !all_f32(&[&out, &grad]) {
            return portable::squared_relu_backward::<Self>(out, grad);
        }
        let (out, grad) = (out.to_contiguous(), grad.to_contiguous());
        tensor(rows::squared_relu_backward(elements(&out), elements(&grad)), out.shape())
    }

    fn attention_forward(q: Float, k: Float, v: Float, window: usize) -> (Float, Float) {
        if !all_f32(&[&q, &k, &v]) {
            return portable::attention_forward::<Self>(q, k, v, window);
        }
        let (q, k, v) = (q.to_contiguous(), k.to_contiguous(), v.to_contiguous());
        let sizes = attention::Sizes::new(&q.shape(), &k.shape(), window);
        let (out, log_sum_exp) = attention::forward(&sizes, elements(&q), elements(&k), elements(&v));
        (tensor(out, q.shape()), tensor(log_sum_exp, [sizes.b, sizes.h, sizes.t]))
    }

    fn attention_backward(saved: AttentionState<Self>, grad: Float) -> [Float; 3] {
        if !all_f32(&[&saved.q, &saved.k, &saved.v, &saved.out, &grad]) {
            return portable::attention_backward::<Self>(saved, grad);
        }
        let [q, k, v, out, log_sum_exp, grad] =
            [saved.q, saved.k, saved.v, saved.out, saved.log_sum_exp, grad].map(|x| x.to_contiguous());
        let sizes = attention::Sizes::new(&q.shape(), &k.shape(), saved.window);
        let saved = attention::Saved {
            q: elements(&q),
            k: elements(&k),
            v: elements(&v),
            out: elements(&out),
            log_sum_exp: elements(&log_sum_exp),
        };
        let [dq, dk, dv] = attention::backward(&sizes, &saved, elements(&grad));
        [tensor(dq, q.shape()), tensor(dk, k.shape()), tensor(dv, v.shape())]
    }

    fn softcap_cross_entropy_gradients(
        hidden: Float,
        weight: Float,
        targets: IntTensor<Self>,
        cap: f64,
    ) -> (Float, [Float; 2]) {
        if !all_f32(&[&hidden, &weight]) {
            return portable::softcap_cross_entropy_gradients::<Self>(hidden, weight, targets, cap);
        }
        let (hidden, weight) = (hidden.to_contiguous(), weight.to_contiguous());
        let targets = indices(targets);
        let head = loss::Head::new(elements(&hidden), elements(&weight), &targets, cap as f32);
        let (loss, dhidden, dweight) = head.loss_and_gradients();
        (tensor(vec![loss], [1]), [tensor(dhidden, hidden.shape()), tensor(dweight, weight.shape())])
    }
}

fn last_axis(x: &Float) -> usize {
    let shape = x.shape();
    shape[shape.num_dims() - 1]
}

fn indices(x: IntTensor<Flex>) -> Vec<usize> {
    x.into_data().iter::<i64>().map(|i| i as usize).collect()
}
