//! Bodies for libtorch on GPUs of both makers: our own kernels for what is bound by memory, libtorch's fused attention,
//! matrix products that add in place. On the CPU, and for tensors that the kernels do not know, the portable bodies.

mod attention;
pub mod choice;
mod driver;
mod kernels;
#[cfg(test)]
mod tests;
mod token_order;
mod upload;

use super::{AttentionState, FusedOps, Kernels, MixState, portable};
use burn::backend::LibTorch;
use burn::backend::ops::FloatTensorOps;
use burn_tch::TchTensor;
use tch::{Kind, Tensor};
use token_order::{TokenOrder, token_order};

/// Rows whose logits exist at once, on a GPU: its matrix products want to be large.
const ROW_CHUNK: i64 = 1 << 14;

/// What normalisation leaves for its backward pass.
#[derive(Clone, Debug)]
pub enum RmsNormState {
    /// The output, which the following matrix product keeps anyway, and 1 / rms of each row.
    Output { y: TchTensor, inverse_rms: TchTensor },
    /// The input, for the portable body.
    Input(TchTensor),
}

impl FusedOps for LibTorch {
    fn rms_norm(x: TchTensor) -> TchTensor {
        Self::rms_norm_forward(x).0
    }

    fn rotary_rms_norm(x: TchTensor, cos: TchTensor, sin: TchTensor) -> TchTensor {
        Self::rotary_rms_norm_forward(x, cos, sin).0
    }

    fn mix(x: TchTensor, x_scale: TchTensor, y: TchTensor, y_scale: TchTensor) -> TchTensor {
        let (plain_x, plain_y) = (x.tensor.contiguous(), y.tensor.contiguous());
        match kernels::of(&[&plain_x, &plain_y]) {
            Some(kernels) => {
                let scales = [&x_scale, &y_scale].map(|scale| scale.tensor.to_kind(Kind::Float));
                TchTensor::new(kernels.mix_forward(&plain_x, &scales[0], &plain_y, &scales[1]))
            }
            None => portable::mix::<Self>(x, x_scale, y, y_scale),
        }
    }

    fn gated_add(x: TchTensor, gate: TchTensor, y: TchTensor) -> TchTensor {
        let [plain_x, plain_gate, plain_y] = [&x, &gate, &y].map(|x| x.tensor.contiguous());
        match kernels::of(&[&plain_x, &plain_y]).filter(|_| plain_gate.kind() == plain_x.kind()) {
            Some(kernels) => TchTensor::new(kernels.gated_add_forward(&plain_x, &plain_gate, &plain_y)),
            None => portable::gated_add::<Self>(x, gate, y),
        }
    }

    fn squared_relu(x: TchTensor) -> TchTensor {
        let plain = x.tensor.contiguous();
        match kernels::of(&[&plain]) {
            Some(kernels) => TchTensor::new(kernels.squared_relu_forward(&plain)),
            None => portable::squared_relu::<Self>(x),
        }
    }

    fn causal_attention(q: TchTensor, k: TchTensor, v: TchTensor, window: usize) -> TchTensor {
        match choice::inference_plan(&q.tensor, &k.tensor, window) {
            Some(plan) => TchTensor::new(attend(plan, &q, &k, &v, window).0),
            None => portable::attention_forward::<Self>(q, k, v, window).0,
        }
    }

    fn warm_up(sample: TchTensor) -> TchTensor {
        // Compiles the kernels, and has libtorch load its libraries for matrix products.
        drop((kernels::of(&[&sample.tensor]), sample.tensor.mm(&sample.tensor)));
        sample
    }

    fn upload(place: TchTensor, numbers: Vec<i64>) -> TchTensor {
        TchTensor::new(upload::upload(&numbers, place.tensor.device()))
    }

    fn accumulate(mut total: TchTensor, part: TchTensor) -> TchTensor {
        // libtorch casts on the way.
        let in_place = total.mut_ops(|total| total.g_add_(&part.tensor));
        in_place.unwrap_or_else(|| TchTensor::new((&total.tensor + &part.tensor).to_kind(total.tensor.kind())))
    }

    fn newton_schulz(x: TchTensor, coefficients: Vec<(f64, f64, f64)>) -> TchTensor {
        let size = x.tensor.size();
        // The Gram matrix of the shorter side: fewer operations.
        let tall = size[1] > size[2];
        // In float32: a sum over a whole matrix loses too much in half precision.
        let square = x.tensor.to_kind(Kind::Float).square();
        let norm = square.sum_dim_intlist([1i64, 2].as_slice(), true, Kind::Float).sqrt(); // [n, 1, 1]
        let mut x = &x.tensor / (norm * 1.02 + 1e-6).to_kind(x.tensor.kind());
        for (a, b, c) in coefficients {
            let transposed = x.transpose(1, 2);
            let gram = if tall { transposed.bmm(&x) } else { x.bmm(&transposed) };
            let polynomial = gram.baddbmm(&gram, &gram, b, c);
            x = if tall { x.baddbmm(&x, &polynomial, a, 1.0) } else { x.baddbmm(&polynomial, &x, a, 1.0) };
        }
        TchTensor::new(x)
    }
}

impl Kernels for LibTorch {
    type RmsNormState = RmsNormState;

    fn embed_backward(weight: TchTensor, tokens: TchTensor, grad: TchTensor) -> TchTensor {
        let (v, c) = (weight.tensor.size()[0], weight.tensor.size()[1]);
        let plain = grad.tensor.contiguous().view([-1, c]);
        match kernels::of(&[&plain]).filter(|_| tokens.tensor.kind() == Kind::Int64) {
            Some(kernels) => {
                let TokenOrder { order, starts } = token_order(&tokens, v);
                TchTensor::new(kernels.embedding_backward(&plain, &order, &starts, v))
            }
            None => portable::embedding_backward::<Self>(weight, tokens, grad),
        }
    }

    fn rms_norm_forward(x: TchTensor) -> (TchTensor, RmsNormState) {
        let plain = x.tensor.contiguous();
        match kernels::of(&[&plain]) {
            Some(kernels) => output_state(kernels.rms_norm_forward(&plain)),
            None => (portable::rms_norm::<Self>(x.clone()), RmsNormState::Input(x)),
        }
    }

    fn rms_norm_backward(saved: RmsNormState, grad: TchTensor) -> TchTensor {
        match saved {
            RmsNormState::Input(x) => portable::rms_norm_backward::<Self>(x, grad),
            RmsNormState::Output { y, inverse_rms } => {
                let plain = grad.tensor.contiguous();
                match kernels::of(&[&y.tensor, &plain]) {
                    Some(kernels) => TchTensor::new(kernels.rms_norm_backward(&y.tensor, &inverse_rms.tensor, &plain)),
                    None => TchTensor::new(rms_norm_backward_of_output(&y.tensor, &inverse_rms.tensor, &plain)),
                }
            }
        }
    }

    fn rotary_rms_norm_forward(x: TchTensor, cos: TchTensor, sin: TchTensor) -> (TchTensor, RmsNormState) {
        let plain = x.tensor.contiguous();
        match kernels::of(&[&plain, &cos.tensor, &sin.tensor]) {
            Some(kernels) => output_state(kernels.rotary_rms_norm_forward(&plain, &cos.tensor, &sin.tensor)),
            None => Self::rms_norm_forward(Self::rotary(x, cos, sin)),
        }
    }

    fn rotary_rms_norm_backward(saved: RmsNormState, cos: TchTensor, sin: TchTensor, grad: TchTensor) -> TchTensor {
        if let RmsNormState::Output { y, inverse_rms } = &saved {
            let plain = grad.tensor.contiguous();
            if let Some(kernels) = kernels::of(&[&y.tensor, &plain, &cos.tensor, &sin.tensor]) {
                let (y, inverse_rms) = (&y.tensor, &inverse_rms.tensor);
                let dx = kernels.rotary_rms_norm_backward(y, inverse_rms, &plain, &cos.tensor, &sin.tensor);
                return TchTensor::new(dx);
            }
        }
        Self::rotary(Self::rms_norm_backward(saved, grad), cos, Self::float_neg(sin))
    }

    fn mix_backward(saved: MixState<Self>, grad: TchTensor) -> [TchTensor; 4] {
        let [x, y, plain] = [&saved.x, &saved.y, &grad].map(|x| x.tensor.contiguous());
        match kernels::of(&[&x, &y, &plain]) {
            Some(kernels) => {
                let kinds = [&saved.x_scale, &saved.y_scale].map(|scale| scale.tensor.kind());
                let [x_scale, y_scale] =
                    [&saved.x_scale, &saved.y_scale].map(|scale| scale.tensor.to_kind(Kind::Float));
                let [dx, dx_scale, dy, dy_scale] = kernels.mix_backward(&x, &x_scale, &y, &y_scale, &plain);
                [dx, dx_scale.to_kind(kinds[0]), dy, dy_scale.to_kind(kinds[1])].map(TchTensor::new)
            }
            None => portable::mix_backward::<Self>(saved, grad),
        }
    }

    fn gated_add_backward(gate: TchTensor, y: TchTensor, grad: TchTensor) -> [TchTensor; 2] {
        let [plain_gate, plain_y, plain_grad] = [&gate, &y, &grad].map(|x| x.tensor.contiguous());
        match kernels::of(&[&plain_y, &plain_grad]).filter(|_| plain_gate.kind() == plain_y.kind()) {
            Some(kernels) => kernels.gated_add_backward(&plain_gate, &plain_y, &plain_grad).map(TchTensor::new),
            None => portable::gated_add_backward::<Self>(gate, y, grad),
        }
    }

    fn squared_relu_backward(out: TchTensor, grad: TchTensor) -> TchTensor {
        let [plain_out, plain_grad] = [&out, &grad].map(|x| x.tensor.contiguous());
        match kernels::of(&[&plain_out, &plain_grad]) {
            Some(kernels) => TchTensor::new(kernels.squared_relu_backward(&plain_out, &plain_grad)),
            None => portable::squared_relu_backward::<Self>(out, grad),
        }
    }

    fn attention_forward(q: TchTensor, k: TchTensor, v: TchTensor, window: usize) -> (TchTensor, TchTensor) {
        let Some(plan) = choice::plan(&q.tensor, &k.tensor, window) else {
            return portable::attention_forward::<Self>(q, k, v, window);
        };
        let (out, log_sum_exp) = attend(plan, &q, &k, &v, window);
        (TchTensor::new(out), TchTensor::new(log_sum_exp))
    }

    fn attention_backward(saved: AttentionState<Self>, grad: TchTensor) -> [TchTensor; 3] {
        let Some(plan) = choice::plan(&saved.q.tensor, &saved.k.tensor, saved.window) else {
            return portable::attention_backward::<Self>(saved, grad);
        };
        let AttentionState { q, k, v, out, log_sum_exp, window } = saved;
        let state = attention::State {
            operands: [q.tensor, k.tensor, v.tensor],
            out: out.tensor,
            log_sum_exp: log_sum_exp.tensor,
        };
        let gradients = plan.backward(state, &grad.tensor.contiguous(), window);
        gradients
            .unwrap_or_else(|problem| panic!("attention by {plan}: {problem}; {}", kernels::LATE_ERROR))
            .map(TchTensor::new)
    }

    fn softcap_cross_entropy_gradients(
        hidden: TchTensor,
        weight: TchTensor,
        targets: TchTensor,
        cap: f64,
    ) -> (TchTensor, [TchTensor; 2]) {
        let plain = hidden.tensor.contiguous();
        let cast = weight.tensor.to_kind(plain.kind()).contiguous();
        // Rows of logits go through the kernel, too: their length has to fit.
        let row = Tensor::empty([1, cast.size()[0]], (plain.kind(), plain.device()));
        let Some(kernels) = kernels::of(&[&plain, &cast, &row]) else {
            return portable::softcap_cross_entropy_gradients::<Self>(hidden, weight, targets, cap);
        };
        let (n, targets) = (plain.size()[0], targets.tensor.to_kind(Kind::Int64).contiguous());
        let dhidden = plain.empty_like();
        let mut dweight = Tensor::zeros(cast.size(), (Kind::Float, plain.device()));
        let mut losses = Vec::new();
        for start in (0..n).step_by(ROW_CHUNK as usize) {
            let rows = ROW_CHUNK.min(n - start);
            let hidden = plain.narrow(0, start, rows);
            let logits = hidden.mm(&cast.tr()); // [rows, v]
            losses.push(kernels.softcap_cross_entropy(&logits, &targets.narrow(0, start, rows), cap, 1.0 / n as f64));
            // The logits are now their own gradient.
            let _ = logits.mm_out(&dhidden.narrow(0, start, rows), &cast);
            let _ = dweight.g_add_(&logits.tr().mm(&hidden));
        }
        let loss = Tensor::cat(&losses, 0).mean(Kind::Float).reshape([1]);
        let dweight = dweight.to_kind(weight.tensor.kind());
        (TchTensor::new(loss), [TchTensor::new(dhidden), TchTensor::new(dweight)])
    }
}

fn attend(plan: attention::Plan, q: &TchTensor, k: &TchTensor, v: &TchTensor, window: usize) -> (Tensor, Tensor) {
    let outputs = plan.forward(&q.tensor, &k.tensor, &v.tensor, window);
    outputs.unwrap_or_else(|problem| panic!("attention by {plan}: {problem}; {}", kernels::LATE_ERROR))
}

fn output_state((y, inverse_rms): (Tensor, Tensor)) -> (TchTensor, RmsNormState) {
    let (y, inverse_rms) = (TchTensor::new(y), TchTensor::new(inverse_rms));
    (y.clone(), RmsNormState::Output { y, inverse_rms })
}

/// For a gradient that the kernels do not know: r · (grad − y · mean(grad · y)).
fn rms_norm_backward_of_output(y: &Tensor, inverse_rms: &Tensor, grad: &Tensor) -> Tensor {
    let mut rows = y.size();
    *rows.last_mut().expect("rows have an axis") = 1;
    let (wide_y, wide_grad) = (y.to_kind(Kind::Float), grad.to_kind(Kind::Float));
    let mean = (&wide_grad * &wide_y).mean_dim(-1i64, true, Kind::Float);
    ((wide_grad - wide_y * mean) * inverse_rms.reshape(rows)).to_kind(y.kind())
}
