//! The operations in burn primitives: right on every backend, and what the faster bodies are tested against.

use super::{AttentionState, FusedOps, Kernels, MixState};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, FloatDType, Shape, Slice, TensorData};

/// Queries whose scores exist at once.
const QUERY_BLOCK: usize = 256;
/// Rows whose logits exist at once.
const ROW_CHUNK: usize = 4096;
/// Taken off the score of a key that a query must not see, for each position that it is too far: exp of what is left is zero.
const PENALTY: f64 = 1e30;

fn float_dtype(dtype: DType) -> FloatDType {
    dtype.into()
}

fn to_f32<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    if x.dtype() == DType::F32 { x } else { B::float_cast(x, FloatDType::F32) }
}

fn to_dtype<B: Backend>(x: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    if x.dtype() == dtype { x } else { B::float_cast(x, float_dtype(dtype)) }
}

/// Added to the mean square in normalisations: float32's, in which it is taken whatever the type of the tensor. PyTorch does
/// so since version 2.7; half precision's own would weigh on rows that are small but not nought.
pub(super) const RMS_NORM_EPSILON: f64 = f32::EPSILON as f64;

pub(super) fn embedding<B: Backend>(weight: FloatTensor<B>, tokens: IntTensor<B>) -> FloatTensor<B> {
    B::embedding(weight, tokens)
}

pub(super) fn embedding_backward<B: Backend>(
    weight: FloatTensor<B>,
    tokens: IntTensor<B>,
    grad: FloatTensor<B>,
) -> FloatTensor<B> {
    B::embedding_backward(weight, grad, tokens)
}

/// 1 / sqrt(mean(x²) + ε) over the last axis, which stays with size 1; `x` in float32.
fn inverse_rms<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let last = x.shape().num_dims() - 1;
    let mean_square = B::float_mean_dim(B::float_mul(x.clone(), x), last);
    B::float_recip(B::float_sqrt(B::float_add_scalar(mean_square, RMS_NORM_EPSILON.into())))
}

pub(super) fn rms_norm<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let dtype = x.dtype();
    let x = to_f32::<B>(x);
    let scale = inverse_rms::<B>(x.clone());
    to_dtype::<B>(B::float_mul(x, scale), dtype)
}

/// dx = r·g − x·r³·mean(g·x), with r = 1 / sqrt(mean(x²) + ε).
pub(super) fn rms_norm_backward<B: Backend>(x: FloatTensor<B>, grad: FloatTensor<B>) -> FloatTensor<B> {
    let dtype = x.dtype();
    let (x, grad) = (to_f32::<B>(x), to_f32::<B>(grad));
    let last = x.shape().num_dims() - 1;
    let scale = inverse_rms::<B>(x.clone());
    let cubed = B::float_mul(B::float_mul(scale.clone(), scale.clone()), scale.clone());
    let mean = B::float_mean_dim(B::float_mul(grad.clone(), x.clone()), last);
    let along = B::float_mul(x, B::float_mul(cubed, mean));
    to_dtype::<B>(B::float_sub(B::float_mul(grad, scale), along), dtype)
}

pub(super) fn rotary<B: Backend>(x: FloatTensor<B>, cos: FloatTensor<B>, sin: FloatTensor<B>) -> FloatTensor<B> {
    let shape = x.shape();
    let (t, half) = (shape[1], shape[3] / 2);
    let angles = Shape::from(vec![1, t, 1, half]);
    let (cos, sin) = (B::float_reshape(cos, angles.clone()), B::float_reshape(sin, angles));
    let cos = to_dtype::<B>(cos, x.dtype());
    let sin = to_dtype::<B>(sin, x.dtype());
    let a = slice::<B>(x.clone(), 3, 0, half);
    let b = slice::<B>(x, 3, half, 2 * half);
    let first = B::float_add(B::float_mul(a.clone(), cos.clone()), B::float_mul(b.clone(), sin.clone()));
    let second = B::float_sub(B::float_mul(b, cos), B::float_mul(a, sin));
    B::float_cat(vec![first, second], 3)
}

pub(super) fn project<B: FusedOps>(x: FloatTensor<B>, weight: FloatTensor<B>) -> FloatTensor<B> {
    let dtype = x.dtype();
    to_dtype::<B>(B::product(x, B::float_transpose(weight)), dtype)
}

pub(super) fn project_backward<B: Kernels>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    grad: FloatTensor<B>,
) -> [FloatTensor<B>; 2] {
    let scale = B::gradient_scale(grad.shape()[0]);
    let grad = B::operand(times::<B>(grad, scale));
    // The weight's gradient comes out in the weight's own layout, ready to be accumulated and stacked.
    let dweight = B::product(B::float_transpose(grad.clone()), x);
    [B::product(grad, weight), dweight].map(|gradient| times::<B>(gradient, 1.0 / scale))
}

pub(super) fn times<B: Backend>(x: FloatTensor<B>, factor: f64) -> FloatTensor<B> {
    if factor == 1.0 { x } else { B::float_mul_scalar(x, factor.into()) }
}

pub(super) fn mix<B: Backend>(
    x: FloatTensor<B>,
    x_scale: FloatTensor<B>,
    y: FloatTensor<B>,
    y_scale: FloatTensor<B>,
) -> FloatTensor<B> {
    B::float_add(scale_by::<B>(x, x_scale), scale_by::<B>(y, y_scale))
}

pub(super) fn mix_backward<B: Backend>(saved: MixState<B>, grad: FloatTensor<B>) -> [FloatTensor<B>; 4] {
    let MixState { x, x_scale, y, y_scale } = saved;
    let dot = |x: FloatTensor<B>, scale: &FloatTensor<B>| {
        let product = B::float_mul(to_f32::<B>(grad.clone()), to_f32::<B>(x));
        to_dtype::<B>(B::float_sum(product), scale.dtype())
    };
    let (dx_scale, dy_scale) = (dot(x, &x_scale), dot(y, &y_scale));
    [scale_by::<B>(grad.clone(), x_scale), dx_scale, scale_by::<B>(grad.clone(), y_scale), dy_scale]
}

/// 2·sigmoid(gate) `[b, t, g]`, as a column `[b, t, g, 1]`.
fn gate_column<B: Backend>(gate: FloatTensor<B>) -> FloatTensor<B> {
    let mut shape = gate.shape();
    shape.push(1);
    B::float_reshape(B::float_mul_scalar(B::sigmoid(gate), 2f64.into()), shape)
}

pub(super) fn gated_add<B: Backend>(x: FloatTensor<B>, gate: FloatTensor<B>, y: FloatTensor<B>) -> FloatTensor<B> {
    B::float_add(x, B::float_mul(y, gate_column::<B>(gate)))
}

/// With s = sigmoid(gate): the gate's is 2·s·(1 − s)·Σ grad·y, that of y is 2·s·grad.
pub(super) fn gated_add_backward<B: Backend>(
    gate: FloatTensor<B>,
    y: FloatTensor<B>,
    grad: FloatTensor<B>,
) -> [FloatTensor<B>; 2] {
    let (dtype, shape) = (gate.dtype(), gate.shape());
    let column = gate_column::<B>(gate); // 2·s
    let sum = B::float_sum_dim(to_f32::<B>(B::float_mul(grad.clone(), y)), 3);
    let wide = to_f32::<B>(column.clone());
    let slope =
        B::float_mul(wide.clone(), B::float_add_scalar(B::float_mul_scalar(wide, (-0.5f64).into()), 1f64.into()));
    let dgate = B::float_reshape(to_dtype::<B>(B::float_mul(sum, slope), dtype), shape);
    [dgate, B::float_mul(grad, column)]
}

pub(super) fn squared_relu<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let positive = B::float_clamp_min(x, 0f64.into());
    B::float_mul(positive.clone(), positive)
}

pub(super) fn squared_relu_backward<B: Backend>(out: FloatTensor<B>, grad: FloatTensor<B>) -> FloatTensor<B> {
    B::float_mul(grad, B::float_mul_scalar(B::float_sqrt(out), 2f64.into()))
}

/// `x` times a one-element `factor`.
pub(super) fn scale_by<B: Backend>(x: FloatTensor<B>, factor: FloatTensor<B>) -> FloatTensor<B> {
    let ones = Shape::from(vec![1; x.shape().num_dims()]);
    let factor = to_dtype::<B>(B::float_reshape(factor, ones), x.dtype());
    B::float_mul(x, factor)
}

/// `x[.., start..end, ..]` along `dim`.
pub(super) fn slice<B: Backend>(x: FloatTensor<B>, dim: usize, start: usize, end: usize) -> FloatTensor<B> {
    B::float_slice(x.clone(), &ranges(&x.shape(), dim, start, end))
}

fn ranges(shape: &Shape, dim: usize, start: usize, end: usize) -> Vec<Slice> {
    (0..shape.num_dims())
        .map(|axis| if axis == dim { Slice::from(start..end) } else { Slice::from(0..shape[axis]) })
        .collect()
}

/// The sizes of one attention call and the blocks of queries it is cut into.
struct Attention {
    b: usize,
    t: usize,
    h: usize,
    g: usize,
    d: usize,
    window: usize,
}

/// One block: these queries see keys `keys_start..queries_end` only.
struct Block {
    queries_start: usize,
    queries_end: usize,
    keys_start: usize,
}

impl Attention {
    fn new<B: Backend>(q: &FloatTensor<B>, k: &FloatTensor<B>, window: usize) -> Self {
        let (q, k) = (q.shape(), k.shape());
        Self { b: q[0], t: q[1], h: q[2], g: k[2], d: q[3], window }
    }

    fn blocks(&self) -> impl Iterator<Item = Block> {
        let (t, window) = (self.t, self.window);
        (0..t).step_by(QUERY_BLOCK).map(move |queries_start| Block {
            queries_start,
            queries_end: (queries_start + QUERY_BLOCK).min(t),
            keys_start: queries_start.saturating_sub(window),
        })
    }

    /// What all blocks take products of, made once: the scaled queries `[b, g, h / g, t, d]`, keys and values `[b, g, t, d]`.
    fn operands<B: FusedOps>(
        &self,
        q: FloatTensor<B>,
        keys_and_values: [FloatTensor<B>; 2],
    ) -> (FloatTensor<B>, [FloatTensor<B>; 2]) {
        let q = B::operand(B::float_mul_scalar(q, self.scale().into()));
        let by_head = |x| B::float_permute(B::operand(x), &[0, 2, 1, 3]);
        (self.group_heads::<B>(q), keys_and_values.map(by_head))
    }

    /// 1 / √d
    fn scale(&self) -> f64 {
        1.0 / (self.d as f64).sqrt()
    }

    /// [b, t, h, d] to [b, g, h / g, t, d]: the query heads of one key/value head side by side.
    fn group_heads<B: Backend>(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        let x = B::float_reshape(x, Shape::from(vec![self.b, self.t, self.g, self.h / self.g, self.d]));
        B::float_permute(x, &[0, 2, 3, 1, 4])
    }

    /// The inverse of [`Attention::group_heads`].
    fn ungroup_heads<B: Backend>(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        let x = B::float_permute(x, &[0, 3, 1, 2, 4]);
        B::float_reshape(x, Shape::from(vec![self.b, self.t, self.h, self.d]))
    }

    /// Merges the heads of a group into rows: [b, g, h / g, rows, d] to [b, g, h / g · rows, d].
    fn as_rows<B: Backend>(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        let shape = x.shape();
        B::float_reshape(x, Shape::from(vec![shape[0], shape[1], shape[2] * shape[3], shape[4]]))
    }

    /// The inverse of [`Attention::as_rows`] for any last axis.
    fn as_heads<B: Backend>(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        let (shape, heads) = (x.shape(), self.h / self.g);
        B::float_reshape(x, Shape::from(vec![shape[0], shape[1], heads, shape[2] / heads, shape[3]]))
    }

    /// The most keys before its first query that a block sees.
    fn reach(&self) -> usize {
        self.blocks().map(|block| block.queries_start - block.keys_start).max().unwrap_or(0)
    }

    /// What is added to scores so that a query sees no key after itself or before its window: `[rows, reach + rows]` for a block
    /// of queries and all keys that any block sees; each block takes its columns.
    fn penalties<B: Backend>(&self, device: &B::Device) -> FloatTensor<B> {
        let (rows, reach) = (QUERY_BLOCK.min(self.t), self.reach());
        // In float32, which has all positions exactly.
        let counted = |count: usize| (0..count).map(|place| place as f32).collect::<Vec<f32>>();
        let queries = B::float_from_data(TensorData::new(counted(rows), [rows, 1]), device);
        let keys = B::float_from_data(TensorData::new(counted(reach + rows), [1, reach + rows]), device);
        let distance = B::float_add_scalar(B::float_sub(queries, keys), (reach as f64).into());
        // How far a key lies after the query or before its window, as a negative number; zero if the query sees it.
        let before_window = B::float_add_scalar(B::float_neg(distance.clone()), (self.window as f64).into());
        let beyond =
            B::float_add(B::float_clamp_max(distance, 0f64.into()), B::float_clamp_max(before_window, 0f64.into()));
        B::float_mul_scalar(beyond, PENALTY.into())
    }

    /// Masked scores of a block's queries `[b, g, h / g · rows, d]`, which are scaled already, in float32.
    fn scores<B: FusedOps>(
        &self,
        block: &Block,
        q: FloatTensor<B>,
        k: FloatTensor<B>,
        penalties: &FloatTensor<B>,
    ) -> FloatTensor<B> {
        let scores = to_f32::<B>(B::product(q, B::float_transpose(k)));
        let (rows, keys) = (block.queries_end - block.queries_start, block.queries_end - block.keys_start);
        let start = self.reach() - (block.queries_start - block.keys_start);
        let penalty = slice::<B>(slice::<B>(penalties.clone(), 0, 0, rows), 1, start, start + keys);
        let heads = self.h / self.g;
        let penalty = B::float_reshape(penalty, Shape::from(vec![1, rows, keys]));
        let penalty = B::float_expand(penalty, Shape::from(vec![heads, rows, keys]));
        let penalty = B::float_reshape(penalty, Shape::from(vec![1, 1, heads * rows, keys]));
        B::float_add(scores, penalty)
    }
}

/// Output `[b, t, h, d]` and log-sum-exp of the scores `[b, h, t]` in float32.
pub(super) fn attention_forward<B: FusedOps>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    window: usize,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let call = Attention::new::<B>(&q, &k, window);
    let dtype = q.dtype();
    let (q, [k, v]) = call.operands::<B>(q, [k, v]);
    let penalties = call.penalties::<B>(&k.device());
    let (mut outputs, mut sums) = (Vec::new(), Vec::new());
    for block in call.blocks() {
        let q = call.as_rows::<B>(slice::<B>(q.clone(), 3, block.queries_start, block.queries_end));
        let k = slice::<B>(k.clone(), 2, block.keys_start, block.queries_end);
        let v = slice::<B>(v.clone(), 2, block.keys_start, block.queries_end);
        let scores = call.scores::<B>(&block, q, k, &penalties);
        let max = B::float_max_dim(scores.clone(), 3);
        let weights = B::float_exp(B::float_sub(scores, max.clone()));
        let sum = B::float_sum_dim(weights.clone(), 3);
        // Divided by their sum after the product: there are fewer channels than keys.
        let product = to_f32::<B>(B::product(to_dtype::<B>(weights, dtype), v));
        outputs.push(call.as_heads::<B>(to_dtype::<B>(B::float_div(product, sum.clone()), dtype)));
        sums.push(call.as_heads::<B>(B::float_add(max, B::float_log(sum))));
    }
    let out = call.ungroup_heads::<B>(B::float_cat(outputs, 3));
    let log_sum_exp = B::float_reshape(B::float_cat(sums, 3), Shape::from(vec![call.b, call.h, call.t]));
    (out, log_sum_exp)
}

/// Recomputes each block's attention weights from the log-sum-exp (Dao et al. 2022, "FlashAttention", algorithm 4).
pub(super) fn attention_backward<B: Kernels>(saved: AttentionState<B>, grad: FloatTensor<B>) -> [FloatTensor<B>; 3] {
    let AttentionState { q, k, v, out, log_sum_exp, window } = saved;
    let call = Attention::new::<B>(&q, &k, window);
    let dtype = q.dtype();
    let gradient_scale = B::gradient_scale(call.b * call.t);
    let grad = times::<B>(grad, gradient_scale);
    let device = k.device();
    let (q, [k, v]) = call.operands::<B>(q, [k, v]);
    // delta = sum over d of grad · out, the softmax's own correction.
    let delta = B::float_sum_dim(B::float_mul(to_f32::<B>(grad.clone()), to_f32::<B>(out)), 3);
    let delta = B::float_reshape(delta, Shape::from(vec![call.b, call.t, call.g, call.h / call.g, 1]));
    let delta = B::float_permute(delta, &[0, 2, 3, 1, 4]);
    let grad = call.group_heads::<B>(B::operand(grad));
    let sums = Shape::from(vec![call.b, call.g, call.h / call.g, call.t, 1]);
    let log_sum_exp = B::float_reshape(log_sum_exp, sums);
    let penalties = call.penalties::<B>(&device);
    let zeros = || B::float_zeros(Shape::from(vec![call.b, call.g, call.t, call.d]), &device, FloatDType::F32);
    let (mut dq, mut dk, mut dv) = (Vec::new(), zeros(), zeros());
    for block in call.blocks() {
        let rows =
            |x: &FloatTensor<B>| call.as_rows::<B>(slice::<B>(x.clone(), 3, block.queries_start, block.queries_end));
        let keys = |x: &FloatTensor<B>| slice::<B>(x.clone(), 2, block.keys_start, block.queries_end);
        let (q, grad) = (rows(&q), rows(&grad));
        let scores = call.scores::<B>(&block, q.clone(), keys(&k), &penalties);
        let weights = B::float_exp(B::float_sub(scores, rows(&log_sum_exp)));
        let weights_low = to_dtype::<B>(weights.clone(), dtype);
        let dv_block = B::product(B::float_transpose(weights_low), grad.clone());
        let dweights = to_f32::<B>(B::product(grad, B::float_transpose(keys(&v))));
        let dscores = B::float_mul(weights, B::float_sub(dweights, rows(&delta)));
        let dscores = B::operand(to_dtype::<B>(dscores, dtype));
        dq.push(call.as_heads::<B>(B::product(dscores.clone(), keys(&k))));
        let dk_block = B::product(B::float_transpose(dscores), q);
        let add = |total: FloatTensor<B>, part: FloatTensor<B>| {
            let place = ranges(&total.shape(), 2, block.keys_start, block.queries_end);
            let sum = B::float_add(B::float_slice(total.clone(), &place), to_f32::<B>(part));
            B::float_slice_assign(total, &place, sum)
        };
        dk = add(dk, dk_block);
        dv = add(dv, dv_block);
    }
    // Scores are of scaled queries: those as they came change them less.
    let dq = B::float_mul_scalar(call.ungroup_heads::<B>(B::float_cat(dq, 3)), call.scale().into());
    let [dk, dv] = [dk, dv].map(|x| to_dtype::<B>(B::float_permute(x, &[0, 2, 1, 3]), dtype));
    [dq, dk, dv].map(|gradient| times::<B>(gradient, 1.0 / gradient_scale))
}

/// One chunk's softcapped logits in float32 and what its loss needs.
struct ChunkLoss<B: Backend> {
    /// tanh(logits / cap) `[rows, v]`
    squashed: FloatTensor<B>,
    /// log-sum-exp of the capped logits `[rows, 1]`
    log_sum_exp: FloatTensor<B>,
    /// sum of the rows' losses `[1]`
    loss: FloatTensor<B>,
}

fn chunk_loss<B: FusedOps>(
    hidden: FloatTensor<B>,
    weight: FloatTensor<B>,
    targets: IntTensor<B>,
    cap: f64,
) -> ChunkLoss<B> {
    let logits = to_f32::<B>(B::product(hidden, B::float_transpose(weight)));
    let squashed = B::float_tanh(B::float_div_scalar(logits, cap.into()));
    let capped = B::float_mul_scalar(squashed.clone(), cap.into());
    // |capped| ≤ cap: no maximum has to be taken out for the sum to stay in range.
    let log_sum_exp = B::float_log(B::float_sum_dim(B::float_exp(capped.clone()), 1));
    let target = B::float_gather(1, capped, targets);
    let loss = B::float_sum(B::float_sub(log_sum_exp.clone(), target));
    ChunkLoss { squashed, log_sum_exp, loss }
}

/// Calls `each(start, end)` for every chunk of rows.
pub(super) fn row_chunks(n: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..n).step_by(ROW_CHUNK).map(move |start| (start, (start + ROW_CHUNK).min(n)))
}

pub(super) fn target_column<B: Backend>(targets: &IntTensor<B>, start: usize, end: usize) -> IntTensor<B> {
    let chunk = B::int_slice(targets.clone(), &[Slice::from(start..end)]);
    B::int_reshape(chunk, Shape::from(vec![end - start, 1]))
}

/// 0, 1, … v − 1 as a row `[1, v]` in float32, which has them all exactly.
pub(super) fn token_ids<B: Backend>(v: usize, device: &B::Device) -> FloatTensor<B> {
    let ids: Vec<f32> = (0..v).map(|id| id as f32).collect();
    B::float_from_data(TensorData::new(ids, [1, v]), device)
}

/// 1 where a row's token `[n, 1]` is the column's, else 0, in float32 `[n, v]`: by arithmetic, which fuses with what comes
/// before and after, as a scattered write does not.
pub(super) fn one_hot<B: Backend>(tokens: IntTensor<B>, ids: FloatTensor<B>) -> FloatTensor<B> {
    let distance = B::float_abs(B::float_sub(ids, B::int_into_float(tokens, FloatDType::F32)));
    B::float_clamp_min(B::float_add_scalar(B::float_neg(distance), 1f64.into()), 0f64.into())
}

/// Mean loss `[1]`, without gradients.
pub(super) fn softcap_cross_entropy<B: FusedOps>(
    hidden: FloatTensor<B>,
    weight: FloatTensor<B>,
    targets: IntTensor<B>,
    cap: f64,
) -> FloatTensor<B> {
    let n = hidden.shape()[0];
    let weight = to_dtype::<B>(weight, hidden.dtype());
    let losses = row_chunks(n).map(|(start, end)| {
        let targets = target_column::<B>(&targets, start, end);
        chunk_loss::<B>(slice::<B>(hidden.clone(), 0, start, end), weight.clone(), targets, cap).loss
    });
    let total = losses.reduce(B::float_add).expect("at least one row");
    B::float_div_scalar(total, (n as f64).into())
}

/// Mean loss `[1]` and its gradients with respect to `hidden` and `weight`.
pub(super) fn softcap_cross_entropy_gradients<B: Kernels>(
    hidden: FloatTensor<B>,
    weight: FloatTensor<B>,
    targets: IntTensor<B>,
    cap: f64,
) -> (FloatTensor<B>, [FloatTensor<B>; 2]) {
    let (n, dtype, weight_dtype) = (hidden.shape()[0], hidden.dtype(), weight.dtype());
    let device = hidden.device();
    let scale = B::gradient_scale(n);
    let mut dweight = B::float_zeros(weight.shape(), &device, FloatDType::F32);
    let ids = token_ids::<B>(weight.shape()[0], &device);
    let (weight, all_hidden) = (B::operand(to_dtype::<B>(weight, dtype)), B::operand(hidden));
    let (mut losses, mut dhidden) = (Vec::new(), Vec::new());
    for (start, end) in row_chunks(n) {
        let hidden = slice::<B>(all_hidden.clone(), 0, start, end);
        let targets = target_column::<B>(&targets, start, end);
        let chunk = chunk_loss::<B>(hidden.clone(), weight.clone(), targets.clone(), cap);
        losses.push(chunk.loss);
        let capped = B::float_mul_scalar(chunk.squashed.clone(), cap.into());
        let probabilities = B::float_exp(B::float_sub(capped, chunk.log_sum_exp));
        let dcapped = B::float_sub(probabilities, one_hot::<B>(targets, ids.clone()));
        // d tanh(z / cap)·cap / dz = 1 − tanh²
        let slope = B::float_neg(B::float_mul(chunk.squashed.clone(), chunk.squashed));
        let slope = B::float_mul_scalar(B::float_add_scalar(slope, 1f64.into()), (scale / n as f64).into());
        let dlogits = B::operand(to_dtype::<B>(B::float_mul(dcapped, slope), dtype)); // [rows, v]
        dhidden.push(B::product(dlogits.clone(), weight.clone()));
        let part = to_f32::<B>(B::product(B::float_transpose(dlogits), hidden));
        dweight = B::float_add(dweight, part);
    }
    let total = losses.into_iter().reduce(B::float_add).expect("at least one row");
    let loss = B::float_div_scalar(total, (n as f64).into());
    let gradients = [B::float_cat(dhidden, 0), to_dtype::<B>(dweight, weight_dtype)];
    (loss, gradients.map(|gradient| times::<B>(gradient, 1.0 / scale)))
}

pub(super) fn softcap<B: Backend>(x: FloatTensor<B>, cap: f64) -> FloatTensor<B> {
    B::float_mul_scalar(B::float_tanh(B::float_div_scalar(x, cap.into())), cap.into())
}

pub(super) fn cross_entropy<B: Backend>(logits: FloatTensor<B>, targets: IntTensor<B>) -> FloatTensor<B> {
    let n = logits.shape()[0];
    let targets = target_column::<B>(&targets, 0, n);
    let target = B::float_gather(1, logits.clone(), targets); // [n, 1]
    let max = B::float_max_dim(logits.clone(), 1);
    let sum = B::float_sum_dim(B::float_exp(B::float_sub(logits, max.clone())), 1);
    let losses = B::float_sub(B::float_add(max, B::float_log(sum)), target);
    B::float_reshape(losses, Shape::from(vec![n]))
}

pub(super) fn upload<B: Backend>(place: IntTensor<B>, numbers: Vec<i64>) -> IntTensor<B> {
    let (count, device) = (numbers.len(), place.device());
    B::int_from_data(TensorData::new(numbers, [count]).convert_dtype(place.dtype()), &device)
}

pub(super) fn accumulate<B: Backend>(total: FloatTensor<B>, part: FloatTensor<B>) -> FloatTensor<B> {
    let dtype = total.dtype();
    B::float_add(total, to_dtype::<B>(part, dtype))
}

pub(super) fn newton_schulz<B: FusedOps>(x: FloatTensor<B>, coefficients: Vec<(f64, f64, f64)>) -> FloatTensor<B> {
    let shape = x.shape();
    // The Gram matrix of the shorter side: fewer operations.
    let tall = shape[1] > shape[2];
    let dtype = x.dtype();
    // In float32: a sum over a whole matrix loses too much in half precision.
    let wide = to_f32::<B>(x.clone());
    let norm = B::float_sqrt(B::float_sum_dims(B::float_mul(wide.clone(), wide), &[1, 2])); // [n, 1, 1]
    let divisor = B::float_add_scalar(B::float_mul_scalar(norm, 1.02f64.into()), 1e-6f64.into());
    let mut x = B::float_div(x, to_dtype::<B>(divisor, dtype));
    let product = |a, b| to_dtype::<B>(B::product(a, b), dtype);
    for (a, b, c) in coefficients {
        let transposed = B::float_transpose(x.clone());
        let gram = if tall { product(transposed, x.clone()) } else { product(x.clone(), transposed) };
        let square = product(gram.clone(), gram.clone());
        let polynomial = B::float_add(B::float_mul_scalar(gram, b.into()), B::float_mul_scalar(square, c.into()));
        let correction = if tall { product(x.clone(), polynomial) } else { product(polynomial, x.clone()) };
        x = B::float_add(B::float_mul_scalar(x, a.into()), correction);
    }
    x
}
