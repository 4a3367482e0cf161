//! The loss head: logits, softcap, cross-entropy and both gradients, in chunks of rows.

use super::math;
use super::matrix::{Matrix, MatrixMut, Product};
use multiversion::multiversion;
use rayon::prelude::*;

/// Logits that exist at once: 8 MiB of float32, about a core's share of the last cache.
const CHUNK_LOGITS: usize = 1 << 21;

/// The operands of [`crate::ops::softcap_cross_entropy`].
pub struct Head<'a> {
    hidden: &'a [f32],
    weight: &'a [f32],
    targets: &'a [usize],
    cap: f32,
    c: usize,
    v: usize,
}

impl<'a> Head<'a> {
    /// `hidden` `[n, c]`, `weight` `[v, c]`, `targets` `[n]`.
    pub fn new(hidden: &'a [f32], weight: &'a [f32], targets: &'a [usize], cap: f32) -> Self {
        let c = hidden.len() / targets.len();
        Self { hidden, weight, targets, cap, c, v: weight.len() / c }
    }

    /// Mean loss in nats.
    pub fn loss(&self) -> f32 {
        let mut total = 0f64;
        self.for_each_chunk(|_, targets, logits| {
            total += rows_loss(logits, targets, self.cap, None);
        });
        (total / self.targets.len() as f64) as f32
    }

    /// Mean loss in nats, its gradient with respect to `hidden` and to `weight`.
    pub fn loss_and_gradients(&self) -> (f32, Vec<f32>, Vec<f32>) {
        let Self { c, v, .. } = *self;
        let mut total = 0f64;
        let mut dhidden = vec![0f32; self.hidden.len()];
        let mut dweight = vec![0f32; self.weight.len()];
        let scale = 1.0 / self.targets.len() as f32;
        self.for_each_chunk(|start, targets, logits| {
            let rows = targets.len();
            total += rows_loss(logits, targets, self.cap, Some(scale));
            let dlogits = Matrix::rows(logits, v);
            let hidden = &self.hidden[start * c..(start + rows) * c];
            let out = MatrixMut::new(&mut dhidden[start * c..], rows, c, c);
            Product { parallel: true, ..Product::new(rows, c, v) }.run(out, dlogits, Matrix::rows(self.weight, c));
            let out = MatrixMut::new(&mut dweight, v, c, c);
            Product { keep: 1.0, parallel: true, ..Product::new(v, c, rows) }.run(
                out,
                dlogits.transposed(),
                Matrix::rows(hidden, c),
            );
        });
        ((total / self.targets.len() as f64) as f32, dhidden, dweight)
    }

    /// Calls `each(first row, targets, logits [rows, v])` for every chunk of rows.
    fn for_each_chunk(&self, mut each: impl FnMut(usize, &[usize], &mut [f32])) {
        let Self { c, v, .. } = *self;
        let rows = (CHUNK_LOGITS / v).clamp(1, self.targets.len());
        let mut logits = vec![0f32; rows * v];
        for (i, targets) in self.targets.chunks(rows).enumerate() {
            let (start, rows) = (i * rows, targets.len());
            let logits = &mut logits[..rows * v];
            let hidden = &self.hidden[start * c..(start + rows) * c];
            Product { parallel: true, ..Product::new(rows, v, c) }.run(
                MatrixMut::new(logits, rows, v, v),
                Matrix::rows(hidden, c),
                Matrix::rows(self.weight, c).transposed(),
            );
            each(start, targets, logits);
        }
    }
}

/// Sum of the rows' losses in nats; see [`softcap_row`] for `scale`.
fn rows_loss(logits: &mut [f32], targets: &[usize], cap: f32, scale: Option<f32>) -> f64 {
    let v = logits.len() / targets.len();
    let rows = logits.par_chunks_exact_mut(v).zip(targets);
    // Collected first, so that the order of the sum does not depend on the threads.
    let losses: Vec<f32> = rows.map(|(row, &target)| softcap_row(row, target, cap, scale)).collect();
    losses.into_iter().map(f64::from).sum()
}

/// Loss of one row in nats; with `scale`, the logits become scale · d loss / d logits.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
fn softcap_row(row: &mut [f32], target: usize, cap: f32, scale: Option<f32>) -> f32 {
    let inverse = 1.0 / cap;
    for z in row.iter_mut() {
        *z = math::tanh(*z * inverse);
    }
    // |cap·tanh| ≤ cap: no maximum has to be taken out for the sum to stay in range.
    let sum = math::sum(row.len(), |i| math::exp(cap * row[i]));
    let loss = sum.ln() - cap * row[target];
    if let Some(scale) = scale {
        let (squashed_target, normalise) = (row[target], 1.0 / sum);
        for u in row.iter_mut() {
            // d tanh(z / cap)·cap / dz = 1 − tanh²
            *u = scale * math::exp(cap * *u) * normalise * (1.0 - *u * *u);
        }
        row[target] -= scale * (1.0 - squashed_target * squashed_target);
    }
    loss
}

/// Cross-entropy of each row of `logits` `[n, v]`.
pub fn cross_entropy(logits: &[f32], targets: &[usize]) -> Vec<f32> {
    #[multiversion(targets("x86_64+avx512f+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
    fn kernel(row: &[f32], target: usize) -> f32 {
        let max = math::max(row);
        let sum = math::sum(row.len(), |i| math::exp(row[i] - max));
        max + sum.ln() - row[target]
    }
    let v = logits.len() / targets.len();
    logits.par_chunks_exact(v).zip(targets).map(|(row, &target)| kernel(row, target)).collect()
}
