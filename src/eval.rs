//! The metric: validation bits per byte, computed from the model's logits, identical for every batch size.

use crate::data::loader::Loader;
use crate::honesty;
use crate::model::Gpt;
use crate::ops;
use crate::tokenizer::Tokenizer;
use anyhow::{Result, ensure};
use burn::tensor::{DType, Device, Int, Tensor};
use std::time::{Duration, Instant};

/// How much an evaluation computes at once. The rounding, and with it the last digits of the number, hang on it.
#[derive(Clone, Copy, Debug)]
pub struct PassSizes {
    /// Tokens that go through the model at once, or one row where that is longer.
    pub tokens: usize,
    /// Logits that exist at once; memory does not grow with batch × vocabulary.
    pub logits: usize,
}

impl PassSizes {
    /// Little enough to stay near a CPU's caches.
    pub const CPU: Self = Self { tokens: 1 << 13, logits: 1 << 22 };
    /// Enough to keep a GPU busy.
    pub const GPU: Self = Self { tokens: 1 << 15, logits: 1 << 24 };
}

/// The outcome of an evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// Sum of −ln p over the targets that stand for bytes.
    pub nats: f64,
    /// Bytes that these targets stand for.
    pub bytes: u64,
    /// Bytes as the Python original counts them.
    pub upstream_bytes: u64,
    /// Targets looked at, those without bytes included.
    pub tokens: u64,
    /// Wall time.
    pub duration: Duration,
}

impl Evaluation {
    /// Bits per byte.
    pub fn bpb(&self) -> f64 {
        self.nats / (std::f64::consts::LN_2 * self.bytes as f64)
    }

    /// Bits per byte with the Python original's byte counts.
    pub fn bpb_upstream(&self) -> f64 {
        self.nats / (std::f64::consts::LN_2 * self.upstream_bytes as f64)
    }
}

/// How many bytes each token stands for.
#[derive(Clone, Debug)]
pub struct ByteLengths {
    /// The token's own bytes; 0 for special tokens, which are not scored.
    pub exact: Vec<u32>,
    /// As the Python original counts.
    pub upstream: Vec<u32>,
}

impl ByteLengths {
    /// Those of `tokenizer`.
    pub fn of(tokenizer: &Tokenizer) -> Self {
        Self { exact: tokenizer.byte_lengths(), upstream: tokenizer.upstream_byte_lengths() }
    }
}

/// What is evaluated, as far as the metric goes. Shapes: b batch, t time, c channels, v vocabulary, n rows.
pub trait LanguageModel {
    /// Whatever `logits` takes for each position: `[b, t]` to `[b, t, c]`.
    fn hidden(&self, tokens: Tensor<2, Int>) -> Tensor<3>;
    /// Logits of the next token: `[n, c]` to `[n, v]`.
    fn logits(&self, hidden: Tensor<2>) -> Tensor<2>;
}

impl LanguageModel for Gpt {
    fn hidden(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        Gpt::hidden(self, tokens)
    }

    fn logits(&self, hidden: Tensor<2>) -> Tensor<2> {
        Gpt::logits(self, hidden)
    }
}

/// Bits per byte of `model` on every row that `rows` gives.
///
/// The loss is computed here from the logits, not by the model: an edited model cannot grade itself. The rows go through
/// the model in groups of a size that depends on nothing but `sizes` and their length: the shapes of all products, and with them the
/// rounding, are the same whatever the batch size of `rows`. Before the first group of each size is scored, and one in ten of the others, [`honesty`]
/// checks with it what the model sees.
///
/// # Errors
/// If the rows cannot be read, there are none, or the model's logits are not one for each position and token id;
/// [`honesty::Unmeasurable`] if the model sees what it must not.
pub fn evaluate_bpb(
    model: &impl LanguageModel,
    rows: &mut Loader,
    lengths: &ByteLengths,
    device: &Device,
    sizes: PassSizes,
) -> Result<Evaluation> {
    let start = Instant::now();
    let mut score = Score::default();
    let mut waiting: Vec<u32> = Vec::new();
    let mut row_length = 0;
    loop {
        let batch = rows.next_batch()?;
        let is_last = batch.is_none();
        if let Some(batch) = batch {
            row_length = batch.row_length;
            waiting.extend(batch.rows);
        }
        let pass = (sizes.tokens / row_length.max(2)).max(1) * row_length;
        while waiting.len() >= pass.max(1) || (is_last && !waiting.is_empty()) {
            let rest = waiting.split_off(pass.min(waiting.len()));
            score.add(model, &waiting, row_length, lengths, device, sizes)?;
            waiting = rest;
        }
        if is_last {
            break;
        }
    }
    let Score { nats, bytes, upstream_bytes, tokens, .. } = score;
    ensure!(
        bytes > 0,
        "the validation text gives no whole row to evaluate, expected at least one; hint: it is too short for sequence_len: use more text or a shorter context"
    );
    Ok(Evaluation { nats, bytes, upstream_bytes, tokens, duration: start.elapsed() })
}

/// Sums over the targets so far.
#[derive(Default)]
struct Score {
    nats: f64,
    bytes: u64,
    upstream_bytes: u64,
    tokens: u64,
    /// The groups that are checked.
    sample: honesty::Sample,
}

impl Score {
    fn add(
        &mut self,
        model: &impl LanguageModel,
        rows: &[u32],
        row_length: usize,
        lengths: &ByteLengths,
        device: &Device,
        sizes: PassSizes,
    ) -> Result<()> {
        let vocab_size = lengths.exact.len();
        let (input, targets) = input_and_targets(rows, row_length, device);
        let count = rows.len() / row_length;
        let hidden = forward(model, input)?;
        if self.sample.takes(count) {
            honesty::check(model, &hidden, rows, row_length, vocab_size, sizes.logits, device)?;
        }
        let losses = token_losses(model, hidden, targets, vocab_size, sizes.logits)?;
        let targets = rows.chunks_exact(row_length).flat_map(|row| &row[1..]);
        for (&target, loss) in targets.zip(losses) {
            let length = lengths.exact[target as usize];
            if length > 0 {
                self.nats += loss as f64;
                self.bytes += length as u64;
                self.upstream_bytes += lengths.upstream[target as usize] as u64;
            }
            self.tokens += 1;
        }
        Ok(())
    }
}

/// Rows of t + 1 tokens as inputs and targets, each `[b, t]`.
pub fn input_and_targets(rows: &[u32], row_length: usize, device: &Device) -> (Tensor<2, Int>, Tensor<2, Int>) {
    let (b, t) = (rows.len() / row_length, row_length - 1);
    let rows = ops::upload(rows.iter().map(|&id| id.into()).collect(), device).reshape([b, row_length]);
    (rows.clone().narrow(1, 0, t), rows.narrow(1, 1, t))
}

/// What `model` makes of `tokens`, `[b, t]` to `[b, t, c]`; every call starts from the same state of the device's own random
/// numbers.
pub(crate) fn forward(model: &impl LanguageModel, tokens: Tensor<2, Int>) -> Result<Tensor<3>> {
    let ([b, t], device) = (tokens.dims(), tokens.device());
    device.seed(0);
    let hidden = model.hidden(tokens);
    let [rows, positions, _] = hidden.dims();
    ensure!(
        [rows, positions] == [b, t],
        "the model gives {rows} rows of {positions} positions, expected {b} of {t}, one for each token; hint: see hidden in src/model.rs"
    );
    Ok(hidden)
}

/// The logits of some positions, `[n, c]` to `[n, v]` in float32.
pub(crate) fn logits(model: &impl LanguageModel, hidden: Tensor<2>, vocab_size: usize) -> Result<Tensor<2>> {
    let [n, _] = hidden.dims();
    let logits = model.logits(hidden);
    ensure!(
        logits.dims() == [n, vocab_size],
        "the model's logits have the shape {:?}, expected [{n}, {vocab_size}], one for each token id; hint: see logits in src/model.rs",
        logits.dims()
    );
    Ok(if logits.dtype() == DType::F32 { logits } else { logits.cast(DType::F32) })
}

/// The positions whose logits exist at once, of `n`.
pub(crate) fn chunks(n: usize, vocab_size: usize, chunk_logits: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    let size = (chunk_logits / vocab_size).max(1);
    (0..n).step_by(size).map(move |start| start..(start + size).min(n))
}

/// −ln p of each target, row after row.
fn token_losses(
    model: &impl LanguageModel,
    hidden: Tensor<3>,
    targets: Tensor<2, Int>,
    vocab_size: usize,
    chunk_logits: usize,
) -> Result<Vec<f32>> {
    let [b, t, c] = hidden.dims();
    let (hidden, targets) = (hidden.reshape([b * t, c]), targets.reshape([b * t]));
    let mut losses = Vec::new();
    for chunk in chunks(b * t, vocab_size, chunk_logits) {
        let logits = logits(model, hidden.clone().slice([chunk.clone(), 0..c]), vocab_size)?; // [n, v]
        losses.push(ops::cross_entropy(logits, targets.clone().narrow(0, chunk.start, chunk.len())));
    }
    // Read all at once: a device need not be waited for after each chunk.
    Ok(Tensor::cat(losses, 0).into_data_as::<f32>().iter::<f32>().collect())
}
