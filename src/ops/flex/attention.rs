//! Attention in blocks of queries, parallel over batch and key/value heads.

use super::math;
use super::matrix::{Matrix, MatrixMut, Product};
use burn::tensor::Shape;
use multiversion::multiversion;
use rayon::prelude::*;

/// Queries whose scores exist at once on one thread.
const QUERY_BLOCK: usize = 64;

/// The sizes of one call; tensors are `[b, t, h, d]` and `[b, t, g, d]`, row-major.
pub struct Sizes {
    pub b: usize,
    pub t: usize,
    pub h: usize,
    pub g: usize,
    pub d: usize,
    pub window: usize,
}

/// Forward operands and results.
pub struct Saved<'a> {
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub v: &'a [f32],
    pub out: &'a [f32],
    pub log_sum_exp: &'a [f32],
}

/// A block of queries and the keys that any of them sees.
#[derive(Clone, Copy)]
struct Block {
    queries: usize,
    rows: usize,
    keys: usize,
    columns: usize,
}

/// Memory that several threads write at places of their own.
#[derive(Clone, Copy)]
struct Shared(*mut f32);
// SAFETY: every task writes the elements of its own heads only.
unsafe impl Send for Shared {}
unsafe impl Sync for Shared {}

impl Shared {
    /// A matrix that starts `offset` elements in.
    ///
    /// # Safety
    /// As for [`MatrixMut::from_raw`].
    unsafe fn matrix<'a>(self, offset: usize, rows: usize, columns: usize, row_stride: usize) -> MatrixMut<'a> {
        unsafe { MatrixMut::from_raw(self.0.add(offset), rows, columns, row_stride) }
    }
}

impl Sizes {
    pub fn new(q: &Shape, k: &Shape, window: usize) -> Self {
        Self { b: q[0], t: q[1], h: q[2], g: k[2], d: q[3], window }
    }

    fn scale(&self) -> f32 {
        1.0 / (self.d as f32).sqrt()
    }

    fn blocks(&self) -> impl Iterator<Item = Block> {
        let (t, window) = (self.t, self.window);
        (0..t).step_by(QUERY_BLOCK).map(move |queries| {
            let end = (queries + QUERY_BLOCK).min(t);
            let keys = queries.saturating_sub(window);
            Block { queries, rows: end - queries, keys, columns: end - keys }
        })
    }

    /// Columns of `block` that query `row` sees.
    fn visible(&self, block: Block, row: usize) -> std::ops::Range<usize> {
        let query = block.queries + row;
        query.saturating_sub(self.window).max(block.keys) - block.keys..query + 1 - block.keys
    }

    fn query_offset(&self, batch: usize, time: usize, head: usize) -> usize {
        ((batch * self.t + time) * self.h + head) * self.d
    }

    fn key_offset(&self, batch: usize, time: usize, head: usize) -> usize {
        ((batch * self.t + time) * self.g + head) * self.d
    }

    /// Rows of a query-shaped tensor for one block and head.
    fn query_rows<'a>(&self, x: &'a [f32], batch: usize, block: Block, head: usize) -> Matrix<'a> {
        Matrix::rows(&x[self.query_offset(batch, block.queries, head)..], self.h * self.d)
    }

    /// Rows of a key-shaped tensor for one block and head.
    fn key_rows<'a>(&self, x: &'a [f32], batch: usize, block: Block, head: usize) -> Matrix<'a> {
        Matrix::rows(&x[self.key_offset(batch, block.keys, head)..], self.g * self.d)
    }
}

/// Output and log-sum-exp `[b, h, t]`. See [`crate::ops::causal_attention`].
pub fn forward(sizes: &Sizes, q: &[f32], k: &[f32], v: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let Sizes { t, h, g, d, .. } = *sizes;
    let mut out = vec![0f32; q.len()];
    let mut log_sum_exp = vec![0f32; sizes.b * h * t];
    let shared = Shared(out.as_mut_ptr());
    log_sum_exp.par_chunks_exact_mut(t).enumerate().for_each_init(
        || vec![0f32; QUERY_BLOCK * t],
        |scores, (task, log_sum_exp)| {
            let (batch, head) = (task / h, task % h);
            let key_head = head / (h / g);
            for block in sizes.blocks() {
                let Block { rows, columns, queries, .. } = block;
                let scores = &mut scores[..rows * columns];
                Product { factor: sizes.scale(), ..Product::new(rows, columns, d) }.run(
                    MatrixMut::new(scores, rows, columns, columns),
                    sizes.query_rows(q, batch, block, head),
                    sizes.key_rows(k, batch, block, key_head).transposed(),
                );
                for (row, scores) in scores.chunks_exact_mut(columns).enumerate() {
                    log_sum_exp[queries + row] = softmax(scores, sizes.visible(block, row));
                }
                // SAFETY: the rows of this batch and head are this task's own.
                let place = unsafe { shared.matrix(sizes.query_offset(batch, queries, head), rows, d, h * d) };
                let values = sizes.key_rows(v, batch, block, key_head);
                Product::new(rows, d, columns).run(place, Matrix::rows(scores, columns), values);
            }
        },
    );
    (out, log_sum_exp)
}

/// Gradients with respect to q, k and v; the weights are recomputed from the log-sum-exp (Dao et al. 2022, algorithm 4).
pub fn backward(sizes: &Sizes, saved: &Saved, grad: &[f32]) -> [Vec<f32>; 3] {
    let Sizes { b, t, h, g, d, .. } = *sizes;
    let mut dq = vec![0f32; saved.q.len()];
    let mut dk = vec![0f32; saved.k.len()];
    let mut dv = vec![0f32; saved.v.len()];
    let [dq_shared, dk_shared, dv_shared] = [&mut dq, &mut dk, &mut dv].map(|x| Shared(x.as_mut_ptr()));
    (0..b * g).into_par_iter().for_each_init(
        || [vec![0f32; QUERY_BLOCK * t], vec![0f32; QUERY_BLOCK * t]],
        |[weights, dweights], task| {
            let (batch, key_head) = (task / g, task % g);
            let heads = key_head * (h / g)..(key_head + 1) * (h / g);
            for (head, block) in heads.flat_map(|head| sizes.blocks().map(move |block| (head, block))) {
                let Block { rows, columns, queries, keys } = block;
                let (weights, dweights) = (&mut weights[..rows * columns], &mut dweights[..rows * columns]);
                let q_rows = sizes.query_rows(saved.q, batch, block, head);
                let grad_rows = sizes.query_rows(grad, batch, block, head);
                let k_rows = sizes.key_rows(saved.k, batch, block, key_head);
                let v_rows = sizes.key_rows(saved.v, batch, block, key_head);
                Product { factor: sizes.scale(), ..Product::new(rows, columns, d) }.run(
                    MatrixMut::new(weights, rows, columns, columns),
                    q_rows,
                    k_rows.transposed(),
                );
                Product::new(rows, columns, d).run(
                    MatrixMut::new(dweights, rows, columns, columns),
                    grad_rows,
                    v_rows.transposed(),
                );
                for row in 0..rows {
                    let span = row * columns..(row + 1) * columns;
                    let at = sizes.query_offset(batch, queries + row, head);
                    let delta = math::sum(d, |i| grad[at + i] * saved.out[at + i]);
                    softmax_backward(
                        &mut weights[span.clone()],
                        &mut dweights[span],
                        sizes.visible(block, row),
                        saved.log_sum_exp[(batch * h + head) * t + queries + row],
                        delta,
                        sizes.scale(),
                    );
                }
                let (weights, dscores) = (Matrix::rows(weights, columns), Matrix::rows(dweights, columns));
                let (query_place, key_place) =
                    (sizes.query_offset(batch, queries, head), sizes.key_offset(batch, keys, key_head));
                // SAFETY: this batch and these heads are this task's own, for queries as for keys.
                let (dq, dk, dv) = unsafe {
                    (
                        dq_shared.matrix(query_place, rows, d, h * d),
                        dk_shared.matrix(key_place, columns, d, g * d),
                        dv_shared.matrix(key_place, columns, d, g * d),
                    )
                };
                Product::new(rows, d, columns).run(dq, dscores, k_rows);
                let into_keys = Product { keep: 1.0, ..Product::new(columns, d, rows) };
                into_keys.run(dk, dscores.transposed(), q_rows);
                into_keys.run(dv, weights.transposed(), grad_rows);
            }
        },
    );
    [dq, dk, dv]
}

/// Scores become weights, zero outside `visible`; gives the log-sum-exp.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
fn softmax(scores: &mut [f32], visible: std::ops::Range<usize>) -> f32 {
    scores[..visible.start].fill(0.0);
    scores[visible.end..].fill(0.0);
    let scores = &mut scores[visible];
    let max = math::max(scores);
    for score in scores.iter_mut() {
        *score = math::exp(*score - max);
    }
    let sum = math::sum(scores.len(), |i| scores[i]);
    let normalise = 1.0 / sum;
    for weight in scores.iter_mut() {
        *weight *= normalise;
    }
    max + sum.ln()
}

/// Scores become weights, and the gradient of the weights that of the unscaled scores, both zero outside `visible`.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
fn softmax_backward(
    scores: &mut [f32],
    dweights: &mut [f32],
    visible: std::ops::Range<usize>,
    log_sum_exp: f32,
    delta: f32,
    scale: f32,
) {
    for hidden in [0..visible.start, visible.end..scores.len()] {
        scores[hidden.clone()].fill(0.0);
        dweights[hidden].fill(0.0);
    }
    for (score, dweight) in scores[visible.clone()].iter_mut().zip(&mut dweights[visible]) {
        *score = math::exp(*score - log_sum_exp);
        *dweight = *score * (*dweight - delta) * scale;
    }
}
