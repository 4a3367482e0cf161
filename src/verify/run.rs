//! `run-*`: a short training run on the corpus, from given weights.

use super::model::{golden_model, larger, set_to_zero, undetermined};
use super::tokenizer::golden_tokenizer;
use super::tolerances::Tolerances;
use super::{Check, Goldens, reference_hyperparameters};
use crate::data::documents::Split;
use crate::data::loader::Loader;
use crate::data::packing::{Packing, Passes};
use crate::eval::{ByteLengths, Evaluation, PassSizes, evaluate_bpb};
use crate::model::{Gpt, GptConfig, Hyperparameters};
use crate::optim::MuonAdamW;
use crate::tokenizer::Tokenizer;
use crate::train::{BatchPlan, Limit, MonotonicClock, Training};
use anyhow::{Result, ensure};
use burn::module::Module;
use serde::Deserialize;
use std::sync::Arc;

#[derive(Deserialize)]
struct Description {
    tokenizer: String,
    config: GptConfig,
    batch: usize,
    steps: usize,
    grad_accum: usize,
    loss: Vec<f64>,
    bpb_at_init: Golden,
    bpb_final: Golden,
    bpb_final_other_batch: Golden,
    learning_rates: LearningRates,
}

#[derive(Deserialize)]
struct Golden {
    batch: usize,
    eval_tokens: usize,
    bytes_true: f64,
    bytes_upstream: f64,
    bpb_true: f64,
    bpb_upstream: f64,
}

#[derive(Deserialize)]
struct LearningRates {
    embedding: f64,
    unembedding: f64,
    matrix: f64,
    scalar: f64,
    weight_decay: f64,
    adam_betas: (f64, f64),
}

pub(super) fn checks(goldens: &Goldens, name: &str, tolerances: &Tolerances) -> Result<Vec<Check>> {
    let description: Description = goldens.json(name)?;
    let model = golden_model(goldens, &description.config, &goldens.tensors(&format!("{name}-init"))?)?;
    let tokenizer = Arc::new(golden_tokenizer(goldens, &description.tokenizer)?);
    let (found, expected) = (tokenizer.vocab_size(), description.config.vocab_size);
    ensure!(found == expected, "the tokenizer has a vocabulary of {found}, the model one of {expected}");
    ensure!(description.steps > 0 && !description.loss.is_empty(), "expected at least one step and its loss");
    let run = Run { goldens, name, tokenizer, description: &description };
    let mut checks = Vec::new();
    let at_init = run.evaluate(&model, &description.bpb_at_init)?;
    run.compare("bpb_at_init", &at_init, &description.bpb_at_init, tolerances.bpb_at_init, &mut checks);

    let (model, losses) = run.train(model)?;
    let differences: Vec<f64> = losses.iter().zip(&description.loss).map(|(a, b)| (a - b).abs()).collect();
    let largest = differences.iter().copied().fold(0.0, larger);
    let mean = differences.iter().sum::<f64>() / differences.len() as f64;
    checks.push(Check::new(name, "number of losses", losses.len().abs_diff(description.loss.len()) as f64, 0.0));
    checks.push(Check::new(name, "first loss", differences[0], tolerances.run_first_loss));
    checks.push(Check::new(name, "largest loss difference", largest, tolerances.run_largest_loss));
    checks.push(Check::new(name, "mean loss difference", mean, tolerances.run_mean_loss));

    let last = run.evaluate(&model, &description.bpb_final)?;
    run.compare("bpb_final", &last, &description.bpb_final, tolerances.bpb_final, &mut checks);
    let other = run.evaluate(&model, &description.bpb_final_other_batch)?;
    run.compare("bpb_final_other_batch", &other, &description.bpb_final_other_batch, tolerances.bpb_final, &mut checks);
    let between = (last.bpb() - other.bpb()).abs();
    checks.push(Check::new(name, "bpb between batch sizes", between, tolerances.bpb_between_batches));
    Ok(checks)
}

struct Run<'a> {
    goldens: &'a Goldens,
    name: &'a str,
    tokenizer: Arc<Tokenizer>,
    description: &'a Description,
}

impl Run<'_> {
    fn loader(&self, split: Split, batch: usize, passes: Passes) -> Result<Loader> {
        let packing = Packing::new(self.description.config.sequence_len);
        let documents = Arc::new(self.goldens.documents(split)?);
        Loader::new(documents, self.tokenizer.clone(), batch, packing, passes, None)
    }

    /// Trains as the golden was, but for gradients that are undetermined at the start: they are set to their exact value,
    /// nought, which is in the middle of where rounding sends the reference's own step.
    fn train(&self, model: Gpt) -> Result<(Gpt, Vec<f64>)> {
        let Description { config, batch, steps, grad_accum, learning_rates: rates, .. } = self.description;
        let hyperparameters = Hyperparameters {
            embedding_lr: rates.embedding,
            unembedding_lr: rates.unembedding,
            matrix_lr: rates.matrix,
            scalar_lr: rates.scalar,
            weight_decay: rates.weight_decay,
            adam_betas: rates.adam_betas,
            device_batch_size: *batch,
            total_batch_size: batch.saturating_mul(*grad_accum).saturating_mul(config.sequence_len),
            ..reference_hyperparameters()
        };
        let groups = hyperparameters.parameter_groups(&model);
        let undetermined = undetermined(&model);
        let compute_type = self.goldens.compute_type;
        let mut losses = Vec::new();
        let outcome = Training {
            optimizer: &mut MuonAdamW::new(&model, &groups, compute_type)?,
            model,
            rows: &mut self.loader(Split::Train, *batch, Passes::Endless)?,
            plan: BatchPlan::new(&hyperparameters, config.sequence_len)?,
            hyperparameters: &hyperparameters,
            limit: Limit::Steps(*steps),
            device: &self.goldens.device,
            compute_type,
            clock: &MonotonicClock::start(),
        }
        .run_with(
            |step, gradients| {
                if step == 0 {
                    set_to_zero(gradients, &undetermined);
                }
            },
            |step| {
                losses.push(step.loss);
                Ok(())
            },
        )?;
        Ok((outcome.model, losses))
    }

    fn evaluate(&self, model: &Gpt, golden: &Golden) -> Result<Evaluation> {
        let rows = golden.eval_tokens / self.description.config.sequence_len;
        let mut loader = self.loader(Split::Validation, golden.batch, Passes::OnePass { at_most_rows: rows })?;
        let lengths = ByteLengths::of(&self.tokenizer);
        evaluate_bpb(&model.valid(), &mut loader, &lengths, &self.goldens.device, PassSizes::CPU)
    }

    fn compare(&self, what: &str, found: &Evaluation, golden: &Golden, tolerance: f64, checks: &mut Vec<Check>) {
        let mut check = |quantity: &str, error: f64, tolerance| {
            checks.push(Check::new(self.name, format!("{what} {quantity}"), error.abs(), tolerance));
        };
        check("eval_tokens", found.tokens as f64 - golden.eval_tokens as f64, 0.0);
        check("bytes", found.bytes as f64 - golden.bytes_true, 0.0);
        check("upstream bytes", found.upstream_bytes as f64 - golden.bytes_upstream, 0.0);
        check("bpb", found.bpb() - golden.bpb_true, tolerance);
        check("upstream bpb", found.bpb_upstream() - golden.bpb_upstream, tolerance);
    }
}
