//! Newton-Schulz iterations, a matrix to a thread; Gram matrices are symmetric, so only half of each is computed.

use super::math;
use super::matrix::{Matrix, MatrixMut, Product};
use multiversion::multiversion;
use rayon::prelude::*;

/// Symmetric products smaller than this are computed whole.
const SMALLEST_HALF: usize = 48;

/// See [`crate::ops::newton_schulz`]; `x` is matrices of `rows` · `columns`.
pub fn newton_schulz(x: &[f32], rows: usize, columns: usize, coefficients: &[[f32; 3]]) -> Vec<f32> {
    let (size, side) = (rows * columns, rows.min(columns));
    let mut out = x.to_vec();
    // With fewer matrices than threads, the products themselves are spread over threads.
    let parallel = x.len() / size.max(1) < rayon::current_num_threads();
    out.par_chunks_exact_mut(size).for_each_init(
        || Buffers { gram: vec![0f32; side * side], polynomial: vec![0f32; side * side], previous: vec![0f32; size] },
        |buffers, x| {
            normalise(x);
            for &coefficients in coefficients {
                iterate(x, rows, columns, coefficients, buffers, parallel);
            }
        },
    );
    out
}

/// Divides x by 1.02·‖x‖ + 1e-6.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
fn normalise(x: &mut [f32]) {
    let scale = 1.0 / (math::dot64(x, x).sqrt() as f32 * 1.02 + 1e-6);
    for x in x.iter_mut() {
        *x *= scale;
    }
}

/// A thread's memory.
struct Buffers {
    gram: Vec<f32>,
    polynomial: Vec<f32>,
    previous: Vec<f32>,
}

/// x ← a·x + (b·G + c·G²)·x, or a·x + x·(b·G + c·G²) where x is taller than wide.
fn iterate(x: &mut [f32], rows: usize, columns: usize, [a, b, c]: [f32; 3], buffers: &mut Buffers, parallel: bool) {
    let Buffers { gram, polynomial, previous } = buffers;
    let (tall, side) = (rows > columns, rows.min(columns));
    previous.copy_from_slice(x);
    let previous = Matrix::rows(previous, columns);
    let across = if tall { previous.transposed() } else { previous };
    let product = Product { parallel, ..Product::new(side, side, rows.max(columns)) };
    lower_triangle(gram, 0, side, side, across, across.transposed(), product);
    mirror(gram, side);
    polynomial.copy_from_slice(gram);
    let gram = Matrix::rows(gram, side);
    let square = Product { factor: c, keep: b, parallel, ..Product::new(side, side, side) };
    lower_triangle(polynomial, 0, side, side, gram, gram, square);
    mirror(polynomial, side);
    let polynomial = Matrix::rows(polynomial, side);
    let out = MatrixMut::new(x, rows, columns, columns);
    let update = Product { keep: a, parallel, ..Product::new(rows, columns, side) };
    if tall { update.run(out, previous, polynomial) } else { update.run(out, polynomial, previous) }
}

/// The diagonal block `start..start + size` of the symmetric product left·right, without what lies above the diagonal
/// of its halves; `out` has rows of `side`.
fn lower_triangle(
    out: &mut [f32],
    start: usize,
    size: usize,
    side: usize,
    left: Matrix,
    right: Matrix,
    product: Product,
) {
    let mut block = |row: usize, column: usize, m: usize, n: usize| {
        let place = MatrixMut::new(&mut out[row * side + column..], m, n, side);
        Product { m, n, ..product }.run(place, left.skip_rows(row), right.skip_columns(column));
    };
    if size < 2 * SMALLEST_HALF {
        block(start, start, size, size);
        return;
    }
    let half = size / 2;
    block(start + half, start, size - half, half);
    lower_triangle(out, start, half, side, left, right, product);
    lower_triangle(out, start + half, size - half, side, left, right, product);
}

/// Copies the lower triangle to the upper one.
fn mirror(x: &mut [f32], side: usize) {
    for row in 0..side {
        for column in row + 1..side {
            x[row * side + column] = x[column * side + row];
        }
    }
}
