//! Products of strided float32 matrices through the `gemm` crate.

use gemm::Parallelism;
use std::marker::PhantomData;

/// A matrix in somebody else's memory: element (r, c) lies at `start[r * row_stride + c * column_stride]`.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    elements: &'a [f32],
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Rows of contiguous elements, `row_stride` apart.
    pub fn rows(elements: &'a [f32], row_stride: usize) -> Self {
        Self { elements, row_stride, column_stride: 1 }
    }

    /// The same elements with rows and columns exchanged.
    pub fn transposed(self) -> Self {
        Self { row_stride: self.column_stride, column_stride: self.row_stride, ..self }
    }

    /// Without the first `rows` rows.
    pub fn skip_rows(self, rows: usize) -> Self {
        Self { elements: &self.elements[rows * self.row_stride..], ..self }
    }

    /// Without the first `columns` columns.
    pub fn skip_columns(self, columns: usize) -> Self {
        Self { elements: &self.elements[columns * self.column_stride..], ..self }
    }

    fn holds(&self, rows: usize, columns: usize) -> bool {
        rows == 0
            || columns == 0
            || (rows - 1) * self.row_stride + (columns - 1) * self.column_stride < self.elements.len()
    }
}

/// A matrix to write: `rows` rows of `columns` contiguous elements, `row_stride` apart.
pub struct MatrixMut<'a> {
    start: *mut f32,
    rows: usize,
    columns: usize,
    row_stride: usize,
    memory: PhantomData<&'a mut [f32]>,
}

impl<'a> MatrixMut<'a> {
    /// A matrix in `elements`.
    ///
    /// # Panics
    /// If they do not hold it.
    pub fn new(elements: &'a mut [f32], rows: usize, columns: usize, row_stride: usize) -> Self {
        assert!(columns <= row_stride || rows <= 1, "rows of {columns} elements overlap, {row_stride} apart");
        let needed = if rows == 0 { 0 } else { (rows - 1) * row_stride + columns };
        assert!(needed <= elements.len(), "the matrix takes {needed} elements of {}", elements.len());
        Self { start: elements.as_mut_ptr(), rows, columns, row_stride, memory: PhantomData }
    }

    /// A matrix that starts at `start`.
    ///
    /// # Safety
    /// The rows must lie in one allocation that outlives this value, and nothing else may read or write them meanwhile.
    pub unsafe fn from_raw(start: *mut f32, rows: usize, columns: usize, row_stride: usize) -> Self {
        Self { start, rows, columns, row_stride, memory: PhantomData }
    }
}

/// out = keep·out + factor·left·right; with keep = 0 what was in `out` is not read. Sizes: left `[m, k]`, right `[k, n]`.
#[derive(Clone, Copy)]
pub struct Product {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub factor: f32,
    pub keep: f32,
    pub parallel: bool,
}

impl Product {
    /// A plain product on the calling thread.
    pub fn new(m: usize, n: usize, k: usize) -> Self {
        Self { m, n, k, factor: 1.0, keep: 0.0, parallel: false }
    }

    /// Multiplies.
    ///
    /// # Panics
    /// If the sizes of the operands are others.
    pub fn run(self, out: MatrixMut, left: Matrix, right: Matrix) {
        let Self { m, n, k, factor, keep, parallel } = self;
        assert!(left.holds(m, k) && right.holds(k, n), "an operand is smaller than [{m}, {k}] x [{k}, {n}]");
        assert_eq!((out.rows, out.columns), (m, n), "the product is [{m}, {n}]");
        let parallelism = if parallel { Parallelism::Rayon(0) } else { Parallelism::None };
        // SAFETY: both operands hold their elements (checked above); `out` is m rows of n in memory of its own.
        unsafe {
            gemm::gemm(
                m,
                n,
                k,
                out.start,
                1,
                out.row_stride as isize,
                keep != 0.0,
                left.elements.as_ptr(),
                left.column_stride as isize,
                left.row_stride as isize,
                right.elements.as_ptr(),
                right.column_stride as isize,
                right.row_stride as isize,
                keep,
                factor,
                false,
                false,
                false,
                parallelism,
            );
        }
    }
}
