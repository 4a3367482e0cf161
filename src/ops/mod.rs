//! The few operations worth fusing: one differentiable function each for the model to call.
//!
//! Every operation has a default body of burn primitives, forward and backward (`portable`), right on every backend, and
//! faster bodies where a backend has them (`flex`: the portable CPU backend; `libtorch`: GPUs; `cube`: GPUs through CubeCL).
//! Shape legend: b batch, t time, c channels, h query heads, g key/value heads, d head dim, v vocabulary, n rows.

mod autodiff;
#[cfg(feature = "wgpu")]
pub mod cube;
#[cfg(feature = "flex")]
mod flex;
#[cfg(feature = "tch")]
mod libtorch;
mod portable;
#[cfg(all(test, feature = "flex"))]
mod tests;

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, Dispatch, backend_extension};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use std::fmt::Debug;
use std::thread::JoinHandle;

/// The operations as burn's runtime dispatch sees them; each default body is the portable one.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    LibTorch: cfg(feature = "tch"),
    Cube: cfg(feature = "wgpu"),
    Autodiff
)]
pub trait FusedOps: Backend {
    /// `x` as [`product`](FusedOps::product) takes it: for operands of more than one product.
    fn operand(x: FloatTensor<Self>) -> FloatTensor<Self> {
        x
    }

    /// The matrix product of stacks of matrices, in the type that the device multiplies in. The result has the type that
    /// activations have on the device, be the operands of that type or made by [`operand`](FusedOps::operand).
    fn product(a: FloatTensor<Self>, b: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_matmul(a, b)
    }

    /// See [`embedding`].
    fn embed(weight: FloatTensor<Self>, tokens: IntTensor<Self>) -> FloatTensor<Self> {
        portable::embedding::<Self>(weight, tokens)
    }

    /// See [`rms_norm`].
    fn rms_norm(x: FloatTensor<Self>) -> FloatTensor<Self> {
        portable::rms_norm::<Self>(x)
    }

    /// See [`rotary`].
    fn rotary(x: FloatTensor<Self>, cos: FloatTensor<Self>, sin: FloatTensor<Self>) -> FloatTensor<Self> {
        portable::rotary::<Self>(x, cos, sin)
    }

    /// See [`rotary_rms_norm`].
    fn rotary_rms_norm(x: FloatTensor<Self>, cos: FloatTensor<Self>, sin: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::rms_norm(Self::rotary(x, cos, sin))
    }

    /// See [`project`].
    fn project(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        portable::project::<Self>(x, weight)
    }

    /// See [`mix`].
    fn mix(
        x: FloatTensor<Self>,
        x_scale: FloatTensor<Self>,
        y: FloatTensor<Self>,
        y_scale: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        portable::mix::<Self>(x, x_scale, y, y_scale)
    }

    /// See [`gated_add`].
    fn gated_add(x: FloatTensor<Self>, gate: FloatTensor<Self>, y: FloatTensor<Self>) -> FloatTensor<Self> {
        portable::gated_add::<Self>(x, gate, y)
    }

    /// See [`squared_relu`].
    fn squared_relu(x: FloatTensor<Self>) -> FloatTensor<Self> {
        portable::squared_relu::<Self>(x)
    }

    /// See [`causal_attention`].
    fn causal_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        window: usize,
    ) -> FloatTensor<Self> {
        portable::attention_forward::<Self>(q, k, v, window).0
    }

    /// See [`softcap_cross_entropy`].
    fn softcap_cross_entropy(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
        cap: f64,
    ) -> FloatTensor<Self> {
        portable::softcap_cross_entropy::<Self>(hidden, weight, targets, cap)
    }

    /// See [`softcap`].
    fn softcap(x: FloatTensor<Self>, cap: f64) -> FloatTensor<Self> {
        portable::softcap::<Self>(x, cap)
    }

    /// See [`cross_entropy`].
    fn cross_entropy(logits: FloatTensor<Self>, targets: IntTensor<Self>) -> FloatTensor<Self> {
        portable::cross_entropy::<Self>(logits, targets)
    }

    /// See [`WarmUp`]; `sample` is a small matrix on the device, and comes back.
    fn warm_up(sample: FloatTensor<Self>) -> FloatTensor<Self> {
        sample
    }

    /// See [`upload`]; `place` is some tensor on the device.
    fn upload(place: IntTensor<Self>, numbers: Vec<i64>) -> IntTensor<Self> {
        portable::upload::<Self>(place, numbers)
    }

    /// See [`accumulate`].
    fn accumulate(total: FloatTensor<Self>, part: FloatTensor<Self>) -> FloatTensor<Self> {
        portable::accumulate::<Self>(total, part)
    }

    /// See [`newton_schulz`].
    fn newton_schulz(x: FloatTensor<Self>, coefficients: Vec<(f64, f64, f64)>) -> FloatTensor<Self> {
        portable::newton_schulz::<Self>(x, coefficients)
    }
}

/// What a backend supplies for training: the hand-written backward of each operation.
pub trait Kernels: FusedOps {
    /// Gradient of [`embedding`] with respect to `weight`.
    fn embed_backward(
        weight: FloatTensor<Self>,
        tokens: IntTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        portable::embedding_backward::<Self>(weight, tokens, grad)
    }

    /// What [`rms_norm`]'s forward pass leaves for its backward pass.
    type RmsNormState: Clone + Debug + Send + 'static;

    /// [`rms_norm`] and its state.
    fn rms_norm_forward(x: FloatTensor<Self>) -> (FloatTensor<Self>, Self::RmsNormState);

    /// Gradient of [`rms_norm`] with respect to `x`.
    fn rms_norm_backward(saved: Self::RmsNormState, grad: FloatTensor<Self>) -> FloatTensor<Self>;

    /// [`rotary_rms_norm`] and the normalisation's state.
    fn rotary_rms_norm_forward(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, Self::RmsNormState) {
        Self::rms_norm_forward(Self::rotary(x, cos, sin))
    }

    /// Gradient of [`rotary_rms_norm`] with respect to `x`.
    fn rotary_rms_norm_backward(
        saved: Self::RmsNormState,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        // A rotation's gradient is the rotation by the opposite angle.
        Self::rotary(Self::rms_norm_backward(saved, grad), cos, Self::float_neg(sin))
    }

    /// What gradients of a mean over `rows` rows are multiplied by, before products in a type of small range are taken of them:
    /// they are divided by it afterwards.
    fn gradient_scale(_rows: usize) -> f64 {
        1.0
    }

    /// Gradients of [`project`] with respect to `x` and `weight`.
    fn project_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 2] {
        portable::project_backward::<Self>(x, weight, grad)
    }

    /// Gradients of [`mix`] with respect to its four operands.
    fn mix_backward(saved: MixState<Self>, grad: FloatTensor<Self>) -> [FloatTensor<Self>; 4] {
        portable::mix_backward::<Self>(saved, grad)
    }

    /// Gradients of [`gated_add`] with respect to `gate` and `y`; that of `x` is `grad`.
    fn gated_add_backward(
        gate: FloatTensor<Self>,
        y: FloatTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 2] {
        portable::gated_add_backward::<Self>(gate, y, grad)
    }

    /// Gradient of [`squared_relu`] with respect to its input, from its output: 2·√out·grad.
    fn squared_relu_backward(out: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self> {
        portable::squared_relu_backward::<Self>(out, grad)
    }

    /// [`causal_attention`] and the log-sum-exp of each query's scores `[b, h, t]`.
    fn attention_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        window: usize,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        portable::attention_forward::<Self>(q, k, v, window)
    }

    /// Gradients of [`causal_attention`] with respect to `q`, `k` and `v`.
    fn attention_backward(saved: AttentionState<Self>, grad: FloatTensor<Self>) -> [FloatTensor<Self>; 3] {
        portable::attention_backward::<Self>(saved, grad)
    }

    /// [`softcap_cross_entropy`] and its gradients with respect to `hidden` and `weight`, in one pass over the logits.
    fn softcap_cross_entropy_gradients(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
        cap: f64,
    ) -> (FloatTensor<Self>, [FloatTensor<Self>; 2]) {
        portable::softcap_cross_entropy_gradients::<Self>(hidden, weight, targets, cap)
    }
}

/// What attention's forward pass leaves for its backward pass.
#[derive(Clone, Debug)]
pub struct AttentionState<B: Backend> {
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    out: FloatTensor<B>,
    log_sum_exp: FloatTensor<B>,
    window: usize,
}

/// The operands of [`mix`], which its backward pass needs again.
#[derive(Clone, Debug)]
pub struct MixState<B: Backend> {
    x: FloatTensor<B>,
    x_scale: FloatTensor<B>,
    y: FloatTensor<B>,
    y_scale: FloatTensor<B>,
}

/// What takes a moment before the first operations on a device, done in the background.
#[derive(Debug)]
pub struct WarmUp(Option<JoinHandle<()>>);

impl WarmUp {
    /// Starts it for `device` and `compute_type`.
    pub fn start(device: &Device, compute_type: FloatDType) -> Self {
        let sample = Tensor::<2>::zeros([16, 16], (device, DType::from(compute_type)));
        let work = move || drop(Tensor::<2>::from_dispatch(Dispatch::warm_up(sample.into_dispatch())));
        // Without a thread the first step takes longer.
        Self(std::thread::Builder::new().spawn(work).ok())
    }
}

impl Drop for WarmUp {
    /// Waits for it: a program that ends meanwhile would take the libraries away from under it.
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            thread.join().ok();
        }
    }
}

/// What was chosen so far where an operation can be computed in several ways, one line a choice.
pub fn choices() -> Vec<String> {
    #[cfg(feature = "tch")]
    return libtorch::choice::report();
    #[cfg(not(feature = "tch"))]
    Vec::new()
}

/// The row of `weight` for each token.
///
/// # Shapes
/// `weight` `[v, c]`, `tokens` `[b, t]`, to `[b, t, c]`.
pub fn embedding(weight: Tensor<2>, tokens: Tensor<2, Int>) -> Tensor<3> {
    Tensor::from_dispatch(Dispatch::embed(weight.into_dispatch(), tokens.into_dispatch()))
}

/// Parameter-free root-mean-square normalisation over the last axis: x / sqrt(mean(x²) + ε), ε = 2⁻²³.
///
/// Source: Zhang & Sennrich 2019, "Root Mean Square Layer Normalization", without the gain.
///
/// # Shapes
/// `x` `[.., c]` to `[.., c]`.
pub fn rms_norm<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::rms_norm(x.into_dispatch()))
}

/// Rotary position embedding: the halves (a, b) of each head become (a·cos + b·sin, b·cos − a·sin).
///
/// Source: Su et al. 2021, "RoFormer", in the half-split form with the opposite direction of rotation.
///
/// # Shapes
/// `x` `[b, t, h, d]`, `cos` and `sin` `[t, d / 2]`, to `[b, t, h, d]`.
///
/// # Panics
/// If the shapes differ from these or d is odd.
pub fn rotary(x: Tensor<4>, cos: Tensor<2>, sin: Tensor<2>) -> Tensor<4> {
    assert_rotary_shapes(&x, &cos, &sin);
    Tensor::from_dispatch(Dispatch::rotary(x.into_dispatch(), cos.into_dispatch(), sin.into_dispatch()))
}

/// [`rotary`], then [`rms_norm`] of each head: how queries and keys are prepared for attention.
///
/// # Shapes
/// As [`rotary`].
///
/// # Panics
/// As [`rotary`].
pub fn rotary_rms_norm(x: Tensor<4>, cos: Tensor<2>, sin: Tensor<2>) -> Tensor<4> {
    assert_rotary_shapes(&x, &cos, &sin);
    Tensor::from_dispatch(Dispatch::rotary_rms_norm(x.into_dispatch(), cos.into_dispatch(), sin.into_dispatch()))
}

fn assert_rotary_shapes(x: &Tensor<4>, cos: &Tensor<2>, sin: &Tensor<2>) {
    let [_, t, _, d] = x.dims();
    assert_eq!(d % 2, 0, "rotary: the head dim must be even, found {d}");
    assert_eq!(cos.dims(), [t, d / 2], "rotary: cos must be [t, d / 2]");
    assert_eq!(sin.dims(), [t, d / 2], "rotary: sin must be [t, d / 2]");
}

/// A matrix without bias applied to rows: x·weightᵀ.
///
/// # Shapes
/// `x` `[n, in]`, `weight` `[out, in]`, to `[n, out]`.
///
/// # Panics
/// If the shapes differ from these.
pub fn project(x: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    let ([_, inputs], [_, weight_inputs]) = (x.dims(), weight.dims());
    assert_eq!(inputs, weight_inputs, "project: x has {inputs} channels, weight takes {weight_inputs}");
    Tensor::from_dispatch(Dispatch::project(x.into_dispatch(), weight.into_dispatch()))
}

/// x · x_scale + y · y_scale, each scale a single number that may be trained.
///
/// # Shapes
/// `x` and `y` alike, the scales `[1]`.
///
/// # Panics
/// If the shapes differ from these.
pub fn mix<const D: usize>(x: Tensor<D>, x_scale: Tensor<1>, y: Tensor<D>, y_scale: Tensor<1>) -> Tensor<D> {
    assert_eq!(x.dims(), y.dims(), "mix: x and y must have one shape");
    assert_eq!((x_scale.dims(), y_scale.dims()), ([1], [1]), "mix: the scales must be single numbers");
    Tensor::from_dispatch(Dispatch::mix(
        x.into_dispatch(),
        x_scale.into_dispatch(),
        y.into_dispatch(),
        y_scale.into_dispatch(),
    ))
}

/// x + 2·sigmoid(gate)·y, with one gate a head: open by a half each way where the gate is zero.
///
/// # Shapes
/// `x` and `y` `[b, t, g, d]`, `gate` `[b, t, g]`, to `[b, t, g, d]`.
///
/// # Panics
/// If the shapes differ from these.
pub fn gated_add(x: Tensor<4>, gate: Tensor<3>, y: Tensor<4>) -> Tensor<4> {
    let [b, t, g, _] = x.dims();
    assert_eq!(x.dims(), y.dims(), "gated_add: x and y must have one shape");
    assert_eq!(gate.dims(), [b, t, g], "gated_add: expected one gate a head");
    Tensor::from_dispatch(Dispatch::gated_add(x.into_dispatch(), gate.into_dispatch(), y.into_dispatch()))
}

/// max(x, 0)², element by element. Source: So et al. 2021, "Primer".
pub fn squared_relu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::squared_relu(x.into_dispatch()))
}

/// Causal scaled dot-product attention with a sliding window: query i sees the keys i − window ..= i.
///
/// Query head j uses key/value head j / (h / g) (grouped-query attention, Ainslie et al. 2023). Scores are scaled by 1/√d
/// and never exist for all queries at once.
///
/// # Shapes
/// `q` `[b, t, h, d]`, `k` and `v` `[b, t, g, d]`, to `[b, t, h, d]`.
///
/// # Panics
/// If the shapes differ from these or h is not a multiple of g.
pub fn causal_attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, window: usize) -> Tensor<4> {
    let [b, t, h, d] = q.dims();
    let [_, _, g, _] = k.dims();
    assert_eq!(h % g, 0, "causal_attention: {h} query heads are not a multiple of {g} key/value heads");
    assert_eq!(k.dims(), [b, t, g, d], "causal_attention: k must match q {:?}", q.dims());
    assert_eq!(v.dims(), [b, t, g, d], "causal_attention: v must match q {:?}", q.dims());
    Tensor::from_dispatch(Dispatch::causal_attention(q.into_dispatch(), k.into_dispatch(), v.into_dispatch(), window))
}

/// Mean cross-entropy in nats of softcapped logits cap·tanh(hidden·weightᵀ / cap), in chunks of rows: the logits of all
/// rows never exist at once, and the gradients are made in the same pass.
///
/// # Shapes
/// `hidden` `[n, c]`, `weight` `[v, c]`, `targets` `[n]`, to `[1]` in float32.
///
/// # Panics
/// If the shapes differ from these, or the cap is not in (0, 64]: e to that power has to stay in float32's range.
pub fn softcap_cross_entropy(hidden: Tensor<2>, weight: Tensor<2>, targets: Tensor<1, Int>, cap: f64) -> Tensor<1> {
    let ([n, c], [_, c_weight]) = (hidden.dims(), weight.dims());
    assert_eq!(c, c_weight, "softcap_cross_entropy: hidden has {c} channels, weight {c_weight}");
    assert_eq!(targets.dims(), [n], "softcap_cross_entropy: one target a row");
    assert!(cap > 0.0 && cap <= 64.0, "softcap_cross_entropy: the cap must be above 0 and at most 64, found {cap}");
    Tensor::from_dispatch(Dispatch::softcap_cross_entropy(
        hidden.into_dispatch(),
        weight.into_dispatch(),
        targets.into_dispatch(),
        cap,
    ))
}

/// cap·tanh(x / cap), element by element. Source: Gemma Team 2024, "Gemma 2".
pub fn softcap<const D: usize>(x: Tensor<D>, cap: f64) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::softcap(x.into_dispatch(), cap))
}

/// Cross-entropy of each row in nats: log-sum-exp of its logits less the target's.
///
/// # Shapes
/// `logits` `[n, v]`, `targets` `[n]`, to `[n]`.
///
/// # Panics
/// If there is not one target a row.
pub fn cross_entropy(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    let [n, _] = logits.dims();
    assert_eq!(targets.dims(), [n], "cross_entropy: one target a row");
    Tensor::from_dispatch(Dispatch::cross_entropy(logits.into_dispatch(), targets.into_dispatch()))
}

/// `numbers` on `device`; where that computes by itself, without waiting for what it still has to do.
///
/// # Shapes
/// `[n]`.
pub fn upload(numbers: Vec<i64>, device: &Device) -> Tensor<1, Int> {
    let place = Tensor::<1, Int>::empty([1], device);
    Tensor::from_dispatch(Dispatch::upload(place.into_dispatch(), numbers))
}

/// total + part in the type of `total`, whatever that of `part`. For gradients: its backward is not fused.
///
/// # Shapes
/// `total` and `part` alike.
///
/// # Panics
/// If the shapes differ.
pub fn accumulate<const D: usize>(total: Tensor<D>, part: Tensor<D>) -> Tensor<D> {
    assert_eq!(total.dims(), part.dims(), "accumulate: total and part must have one shape");
    Tensor::from_dispatch(Dispatch::accumulate(total.into_dispatch(), part.into_dispatch()))
}

/// Newton-Schulz iterations x ← a·x + (b·G + c·G²)·x with G = x·xᵀ, or the like from the right where x is taller than
/// wide, one for each (a, b, c), after division by 1.02·‖x‖ + 1e-6. For optimizers: its backward is not fused.
///
/// # Shapes
/// `x` `[n, rows, columns]`, to the same.
pub fn newton_schulz(x: Tensor<3>, coefficients: &[(f64, f64, f64)]) -> Tensor<3> {
    Tensor::from_dispatch(Dispatch::newton_schulz(x.into_dispatch(), coefficients.to_vec()))
}
