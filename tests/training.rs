//! The training loop: the clock, accumulation, divergence.

use crate::model::{lively, small};
use autoresearch::config::Profile;
use autoresearch::data::documents::Documents;
use autoresearch::data::loader::{Encode, Loader};
use autoresearch::data::packing::{Packing, Passes};
use autoresearch::model::{Gpt, Hyperparameters};
use autoresearch::optim::MuonAdamW;
use autoresearch::parameters::parameters;
use autoresearch::run::FailureKind;
use autoresearch::train::{BatchPlan, Clock, Limit, Outcome, StepReport, Training};
use burn::tensor::{Device, FloatDType};
use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

/// Letters as tokens.
pub struct Letters;

impl Encode for Letters {
    fn encode(&self, text: &str) -> Vec<u32> {
        text.bytes().map(|byte| (byte % 49) as u32).collect()
    }
    fn bos_id(&self) -> u32 {
        49
    }
}

pub fn rows(batch: usize, passes: Passes) -> Loader {
    let text =
        |index: usize| (0..5 + index % 11).map(|i| char::from(b'a' + ((index * 3 + i * i) % 26) as u8)).collect();
    let documents = Arc::new(Documents::generated(2000, 100, text));
    Loader::new(documents, Arc::new(Letters), batch, Packing::new(16), passes, None).unwrap()
}

/// A clock that moves on by a second each time it is asked.
struct Seconds(Cell<u64>);

impl Clock for Seconds {
    fn now(&self) -> Duration {
        self.0.set(self.0.get() + 1);
        Duration::from_secs(self.0.get())
    }
}

/// A clock by which the steps take as many seconds as the function says.
pub struct Steps {
    seconds: fn(usize) -> u64,
    /// How often it was asked, and what it said.
    asked: Cell<(usize, u64)>,
}

impl Steps {
    pub fn new(seconds: fn(usize) -> u64) -> Self {
        Self { seconds, asked: Cell::new((0, 0)) }
    }
}

impl Clock for Steps {
    fn now(&self) -> Duration {
        let (times, now) = self.asked.get();
        // Each step asks at its start and at its end.
        let now = if times % 2 == 1 { now + (self.seconds)(times / 2) } else { now };
        self.asked.set((times + 1, now));
        Duration::from_secs(now)
    }
}

fn train(
    hyperparameters: &Hyperparameters,
    limit: Limit,
    model: impl Fn(&Device) -> Gpt,
) -> (anyhow::Result<Outcome>, Vec<StepReport>) {
    train_by(&Seconds(Cell::new(0)), hyperparameters, limit, model)
}

pub fn train_by(
    clock: &dyn Clock,
    hyperparameters: &Hyperparameters,
    limit: Limit,
    model: impl Fn(&Device) -> Gpt,
) -> (anyhow::Result<Outcome>, Vec<StepReport>) {
    let device = Device::flex();
    let model = model(&device.clone().autodiff());
    let groups = hyperparameters.parameter_groups(&model);
    let plan = BatchPlan::new(hyperparameters, 16).unwrap();
    let mut reports = Vec::new();
    let outcome = Training {
        optimizer: &mut MuonAdamW::new(&model, &groups, FloatDType::F32).unwrap(),
        model,
        rows: &mut rows(plan.device_batch_size, Passes::Endless),
        hyperparameters,
        plan,
        limit,
        device: &device,
        compute_type: FloatDType::F32,
        clock,
    }
    .run(|step| {
        reports.push(step.clone());
        Ok(())
    });
    (outcome, reports)
}

pub fn hyperparameters(device_batch_size: usize, total_batch_size: usize) -> Hyperparameters {
    Hyperparameters { device_batch_size, total_batch_size, ..Hyperparameters::for_profile(Profile::Cpu) }
}

#[test]
fn the_first_steps_are_not_charged_and_the_run_ends_when_the_budget_is_spent() {
    let limit = Limit::Time { budget: Duration::from_secs(40), uncharged_steps: 3 };
    let (outcome, reports) = train(&hyperparameters(2, 32), limit, |device| lively(&small(), device));
    let outcome = outcome.unwrap();
    // Each step takes a second by this clock: three free ones, forty charged ones.
    assert_eq!(outcome.steps, 43);
    assert_eq!(outcome.training_time, Duration::from_secs(40));
    assert_eq!(outcome.uncharged_time, Duration::from_secs(3));
    assert_eq!(outcome.tokens, 43 * 32);
    assert_eq!(outcome.tokens_per_second, 32.0);
    let progress: Vec<f64> = reports.iter().map(|report| report.progress).collect();
    assert_eq!(progress[..5], [0.0, 0.0, 0.0, 0.0, 0.025]);
    assert_eq!(progress[42], 0.975);
    assert_eq!(reports[42].remaining, Some(Duration::ZERO));
    assert_eq!(reports[2].remaining, Some(Duration::from_secs(40)));
}

#[test]
fn steps_after_the_first_are_charged_from_a_twentieth_of_the_budget() {
    let budget = Duration::from_secs(40);
    let train = |seconds, uncharged_steps| {
        let limit = Limit::Time { budget, uncharged_steps };
        let (outcome, _) =
            train_by(&Steps::new(seconds), &hyperparameters(2, 32), limit, |device| lively(&small(), device));
        let outcome = outcome.unwrap();
        (outcome.steps, outcome.training_time.as_secs(), outcome.uncharged_time.as_secs())
    };
    assert_eq!(train(|_| 1, 1000), (43, 40, 3));
    // The first takes what compilers take, and is free even where none is to be.
    assert_eq!(train(|step| if step == 0 { 500 } else { 1 }, 3), (43, 40, 502));
    assert_eq!(train(|step| if step == 0 { 500 } else { 1 }, 0), (41, 40, 500));
    // A long one is charged as a whole.
    assert_eq!(train(|step| if step == 1 { 30 } else { 1 }, 1000), (14, 40, 3));
    assert_eq!(train(|_| 3, 1000), (15, 42, 3));
}

#[test]
fn a_number_of_steps_is_kept_exactly() {
    let (outcome, reports) = train(&hyperparameters(2, 32), Limit::Steps(4), |device| lively(&small(), device));
    assert_eq!(outcome.unwrap().steps, 4);
    assert_eq!(reports.iter().map(|report| report.progress).collect::<Vec<_>>(), [0.0, 0.25, 0.5, 0.75]);
    assert_eq!(reports.iter().map(|report| report.lr_multiplier).collect::<Vec<_>>(), [1.0, 1.0, 1.0, 0.5]);
}

#[test]
fn the_loss_falls() {
    let (_, reports) =
        train(&hyperparameters(4, 64), Limit::Steps(40), |device| Gpt::new(&small(), FloatDType::F32, 1, device));
    let (first, last) = (reports[0].loss, reports[39].loss);
    assert!((first - 50f64.ln()).abs() < 0.1, "the first loss is that of a guess, {first}");
    assert!(last < first - 1.0, "from {first} to {last}");
    assert!((reports[0].smoothed_loss - first).abs() < 1e-9);
}

#[test]
fn accumulating_gives_the_step_of_one_large_batch() {
    let weights = |device_batch_size| {
        let (outcome, reports) =
            train(&hyperparameters(device_batch_size, 128), Limit::Steps(1), |device| lively(&small(), device));
        let model = outcome.unwrap().model;
        let values = parameters(&model).into_iter().flat_map(|p| p.value.into_data().iter::<f32>().collect::<Vec<_>>());
        (values.collect::<Vec<f32>>(), reports[0].loss)
    };
    let ((whole, whole_loss), (parts, parts_loss)) = (weights(8), weights(2));
    assert!((whole_loss - parts_loss).abs() < 1e-5, "{whole_loss} and {parts_loss}");
    let mean = whole.iter().zip(&parts).map(|(a, b)| (a - b).abs() as f64).sum::<f64>() / whole.len() as f64;
    assert!(mean < 1e-4, "mean difference {mean}");
}

#[test]
fn a_loss_that_is_no_number_ends_the_run_with_fail() {
    let broken = |device: &Device| {
        let model = lively(&small(), device);
        let values = parameters(&model)
            .into_iter()
            .filter(|parameter| parameter.name == "lm_head.weight")
            .map(|parameter| (parameter.name, parameter.value * f32::NAN))
            .collect();
        autoresearch::parameters::with_values(model, values)
    };
    let (outcome, reports) = train(&hyperparameters(2, 32), Limit::Steps(4), broken);
    let error = outcome.unwrap_err();
    assert!(error.to_string().starts_with("FAIL: the loss is NaN at step 0"), "{error}");
    assert_eq!(FailureKind::of(&error), FailureKind::Nan);
    assert!(reports.is_empty());
}
