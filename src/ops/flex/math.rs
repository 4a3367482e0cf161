//! exp, tanh and sums in forms that compilers turn into vector code.

/// Partial sums kept side by side, so that a sum may be vectorised.
const LANES: usize = 32;

/// e^x with a relative error of about 1e-7; x below −87 gives about 1e-38, above 88 about 2e38.
///
/// Source: Cody-Waite reduction and the degree-5 polynomial of Moshier's Cephes library (`expf`).
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Adding 1.5·2^23 leaves the nearest integer in the low bits of the mantissa.
    const ROUND: f32 = 12_582_912.0;
    let x = x.clamp(-87.0, 88.0);
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_2e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 5e-1;
    let p = p * r * r + r + 1.0;
    let power = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    p * f32::from_bits((power.wrapping_add(127) << 23) as u32)
}

/// tanh x with a relative error of about 1e-6. Source: Cephes (`tanhf`).
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let z = x * x;
    let p = -5.704_988_7e-3;
    let p = p * z + 2.063_909e-2;
    let p = p * z - 5.373_971_6e-2;
    let p = p * z + 1.333_144_2e-1;
    let p = p * z - 3.333_328e-1;
    let small = p * z * x + x;
    let large = (1.0 - 2.0 / (exp(2.0 * x.abs()) + 1.0)).copysign(x);
    if x.abs() < 0.625 { small } else { large }
}

/// Sum over i of `term(i)` for i in 0..n.
#[inline(always)]
pub fn sum(n: usize, term: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let whole = n - n % LANES;
    for start in (0..whole).step_by(LANES) {
        for (lane, total) in lanes.iter_mut().enumerate() {
            *total += term(start + lane);
        }
    }
    let rest: f32 = (whole..n).map(&term).sum();
    lanes.iter().sum::<f32>() + rest
}

/// Sum over i of `left[i] · right[i]` in float64.
#[inline(always)]
pub fn dot64(left: &[f32], right: &[f32]) -> f64 {
    let mut lanes = [0f64; LANES];
    let (left_chunks, right_chunks) = (left.chunks_exact(LANES), right.chunks_exact(LANES));
    let rest: f64 =
        left_chunks.remainder().iter().zip(right_chunks.remainder()).map(|(&x, &y)| x as f64 * y as f64).sum();
    for (left, right) in left_chunks.zip(right_chunks) {
        for ((total, &x), &y) in lanes.iter_mut().zip(left).zip(right) {
            *total += x as f64 * y as f64;
        }
    }
    lanes.iter().sum::<f64>() + rest
}

/// The largest of `values`; −∞ if there is none.
#[inline(always)]
pub fn max(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = if value > *lane { value } else { *lane };
        }
    }
    lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_and_tanh_agree_with_float64() {
        for i in -8_000..8_000 {
            let x = i as f32 * 0.01;
            let exact = (x as f64).exp();
            assert!((exp(x) as f64 - exact).abs() <= 4e-7 * exact, "exp({x}) = {}, expected {exact}", exp(x));
            let exact = (x as f64).tanh();
            assert!((tanh(x) as f64 - exact).abs() <= 1e-6 * exact.abs(), "tanh({x}) = {}, expected {exact}", tanh(x));
        }
    }

    #[test]
    fn nan_stays_nan() {
        assert!(exp(f32::NAN).is_nan() && tanh(f32::NAN).is_nan());
    }

    #[test]
    fn sum_and_max_take_every_element() {
        for n in [0, 1, 31, 32, 33, 100] {
            let values: Vec<f32> = (0..n).map(|i| ((i * 37) % 101) as f32).collect();
            assert_eq!(sum(n, |i| values[i]), values.iter().sum::<f32>());
            assert_eq!(max(&values), values.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        }
    }
}
