//! CubeCL runtimes (GPUs through Vulkan, Metal and DX12): the portable bodies, with matrices multiplied in the type that the
//! device is fastest in. Everything else is computed in float32, which all devices can: some have bfloat16 for products only.

use super::{FusedOps, Kernels, portable};
use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, FloatDType, Shape};
use std::sync::atomic::{AtomicU8, Ordering};

/// Types that products may be taken in; [`PRODUCT_TYPE`] is a place in it.
const PRODUCT_TYPES: [FloatDType; 3] = [FloatDType::F32, FloatDType::BF16, FloatDType::F16];

/// One for the whole process, which computes on one device.
static PRODUCT_TYPE: AtomicU8 = AtomicU8::new(0);

/// Rows whose part of a weight's gradient is one product: all rows at once would keep too few of a GPU's processors busy,
/// since the gradient itself is small.
const GRADIENT_ROWS: usize = 4096;

/// From now on matrices on CubeCL devices are multiplied in `dtype`, with sums in float32 where the hardware has it so.
///
/// # Panics
/// If it is none of float32, bfloat16 and float16.
pub fn multiply_in(dtype: FloatDType) {
    let place = PRODUCT_TYPES.iter().position(|known| *known == dtype);
    let place = place.unwrap_or_else(|| panic!("products are taken in {PRODUCT_TYPES:?}, found {dtype:?}"));
    PRODUCT_TYPE.store(place as u8, Ordering::Relaxed);
}

fn product_type() -> FloatDType {
    PRODUCT_TYPES[usize::from(PRODUCT_TYPE.load(Ordering::Relaxed))]
}

/// The size of the equal parts that `rows` are cut into for products over them.
fn part_of(rows: usize) -> usize {
    (1..=GRADIENT_ROWS.min(rows)).rev().find(|part| rows.is_multiple_of(*part)).unwrap_or(1)
}

/// Σ over rows of aᵀ·b, as a sum of products over parts of the rows: `[n, i]`, `[n, j]` to `[i, j]`.
fn product_over_rows(a: FloatTensor<Cube>, b: FloatTensor<Cube>) -> FloatTensor<Cube> {
    let (rows, i, j) = (a.shape()[0], a.shape()[1], b.shape()[1]);
    let part = part_of(rows);
    // Many small parts are no help: rows that have no large divisor are rare.
    if part == rows || part < GRADIENT_ROWS / 8 {
        return Cube::product(Cube::float_transpose(a), b);
    }
    let stacked = |x, columns| Cube::float_reshape(x, Shape::from(vec![rows / part, part, columns]));
    let parts = Cube::product(Cube::float_transpose(stacked(a, i)), stacked(b, j)); // [rows / part, i, j]
    Cube::float_reshape(Cube::float_sum_dim(parts, 0), Shape::from(vec![i, j]))
}

impl FusedOps for Cube {
    fn operand(x: FloatTensor<Self>) -> FloatTensor<Self> {
        if x.dtype() == DType::from(product_type()) { x } else { Self::float_cast(x, product_type()) }
    }

    fn product(a: FloatTensor<Self>, b: FloatTensor<Self>) -> FloatTensor<Self> {
        let out = Self::float_matmul(Self::operand(a), Self::operand(b));
        if out.dtype() == DType::F32 { out } else { Self::float_cast(out, FloatDType::F32) }
    }
}

impl Kernels for Cube {
    type RmsNormState = FloatTensor<Self>;

    /// By products with one-hot rows: burn's own adds up the rows of all tokens one after the other.
    fn embed_backward(
        weight: FloatTensor<Self>,
        tokens: IntTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let (weight, shape) = (weight.shape(), grad.shape());
        let (v, c, rows) = (weight[0], weight[1], shape[0] * shape[1]);
        let scale = Self::gradient_scale(rows);
        let grad = portable::times::<Self>(Self::float_reshape(grad, Shape::from(vec![rows, c])), scale);
        let tokens = Self::int_reshape(tokens, Shape::from(vec![rows]));
        let ids = portable::token_ids::<Self>(v, &grad.device());
        let grad = Self::operand(grad);
        let parts = portable::row_chunks(rows).map(|(start, end)| {
            let tokens = portable::target_column::<Self>(&tokens, start, end);
            let grad = portable::slice::<Self>(grad.clone(), 0, start, end);
            Self::product(Self::float_transpose(portable::one_hot::<Self>(tokens, ids.clone())), grad)
        });
        let sum = parts.reduce(Self::float_add).expect("at least one row");
        portable::times::<Self>(sum, 1.0 / scale)
    }

    fn rms_norm_forward(x: FloatTensor<Self>) -> (FloatTensor<Self>, Self::RmsNormState) {
        (portable::rms_norm::<Self>(x.clone()), x)
    }

    fn rms_norm_backward(x: Self::RmsNormState, grad: FloatTensor<Self>) -> FloatTensor<Self> {
        portable::rms_norm_backward::<Self>(x, grad)
    }

    /// Float16 has no numbers below 6e-8, where a single row's part of a mean lies: with this factor the gradient is that of
    /// the sum (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2; here around single products).
    fn gradient_scale(rows: usize) -> f64 {
        if product_type() == FloatDType::F16 { rows.next_power_of_two() as f64 } else { 1.0 }
    }

    fn project_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 2] {
        let scale = Self::gradient_scale(grad.shape()[0]);
        let grad = Self::operand(portable::times::<Self>(grad, scale));
        let dweight = product_over_rows(grad.clone(), x);
        [Self::product(grad, weight), dweight].map(|gradient| portable::times::<Self>(gradient, 1.0 / scale))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_cut_into_the_largest_equal_parts() {
        for (rows, part) in [(32_768, 4096), (4096, 4096), (6000, 3000), (5, 5), (1, 1), (8191, 1)] {
            assert_eq!(part_of(rows), part, "{rows}");
        }
    }

    #[test]
    #[should_panic(expected = "F64")]
    fn products_in_another_type_are_refused() {
        multiply_in(FloatDType::F64);
    }
}
