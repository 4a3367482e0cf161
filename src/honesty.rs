//! What a model must keep to if its number is to mean something, checked before anything is scored.
//!
//! A position may depend on the tokens up to it in its own row, and on nothing else: not on later tokens, of which the next is
//! the one to predict, nor on other rows, nor on what the model was asked before. The check runs with the rows that are about to
//! be scored, in a group of the same size, so that a model cannot tell it from the real thing.

use crate::eval::{LanguageModel, chunks, forward, input_and_targets, logits};
use crate::ops;
use crate::train::Diverged;
use anyhow::{Result, bail};
use burn::tensor::{Device, Tensor};
use rand::{Rng, RngExt};
use std::time::Instant;

/// A change of logits that is always allowed. It moves a loss by at most twice as much in nats: far less than what two runs
/// differ by. Where a device computes the same every time, the change of an honest model is nought.
const TINY: f32 = 1e-4;
/// The change that is allowed, as a multiple of what the same tokens differ by when they are computed twice: the largest of
/// many such differences is nearly the same from one time to the next.
const NOISE_FACTOR: f32 = 4.0;
/// The largest difference that a device may make by itself; about the rounding of a deep model in bfloat16.
const LARGEST_NOISE: f32 = 0.25;
/// Positions whose losses are compared with the softmax in float64.
const SOFTMAX_POSITIONS: usize = 8;
/// What they may differ by in nats.
const SOFTMAX_TOLERANCE: f64 = 1e-3;

/// The model sees what it must not, or its losses are not those of probabilities: no number, and readers of a run's log look for
/// the word FAIL.
#[derive(Debug, thiserror::Error)]
#[error("FAIL: {0}")]
pub struct Unmeasurable(pub String);

/// The share of the groups that is checked, and with it of an evaluation's time.
const SHARE: f64 = 0.1;

/// Chooses which groups are checked: the first of each size, and of the others some that nobody can know before.
///
/// By its size, its place or its content a model could tell a group that is checked from one that is not.
#[derive(Debug, Default)]
pub(crate) struct Sample {
    /// The number of rows of the group before.
    rows: Option<usize>,
    /// Groups so far that were not the first of their size.
    others: usize,
}

impl Sample {
    /// Whether the next group, which has `rows` rows, is checked.
    pub(crate) fn takes(&mut self, rows: usize) -> bool {
        if self.rows.replace(rows) != Some(rows) {
            return true;
        }
        self.others += 1;
        // More of the first few: an evaluation may have no others. The generator gets its seed from the operating system.
        rand::rng().random_bool((1.0 / self.others as f64).max(SHARE))
    }
}

/// Checks what `model` sees, with `rows` that are about to be scored and what it has made of them, `hidden` `[b, t, c]`.
///
/// In each row the tokens after a random cut are replaced by those of the next row; one row is replaced wholly. The logits before
/// the cuts must not change.
///
/// # Errors
/// [`Unmeasurable`] if they do, or if the evaluator's losses are not those of probabilities over the whole vocabulary;
/// [`Diverged`] if logits are not finite.
pub(crate) fn check(
    model: &impl LanguageModel,
    hidden: &Tensor<3>,
    rows: &[u32],
    row_length: usize,
    vocab_size: usize,
    chunk_logits: usize,
    device: &Device,
) -> Result<()> {
    let start = Instant::now();
    // Anew each time: an edit must not know the cuts.
    let mut rng = rand::rng();
    check_softmax(model, hidden, vocab_size, &mut rng)?;
    let kept = cuts(rows.len() / row_length, row_length - 1, &mut rng);
    let (input, _) = input_and_targets(&with_changed_tails(rows, row_length, &kept, vocab_size), row_length, device);
    let changes = |other: Tensor<3>| changes(model, hidden, other, vocab_size, chunk_logits);
    let after_change = changes(forward(model, input)?)?;
    let before_cuts =
        after_change.chunks(row_length - 1).zip(&kept).flat_map(|(row, &kept)| row[..kept].iter().enumerate());
    let (position, &change) = before_cuts.max_by(|(_, a), (_, b)| a.total_cmp(b)).unwrap_or((0, &0.0));
    if change > TINY {
        let (same, _) = input_and_targets(rows, row_length, device);
        let noise = changes(forward(model, same)?)?.into_iter().fold(0.0, f32::max);
        if noise > LARGEST_NOISE {
            bail!(Unmeasurable(format!(
                "the same tokens got logits that differ by {noise} between two calls, expected at most {LARGEST_NOISE}; hint: the model in src/model.rs must compute the same every time, without random numbers and without keeping anything"
            )));
        }
        if change > TINY + NOISE_FACTOR * noise {
            bail!(Unmeasurable(format!(
                "the logits at position {position} changed by {change} when only tokens after it and other rows did, expected at most {}; hint: each position in src/model.rs may depend on the tokens up to it in its own row alone",
                TINY + NOISE_FACTOR * noise
            )));
        }
    }
    tracing::debug!("what the model sees was checked with {} rows in {:.2?}", kept.len(), start.elapsed());
    Ok(())
}

/// How many tokens each of `b` rows of `t` keeps: some, but one row none, if it is not the only one.
fn cuts(b: usize, t: usize, rng: &mut impl Rng) -> Vec<usize> {
    let mut kept: Vec<usize> = (0..b).map(|_| if t > 1 { rng.random_range(1..t) } else { t }).collect();
    if b > 1 {
        kept[rng.random_range(0..b)] = 0;
    }
    kept
}

/// `rows` with other tokens after the first `kept` of each: those of the next row, which are text, too, or else any.
fn with_changed_tails(rows: &[u32], row_length: usize, kept: &[usize], vocab_size: usize) -> Vec<u32> {
    let mut changed = rows.to_vec();
    let next_rows = rows.chunks_exact(row_length).cycle().skip(1);
    for ((row, next), &kept) in changed.chunks_exact_mut(row_length).zip(next_rows).zip(kept) {
        for (token, &other) in row.iter_mut().zip(next).skip(kept) {
            *token = if other == *token { (other + 1) % vocab_size as u32 } else { other };
        }
    }
    changed
}

/// By how much the logits of each position differ between two forward passes, `[b, t, c]` each; row after row.
fn changes(
    model: &impl LanguageModel,
    one: &Tensor<3>,
    other: Tensor<3>,
    vocab_size: usize,
    chunk_logits: usize,
) -> Result<Vec<f32>> {
    let [b, t, c] = one.dims();
    let (one, other) = (one.clone().reshape([b * t, c]), other.reshape([b * t, c]));
    let mut changes = Vec::new();
    for chunk in chunks(b * t, vocab_size, chunk_logits) {
        let part = |hidden: &Tensor<2>| logits(model, hidden.clone().slice([chunk.clone(), 0..c]), vocab_size);
        let (one, other) = (part(&one)?, part(&other)?); // [n, v]
        // Nought, unless something is infinite or no number, which the largest difference may pass over.
        let finite = (one.clone() * 0.0 + other.clone() * 0.0).sum_dim(1);
        changes.push((one - other).abs().max_dim(1) + finite); // [n, 1]
    }
    let changes: Vec<f32> = Tensor::cat(changes, 0).into_data_as::<f32>().iter::<f32>().collect();
    if changes.iter().any(|change| !change.is_finite()) {
        bail!(Diverged::new(
            f64::NAN,
            "val_bpb is NaN, expected a number: the model's logits are not finite; hint: the last steps diverged, a learning rate in src/model.rs may be too large".to_owned()
        ));
    }
    Ok(changes)
}

/// Makes sure that the losses are those of probabilities that sum to 1 over the vocabulary, at some positions in a row: the
/// evaluator's cross-entropy of any target against the softmax in float64.
fn check_softmax(model: &impl LanguageModel, hidden: &Tensor<3>, vocab_size: usize, rng: &mut impl Rng) -> Result<()> {
    let [b, t, c] = hidden.dims();
    let n = SOFTMAX_POSITIONS.min(b * t);
    let start = rng.random_range(0..=b * t - n);
    let logits = logits(model, hidden.clone().reshape([b * t, c]).slice([start..start + n, 0..c]), vocab_size)?;
    let targets: Vec<usize> = (0..n).map(|_| rng.random_range(0..vocab_size)).collect();
    let ids: Vec<i64> = targets.iter().map(|&target| target as i64).collect();
    let losses = ops::cross_entropy(logits.clone(), ops::upload(ids, &hidden.device()));
    let losses: Vec<f32> = losses.into_data_as::<f32>().iter::<f32>().collect();
    let logits: Vec<f64> = logits.into_data_as::<f32>().iter::<f32>().map(f64::from).collect();
    for ((logits, target), loss) in logits.chunks(vocab_size).zip(targets).zip(losses) {
        let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let log_sum = largest + logits.iter().map(|logit| (logit - largest).exp()).sum::<f64>().ln();
        let expected = log_sum - logits[target];
        let is_close = (f64::from(loss) - expected).abs() <= SOFTMAX_TOLERANCE * expected.abs().max(1.0);
        // Where logits are not finite there is more to say than this.
        if expected.is_finite() && !is_close {
            bail!(Unmeasurable(format!(
                "the loss of token {target} is {loss} nats, expected {expected}, that of a probability over the whole vocabulary; hint: this device computes wrong numbers, `autoresearch verify` says where"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_after_the_cut_is_another_and_none_before_it() {
        let (row_length, vocab_size) = (9, 5);
        // Two equal rows among them, and one row alone.
        for rows in [vec![3; 18], vec![4; 9], (0..27).map(|i| i * i % 5).collect::<Vec<u32>>()] {
            let kept: Vec<usize> = (0..rows.len() / row_length).map(|row| row * 4).collect();
            let changed = with_changed_tails(&rows, row_length, &kept, vocab_size);
            for ((before, after), kept) in rows.chunks(row_length).zip(changed.chunks(row_length)).zip(kept) {
                let same: Vec<bool> = before.iter().zip(after).map(|(a, b)| a == b).collect();
                assert_eq!(same, [vec![true; kept], vec![false; row_length - kept]].concat());
                assert!(after.iter().all(|&token| (token as usize) < vocab_size));
            }
        }
    }

    #[test]
    fn the_first_of_each_size_and_about_a_tenth_of_the_others_are_checked() {
        let mut sample = Sample::default();
        // The second one, too: it may be the last.
        assert_eq!([8, 8, 3].map(|rows| sample.takes(rows)), [true; 3]);
        let taken: Vec<bool> = (0..10_000).map(|_| sample.takes(3)).collect();
        let count = taken.iter().filter(|&&taken| taken).count();
        assert!((800..1200).contains(&count), "{count}");
        // Others each time.
        assert_ne!(taken, (0..10_000).map(|_| sample.takes(3)).collect::<Vec<_>>());
    }

    #[test]
    fn each_row_keeps_a_start_but_one() {
        let mut rng = rand::rng();
        for _ in 0..100 {
            let kept = cuts(8, 16, &mut rng);
            assert_eq!(kept.iter().filter(|&&kept| kept == 0).count(), 1, "{kept:?}");
            assert!(kept.iter().all(|kept| *kept < 16), "{kept:?}");
        }
        assert!((1..16).contains(&cuts(1, 16, &mut rng)[0]));
        assert_eq!(cuts(1, 1, &mut rng), [1]);
    }
}
