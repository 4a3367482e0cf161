//! Normalisation, rotation and activation, row by row.

use super::{TASK_ELEMENTS, math};
use multiversion::multiversion;
use rayon::prelude::*;

/// Calls `kernel(first element, out)` for parts of the output that hold whole rows of `row` elements, in parallel.
fn fill_rows(n: usize, row: usize, kernel: impl Fn(usize, &mut [f32]) + Sync) -> Vec<f32> {
    let mut out = vec![0f32; n];
    let part = TASK_ELEMENTS.div_ceil(row) * row;
    out.par_chunks_mut(part).enumerate().for_each(|(i, out)| kernel(i * part, out));
    out
}

/// See [`crate::ops::rms_norm`]; `x` is rows of `c`.
pub fn rms_norm(x: &[f32], c: usize) -> Vec<f32> {
    #[multiversion(targets("x86_64+avx512f+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
    fn kernel(x: &[f32], out: &mut [f32], c: usize) {
        for (x, out) in x.chunks_exact(c).zip(out.chunks_exact_mut(c)) {
            let scale = inverse_rms(x) as f32;
            for (out, x) in out.iter_mut().zip(x) {
                *out = x * scale;
            }
        }
    }
    fill_rows(x.len(), c, |start, out| kernel(&x[start..start + out.len()], out, c))
}

/// Gradient of [`rms_norm`] with respect to `x`.
pub fn rms_norm_backward(x: &[f32], grad: &[f32], c: usize) -> Vec<f32> {
    #[multiversion(targets("x86_64+avx512f+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
    fn kernel(x: &[f32], grad: &[f32], out: &mut [f32], c: usize) {
        for ((x, grad), out) in x.chunks_exact(c).zip(grad.chunks_exact(c)).zip(out.chunks_exact_mut(c)) {
            let inverse = inverse_rms(x);
            let scale = inverse as f32;
            let along = scale as f64 * inverse * inverse * math::dot64(x, grad) / c as f64;
            // In two parts, so that the result is orthogonal to x (but for ε) as exactly as float32 can hold it.
            let (high, low) = (along as f32, (along - along as f32 as f64) as f32);
            for ((out, x), grad) in out.iter_mut().zip(x).zip(grad) {
                *out = (grad * scale - x * high) - x * low;
            }
        }
    }
    fill_rows(x.len(), c, |start, out| {
        let end = start + out.len();
        kernel(&x[start..end], &grad[start..end], out, c)
    })
}

/// 1 / sqrt(mean(x²) + ε), in float64: the gradient's part along x is a difference of two nearly equal sums, and at the
/// start of training nothing but that part moves the per-layer scalars.
#[inline(always)]
fn inverse_rms(x: &[f32]) -> f64 {
    1.0 / (math::dot64(x, x) / x.len() as f64 + f32::EPSILON as f64).sqrt()
}

/// See [`crate::ops::rotary`]; `x` is `[b, t, h, d]`, `cos` and `sin` `[t, d / 2]`.
pub fn rotary(x: &[f32], cos: &[f32], sin: &[f32], t: usize, h: usize, d: usize) -> Vec<f32> {
    #[multiversion(targets("x86_64+avx512f+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
    fn kernel(x: &[f32], cos: &[f32], sin: &[f32], out: &mut [f32]) {
        let half = cos.len();
        for (x, out) in x.chunks_exact(2 * half).zip(out.chunks_exact_mut(2 * half)) {
            let ((a, b), (first, second)) = (x.split_at(half), out.split_at_mut(half));
            for i in 0..half {
                first[i] = a[i] * cos[i] + b[i] * sin[i];
                second[i] = b[i] * cos[i] - a[i] * sin[i];
            }
        }
    }
    let half = d / 2;
    fill_rows(x.len(), h * d, |start, out| {
        for (offset, out) in out.chunks_exact_mut(h * d).enumerate() {
            let row = start / (h * d) + offset;
            let angle = (row % t) * half..(row % t + 1) * half;
            kernel(&x[row * h * d..(row + 1) * h * d], &cos[angle.clone()], &sin[angle], out);
        }
    })
}

/// max(x, 0)².
pub fn squared_relu(x: &[f32]) -> Vec<f32> {
    #[multiversion(targets("x86_64+avx512f+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
    fn kernel(x: &[f32], out: &mut [f32]) {
        for (out, &x) in out.iter_mut().zip(x) {
            // Written so that a NaN stays one.
            let positive = if x < 0.0 { 0.0 } else { x };
            *out = positive * positive;
        }
    }
    fill_rows(x.len(), 1, |start, out| kernel(&x[start..start + out.len()], out))
}

/// Gradient of [`squared_relu`] with respect to its input, from its output.
pub fn squared_relu_backward(squares: &[f32], grad: &[f32]) -> Vec<f32> {
    #[multiversion(targets("x86_64+avx512f+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
    fn kernel(squares: &[f32], grad: &[f32], out: &mut [f32]) {
        for ((out, square), grad) in out.iter_mut().zip(squares).zip(grad) {
            *out = 2.0 * square.sqrt() * grad;
        }
    }
    fill_rows(squares.len(), 1, |start, out| {
        let end = start + out.len();
        kernel(&squares[start..end], &grad[start..end], out)
    })
}

/// x · x_scale + y · y_scale.
pub fn mix(x: &[f32], x_scale: f32, y: &[f32], y_scale: f32) -> Vec<f32> {
    #[multiversion(targets("x86_64+avx512f+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
    fn kernel(x: &[f32], x_scale: f32, y: &[f32], y_scale: f32, out: &mut [f32]) {
        for ((out, x), y) in out.iter_mut().zip(x).zip(y) {
            *out = x * x_scale + y * y_scale;
        }
    }
    fill_rows(x.len(), 1, |start, out| {
        let end = start + out.len();
        kernel(&x[start..end], x_scale, &y[start..end], y_scale, out)
    })
}

/// x · factor.
pub fn scale(x: &[f32], factor: f32) -> Vec<f32> {
    #[multiversion(targets("x86_64+avx512f+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
    fn kernel(x: &[f32], factor: f32, out: &mut [f32]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = x * factor;
        }
    }
    fill_rows(x.len(), 1, |start, out| kernel(&x[start..start + out.len()], factor, out))
}

/// Sum of x · y, in float64.
pub fn dot(x: &[f32], y: &[f32]) -> f32 {
    #[multiversion(targets("x86_64+avx512f+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
    fn kernel(x: &[f32], y: &[f32]) -> f64 {
        math::dot64(x, y)
    }
    // Collected first, so that the order of the sum does not depend on the threads.
    let sums: Vec<f64> =
        x.par_chunks(TASK_ELEMENTS).zip(y.par_chunks(TASK_ELEMENTS)).map(|(x, y)| kernel(x, y)).collect();
    sums.into_iter().sum::<f64>() as f32
}

/// cap·tanh(x / cap).
pub fn softcap(x: &[f32], cap: f32) -> Vec<f32> {
    #[multiversion(targets("x86_64+avx512f+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
    fn kernel(x: &[f32], cap: f32, out: &mut [f32]) {
        let inverse = 1.0 / cap;
        for (out, x) in out.iter_mut().zip(x) {
            *out = cap * math::tanh(x * inverse);
        }
    }
    fill_rows(x.len(), 1, |start, out| kernel(&x[start..start + out.len()], cap, out))
}
