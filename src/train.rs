//! The training loop: gradient accumulation, schedules, and the clock that decides when the budget is spent.

use crate::data::loader::Loader;
use crate::eval::input_and_targets;
use crate::model::{Gpt, Hyperparameters};
use crate::ops;
use crate::optim::{MuonAdamW, Schedule};
use crate::parameters::{in_compute_type, take_gradients};
use anyhow::{Context, Result, bail};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A loss above this, or one that is not a number, ends the run.
const LARGEST_LOSS: f64 = 100.0;
/// Steps after the first may take one part in so many of the budget without being charged: more would be training.
const UNCHARGED_PART: u32 = 20;
/// Weight of the past in the smoothed loss.
const SMOOTHING: f64 = 0.9;

/// The training or what it led to is of no use: readers of a run's log look for the word FAIL.
#[derive(Debug, thiserror::Error)]
#[error("FAIL: {message}")]
pub struct Diverged {
    /// In which way.
    pub divergence: Divergence,
    message: String,
}

/// What became of a number that training or evaluation gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Divergence {
    /// It is none.
    Nan,
    /// It is infinite or too large.
    Exploding,
}

impl Diverged {
    /// The loss or the metric is `value`, which `message` explains.
    pub fn new(value: f64, message: String) -> Self {
        Self { divergence: if value.is_nan() { Divergence::Nan } else { Divergence::Exploding }, message }
    }
}

/// Time since some fixed moment; tests pass one of their own.
pub trait Clock {
    /// The time now; never less than before.
    fn now(&self) -> Duration;
}

/// The system's monotonic clock.
#[derive(Debug)]
pub struct MonotonicClock(Instant);

impl MonotonicClock {
    /// A clock that starts at zero.
    pub fn start() -> Self {
        Self(Instant::now())
    }
}

impl Clock for MonotonicClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }
}

/// What ends a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Limit {
    /// Training time. Not counted in it is the first step, and those of the first `uncharged_steps` that together with those
    /// before them, the first one apart, stay within a twentieth of the budget.
    Time {
        /// The budget.
        budget: Duration,
        /// Steps in which compilers and caches warm up.
        uncharged_steps: usize,
    },
    /// Optimizer steps: progress does not depend on the machine.
    Steps(usize),
}

/// Sizes of one optimizer step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchPlan {
    /// Rows in a forward pass.
    pub device_batch_size: usize,
    /// Forward passes in an optimizer step.
    pub micro_batches: usize,
    /// Tokens in an optimizer step.
    pub tokens: usize,
}

impl BatchPlan {
    /// The plan for `hyperparameters` at a context of `sequence_len` tokens.
    ///
    /// # Errors
    /// If the total batch is not a multiple of a forward pass: names the nearest that are.
    pub fn new(hyperparameters: &Hyperparameters, sequence_len: usize) -> Result<Self> {
        let (total, rows) = (hyperparameters.total_batch_size, hyperparameters.device_batch_size);
        let pass = rows.saturating_mul(sequence_len);
        if pass == 0 || total == 0 || !total.is_multiple_of(pass) {
            if pass == 0 {
                bail!(
                    "device_batch_size and sequence_len must be at least 1, found {rows} and {sequence_len}; hint: see Hyperparameters in src/model.rs"
                );
            }
            let below = total / pass * pass;
            let nearest = if below == 0 {
                format!("value is {pass}")
            } else {
                format!("values are {below} or {}", below.saturating_add(pass))
            };
            bail!(
                "total_batch_size {total} is not a multiple of device_batch_size {rows} · sequence_len {sequence_len} = {pass} tokens; hint: the nearest legal {nearest}, see Hyperparameters in src/model.rs"
            );
        }
        Ok(Self { device_batch_size: rows, micro_batches: total / pass, tokens: total })
    }
}

/// What happened in one optimizer step.
#[derive(Clone, Debug, Serialize)]
pub struct StepReport {
    /// Number of the step, from 0.
    pub step: usize,
    /// Spent share of the limit before this step, 0 to 1.
    pub progress: f64,
    /// Mean loss over the step's tokens in nats.
    pub loss: f64,
    /// Exponential moving average of the loss, corrected for its start.
    pub smoothed_loss: f64,
    /// Factor of the learning rates.
    pub lr_multiplier: f64,
    /// Wall time of the step.
    #[serde(rename = "duration_seconds", serialize_with = "seconds")]
    pub duration: Duration,
    /// Part of it in which training waited for data.
    #[serde(rename = "data_wait_seconds", serialize_with = "seconds")]
    pub data_wait: Duration,
    /// Training tokens per second.
    pub tokens_per_second: f64,
    /// Pass over the training documents, from 1.
    pub epoch: usize,
    /// Budget left, where the limit is a time.
    #[serde(skip)]
    pub remaining: Option<Duration>,
}

fn seconds<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(duration.as_secs_f64())
}

/// What a run leaves.
#[derive(Debug)]
pub struct Outcome {
    /// The trained model.
    pub model: Gpt,
    /// Optimizer steps taken.
    pub steps: usize,
    /// Tokens trained on.
    pub tokens: u64,
    /// Charged training time.
    pub training_time: Duration,
    /// Time of the steps that were not charged.
    pub uncharged_time: Duration,
    /// Charged tokens per second.
    pub tokens_per_second: f64,
    /// Share of the training tokens that packing dropped, in percent.
    pub dropped_percent: f64,
}

/// What a training loop needs.
pub struct Training<'a> {
    /// The model at the start.
    pub model: Gpt,
    /// Its optimizer.
    pub optimizer: &'a mut MuonAdamW,
    /// Rows of tokens, [`BatchPlan::device_batch_size`] a batch, without end.
    pub rows: &'a mut Loader,
    /// Schedules.
    pub hyperparameters: &'a Hyperparameters,
    /// Sizes.
    pub plan: BatchPlan,
    /// When to stop.
    pub limit: Limit,
    /// Where to compute, without autodiff.
    pub device: &'a Device,
    /// Type of matrix products.
    pub compute_type: FloatDType,
    /// What time it is.
    pub clock: &'a dyn Clock,
}

impl Training<'_> {
    /// Trains until the limit is reached, calling `report` after each step.
    ///
    /// # Errors
    /// [`Diverged`] if the loss is NaN, infinite or above 100; others if the data cannot be read.
    pub fn run(self, report: impl FnMut(&StepReport) -> Result<()>) -> Result<Outcome> {
        self.run_with(|_, _| (), report)
    }

    /// [`Training::run`] that lets `adjust` change the gradients of each step (from 0) before the optimizer gets them.
    ///
    /// # Errors
    /// As [`Training::run`].
    pub(crate) fn run_with(
        self,
        mut adjust: impl FnMut(usize, &mut BTreeMap<String, Tensor<1>>),
        mut report: impl FnMut(&StepReport) -> Result<()>,
    ) -> Result<Outcome> {
        let Self { mut model, optimizer, rows, hyperparameters, plan, limit, device, compute_type, clock } = self;
        let autodiff = device.clone().autodiff();
        let mut working = in_compute_type(&model, compute_type);
        let mut charged = Duration::ZERO;
        let mut charged_steps = 0;
        let mut uncharged = Duration::ZERO;
        // The part of it that came after the first step, whose length compilers decide.
        let mut uncharged_later = Duration::ZERO;
        let mut smoothed = 0.0;
        let mut dropped_percent = 0.0;
        let mut step = 0;
        loop {
            let progress = match limit {
                Limit::Time { budget, .. } => (charged.as_secs_f64() / budget.as_secs_f64()).min(1.0),
                Limit::Steps(steps) => step as f64 / steps as f64,
            };
            let start = clock.now();
            let mut data_wait = Duration::ZERO;
            let mut epoch = 1;
            let mut gradients: BTreeMap<String, Tensor<1>> = BTreeMap::new();
            let mut losses: Option<Tensor<1>> = None;
            // All of the step's rows go to the device while it has nothing else to do: a copy in the midst of it would
            // wait for what was started before.
            let mut micro_batches = Vec::with_capacity(plan.micro_batches);
            for _ in 0..plan.micro_batches {
                let batch = rows
                    .next_batch()?
                    .context("the training data ended, expected rows without end; hint: prepare the data set again")?;
                data_wait += batch.waited;
                epoch = batch.epoch;
                dropped_percent = batch.dropped_percent;
                micro_batches.push(input_and_targets(&batch.rows, batch.row_length, &autodiff));
            }
            for (input, targets) in micro_batches {
                let loss = working.loss(input, targets) / plan.micro_batches as f64;
                let micro_gradients = take_gradients(&working, &mut loss.backward());
                accumulate(&mut gradients, micro_gradients);
                let loss = loss.inner();
                losses = Some(match losses {
                    None => loss,
                    Some(sum) => sum + loss,
                });
            }
            adjust(step, &mut gradients);
            let lr_multiplier = hyperparameters.lr_multiplier(progress);
            let schedule = Schedule {
                lr_multiplier,
                muon_momentum: hyperparameters.muon_momentum(step),
                weight_decay: hyperparameters.weight_decay(progress),
            };
            model = optimizer.step(model, gradients, schedule);
            // Before the loss is waited for, so that the device has something to do.
            working = in_compute_type(&model, compute_type);
            let loss = losses.context("a step has at least one forward pass")?.into_scalar::<f32>() as f64;
            if !loss.is_finite() || loss > LARGEST_LOSS {
                let message = format!(
                    "the loss is {loss} at step {step}, expected a number up to {LARGEST_LOSS}; hint: a learning rate or an initialisation in src/model.rs may be too large"
                );
                bail!(Diverged::new(loss, message));
            }
            device.sync().map_err(|error| anyhow::anyhow!("the device failed at step {step} ({error:?}); hint: its driver may have more to say, see the system's log"))?;
            let duration = clock.now().saturating_sub(start);

            let later = if step == 0 { Duration::ZERO } else { uncharged_later + duration };
            let is_charged = match limit {
                Limit::Time { .. } if step == 0 => false,
                Limit::Time { budget, uncharged_steps } => step >= uncharged_steps || later > budget / UNCHARGED_PART,
                Limit::Steps(_) => true,
            };
            if is_charged {
                charged += duration;
                charged_steps += 1;
            } else {
                uncharged += duration;
                uncharged_later = later;
            }
            smoothed = SMOOTHING * smoothed + (1.0 - SMOOTHING) * loss;
            report(&StepReport {
                step,
                progress,
                loss,
                smoothed_loss: smoothed / (1.0 - SMOOTHING.powi(step as i32 + 1)),
                lr_multiplier,
                duration,
                data_wait,
                tokens_per_second: plan.tokens as f64 / duration.as_secs_f64(),
                epoch,
                remaining: match limit {
                    Limit::Time { budget, .. } => Some(budget.saturating_sub(charged)),
                    Limit::Steps(_) => None,
                },
            })?;
            step += 1;
            let spent = match limit {
                Limit::Time { budget, .. } => charged >= budget,
                Limit::Steps(steps) => step >= steps,
            };
            if spent {
                return Ok(Outcome {
                    model,
                    steps: step,
                    tokens: (step * plan.tokens) as u64,
                    training_time: charged,
                    uncharged_time: uncharged,
                    tokens_per_second: (charged_steps * plan.tokens) as f64 / charged.as_secs_f64(),
                    dropped_percent,
                });
            }
        }
    }
}

/// Adds up in float32, whatever type the parts have.
pub(crate) fn accumulate(total: &mut BTreeMap<String, Tensor<1>>, part: BTreeMap<String, Tensor<1>>) {
    for (name, gradient) in part {
        let sum = match total.remove(&name) {
            None if gradient.dtype() == DType::F32 => gradient,
            None => gradient.cast(DType::F32),
            Some(sum) => ops::accumulate(sum, gradient),
        };
        total.insert(name, sum);
    }
}
