//! Text from a trained model.

use crate::model::Gpt;
use crate::tokenizer::Tokenizer;
use burn::tensor::{Device, Int, Tensor, TensorData};
use chacha20::ChaCha8Rng;
use rand::{Rng, RngExt, SeedableRng};

/// How to draw tokens.
#[derive(Clone, Copy, Debug)]
pub struct Sampling {
    /// Tokens to draw at most; a document's end comes first where the model ends it.
    pub tokens: usize,
    /// Below 1 the likely tokens become likelier; 0 takes the likeliest.
    pub temperature: f64,
    /// Only this many of the likeliest tokens are drawn from, at least 1.
    pub top_k: usize,
    /// Seed of the draws.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { tokens: 120, temperature: 0.8, top_k: 50, seed: 1 }
    }
}

/// Tokens of the shortest forward pass: with fewer it would save milliseconds, and have more shapes to compile.
const SHORTEST_PASS: usize = 64;

/// The text that `model` writes after `prompt`, without the prompt.
///
/// Every token is drawn from a forward pass over the last tokens that fit the context.
pub fn sample(model: &Gpt, tokenizer: &Tokenizer, prompt: &str, sampling: &Sampling, device: &Device) -> String {
    let mut rng = ChaCha8Rng::seed_from_u64(sampling.seed);
    let mut ids = vec![tokenizer.bos_id()];
    ids.extend(tokenizer.encode(prompt));
    let start = ids.len();
    while ids.len() - start < sampling.tokens {
        let context = &ids[ids.len().saturating_sub(model.config().sequence_len)..];
        let next = draw(&next_logits(model, context, device), sampling, &mut rng);
        // BOS is the first of the special tokens, the last ids there are: each ends the document.
        if next >= tokenizer.bos_id() {
            break;
        }
        ids.push(next);
    }
    tokenizer.decode(&ids[start..])
}

/// Logits of the token after `context`.
fn next_logits(model: &Gpt, context: &[u32], device: &Device) -> Vec<f32> {
    // A few lengths only: each new shape costs compilation on some backends. What follows the last token changes nothing.
    let padded = context.len().max(SHORTEST_PASS).next_power_of_two().min(model.config().sequence_len);
    let mut ids: Vec<i32> = context.iter().map(|&id| id as i32).collect();
    ids.resize(padded, 0);
    let input = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, padded]), device);
    let hidden = model.hidden(input); // [1, t, c]
    let [_, _, c] = hidden.dims();
    let last = hidden.slice([0..1, context.len() - 1..context.len(), 0..c]).reshape([1, c]);
    model.logits(last).into_data_as::<f32>().iter::<f32>().collect()
}

fn draw(logits: &[f32], sampling: &Sampling, rng: &mut impl Rng) -> u32 {
    let mut likeliest: Vec<usize> = (0..logits.len()).collect();
    likeliest.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    likeliest.truncate(sampling.top_k);
    if sampling.temperature <= 0.0 {
        return likeliest[0] as u32;
    }
    let largest = logits[likeliest[0]] as f64;
    let weights: Vec<f64> =
        likeliest.iter().map(|&id| ((logits[id] as f64 - largest) / sampling.temperature).exp()).collect();
    let mut left = rng.random::<f64>() * weights.iter().sum::<f64>();
    for (&id, weight) in likeliest.iter().zip(&weights) {
        left -= weight;
        if left <= 0.0 {
            return id as u32;
        }
    }
    likeliest[likeliest.len() - 1] as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(sampling: Sampling) -> Vec<u32> {
        let mut rng = ChaCha8Rng::seed_from_u64(sampling.seed);
        (0..1000).map(|_| draw(&[0.0, 2.0, 1.0, -1.0], &sampling, &mut rng)).collect()
    }

    #[test]
    fn zero_temperature_takes_the_likeliest() {
        assert!(drawn(Sampling { temperature: 0.0, ..Sampling::default() }).iter().all(|&id| id == 1));
    }

    #[test]
    fn only_the_top_k_are_drawn() {
        let ids = drawn(Sampling { temperature: 5.0, top_k: 2, ..Sampling::default() });
        assert!(ids.iter().all(|&id| id == 1 || id == 2) && ids.contains(&1) && ids.contains(&2));
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let ids = drawn(Sampling { temperature: 1.0, top_k: 50, ..Sampling::default() });
        let share = ids.iter().filter(|&&id| id == 1).count() as f64 / ids.len() as f64;
        let total: f64 = [0f64, 2.0, 1.0, -1.0].iter().map(|z| z.exp()).sum();
        assert!((share - 2f64.exp() / total).abs() < 0.05, "{share}");
    }
}
