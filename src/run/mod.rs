//! One run: train, evaluate, print the summary, leave everything in `runs/<id>/`; evaluate or sample from it later.
//!
//! Whoever started a run reads how it went from its folder: [`Phases`], [`Failure`], [`Summary`].

mod failure;
mod folder;
mod parent;
mod phases;
mod progress;
pub mod protocol;
mod record;
mod summary;
mod watchdog;

use crate::checkpoint::{self, TensorFile, load_weights};
use crate::config::Config;
use crate::data::DataError;
use crate::data::documents::{Documents, Split};
use crate::data::loader::Loader;
use crate::data::packing::{Packing, Passes};
use crate::data::prepared::Prepared;
use crate::data::tales;
use crate::device::ComputeDevice;
use crate::device::compute_type::ComputeType;
use crate::eval::{ByteLengths, Evaluation, PassSizes, evaluate_bpb};
use crate::model::{Gpt, GptConfig, Hyperparameters};
use crate::ops::{self, WarmUp};
use crate::optim::{MuonAdamW, ParameterGroup};
use crate::output::say;
use crate::parameters::{Parameter, in_compute_type, parameters};
use crate::sample::Sampling;
use crate::tokenizer::Tokenizer;
use crate::train::{BatchPlan, Diverged, Limit, MonotonicClock, StepReport, Training};
use anyhow::{Context, Result, anyhow, bail};
use burn::module::Module;
use burn_dataset::Dataset as _;
pub use failure::{Failure, FailureKind};
use folder::RunFolder;
pub use folder::{RunPlace, clear, remove_weights};
pub use parent::end_with_stdin;
pub use phases::{Phase, Phases};
use progress::ProgressLine;
use protocol::{Evaluated, Protocol};
pub use record::{Record, give_up};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
pub use summary::Summary;
#[cfg(test)]
pub(crate) use summary::tests::summary;
pub use watchdog::Watchdog;

/// Name of the weights in a run's folder.
const WEIGHTS: &str = "model.safetensors";
/// Key of the model's sizes in the weights' header.
const SIZES: &str = "gpt_config";
/// How much longer than the kill limit a first step may take in which kernels are tuned and compiled.
pub const LONGEST_TUNING: Duration = Duration::from_secs(600);

/// What a run is to be.
#[derive(Clone, Debug)]
pub struct Conditions {
    /// The configuration, flags applied.
    pub config: Config,
    /// What it is called.
    pub config_name: String,
    /// Train for this many steps instead of the time budget.
    pub steps: Option<usize>,
    /// Where its folder is.
    pub place: RunPlace,
    /// See [`crate::data::prepared::cache_folder`].
    pub cache_dir: Option<PathBuf>,
}

/// The configuration as resolved, as the run's folder keeps it.
#[derive(Debug, Serialize, Deserialize)]
struct Resolved {
    config_name: String,
    config: Config,
    steps: Option<usize>,
    device: String,
    #[serde(default)]
    compute_type: String,
    dataset: String,
    /// SHA-256 of the validation text: runs compare only where it is the same.
    validation_sha256: String,
    hyperparameters: Hyperparameters,
    model: GptConfig,
    /// What must be the same for numbers to compare. Not read again: runs of older versions have another one, or none.
    #[serde(skip_deserializing)]
    protocol: Option<Protocol>,
}

/// Trains, evaluates and prints the summary; gives the run's folder. `record` is told of each phase, `watchdog` of the time that
/// the first step took: compilers decide on it.
///
/// # Errors
/// If the conditions are not legal, the data is not prepared ([`DataError`]), the training diverges ([`Diverged`]) or a file
/// cannot be written.
pub fn train(conditions: &Conditions, record: &Record, watchdog: Option<&Watchdog>) -> Result<PathBuf> {
    let Conditions { config, config_name, .. } = conditions;
    let compute = ComputeDevice::select(&config.device, config.compute_type)?;
    let peak_flops = compute.peak_flops()?;
    let _warm_up = WarmUp::start(&compute.device, compute.compute_type);
    let hyperparameters = Hyperparameters::for_profile(config.profile);
    let plan = BatchPlan::new(&hyperparameters, config.sequence_len)?;
    let sizes = hyperparameters.architecture(config.sequence_len, config.vocab_size)?;
    let prepared = Prepared::open(&config.dataset, conditions.cache_dir.as_deref(), Some(config.vocab_size))
        .map_err(DataError::from)?;
    tracing::debug!("device and data set found after {:.2?}", record.elapsed());
    // First, so that its threads fill their buffers meanwhile.
    let documents = prepared.documents(Split::Train).map_err(DataError::from)?;
    let protocol = Protocol::of(config, conditions.steps, &prepared, documents.len(), &compute)?;
    let mut rows = training_rows(documents, &prepared, &plan, config.sequence_len).map_err(DataError::from)?;
    // For what an edited model may leave to the backend; its own values come from the seed as they are.
    compute.device.seed(config.seed);
    let model = Gpt::new(&sizes, compute.compute_type, config.seed, &compute.device.clone().autodiff());
    let groups = hyperparameters.parameter_groups(&model);
    let mut optimizer = MuonAdamW::new(&model, &groups, compute.compute_type)?;
    tracing::debug!("model and optimizer made after {:.2?}", record.elapsed());
    // Not only after hours of training.
    require_validation_row(&prepared, config.sequence_len).map_err(DataError::from)?;

    let resolved = Resolved {
        config_name: config_name.clone(),
        config: Config { dataset: prepared.argument(), ..config.clone() },
        steps: conditions.steps,
        device: compute.name.clone(),
        compute_type: compute.types(),
        dataset: prepared.name().to_owned(),
        validation_sha256: prepared.validation_sha256().to_owned(),
        hyperparameters,
        model: sizes,
        protocol: Some(protocol.clone()),
    };
    let mut folder = RunFolder::create(&conditions.place, &resolved)?;
    record.lie_in(folder.path())?;
    prepared.tokenizer().save(folder.path())?;
    let hyperparameters = &resolved.hyperparameters;
    let flops_per_token = model.flops_per_token() as f64;
    let num_params: usize = parameters(&model).iter().map(Parameter::elements).sum();
    announce(&resolved, &model, &groups, &plan, folder.path());
    let tunes_kernels = compute.tunes_kernels();
    if tunes_kernels {
        let tunes = if cfg!(feature = "autotune") { "tunes and compiles" } else { "compiles" };
        say(format_args!(
            "first step: {tunes} kernels that this adapter and driver have none of yet, which can take minutes"
        ));
        if let Some(watchdog) = watchdog {
            watchdog.lengthen(LONGEST_TUNING);
        }
    }

    let mut progress = ProgressLine::new(flops_per_token, peak_flops);
    let startup = record.enter(Phase::Training)?;
    tracing::debug!("ready to train after {startup:.2?}");
    let outcome = Training {
        model,
        optimizer: &mut optimizer,
        rows: &mut rows,
        hyperparameters,
        plan,
        limit: match conditions.steps {
            Some(steps) => Limit::Steps(steps),
            None => Limit::Time {
                budget: Duration::from_secs_f64(config.time_budget_seconds),
                uncharged_steps: config.uncharged_steps,
            },
        },
        device: &compute.device,
        compute_type: compute.compute_type,
        clock: &MonotonicClock::start(),
    }
    .run(|step| {
        if step.step == 0 {
            ops::choices().iter().for_each(say);
            if let Some(watchdog) = watchdog {
                watchdog.lengthen(step.duration);
                if tunes_kernels {
                    watchdog.shorten(LONGEST_TUNING);
                }
            }
        }
        progress.show(step);
        folder.append_metrics(&StepRecord { step, memory_mb: compute.peak_memory_mib() })
    });
    progress.finish();
    let outcome = outcome?;
    record.enter(Phase::Evaluation)?;
    // The rows are there no longer than needed: their threads would compete with the evaluation.
    drop(rows);
    let sizes = serde_json::to_string(&resolved.model)?;
    let weights = folder.path().join(WEIGHTS);
    checkpoint::write(&weights, &parameters(&outcome.model), HashMap::from([(SIZES.to_owned(), sizes)]))?;

    let inference = in_compute_type(&outcome.model.valid(), compute.compute_type);
    let evaluation = evaluate_rows(&inference, &prepared, prepared.tokenizer(), config, config.eval_tokens, &compute)?;
    let summary = Summary {
        val_bpb: evaluation.bpb(),
        startup_seconds: startup.as_secs_f64(),
        training_seconds: outcome.training_time.as_secs_f64(),
        total_seconds: record.elapsed().as_secs_f64(),
        peak_vram_mb: compute.peak_memory_mib(),
        mfu_percent: peak_flops.map(|peak| 100.0 * flops_per_token * outcome.tokens_per_second / peak),
        total_tokens_m: outcome.tokens as f64 / 1e6,
        num_steps: outcome.steps,
        num_params_m: num_params as f64 / 1e6,
        depth: hyperparameters.depth,
        device: compute.name,
        tokens_per_second: outcome.tokens_per_second,
        eval_seconds: evaluation.duration.as_secs_f64(),
        val_tokens: evaluation.tokens,
        val_bytes: evaluation.bytes,
        val_bpb_upstream: evaluation.bpb_upstream(),
        bpb_floor: if prepared.is_tales() {
            Some(bpb_floor(&prepared, config).map_err(DataError::from)?)
        } else {
            None
        },
        dropped_percent: outcome.dropped_percent,
        seed: config.seed,
        config: config_name.clone(),
        run_dir: folder.path().display().to_string(),
        uncharged_seconds: outcome.uncharged_time.as_secs_f64(),
        protocol: Protocol {
            evaluated: Some(Evaluated { val_tokens: evaluation.tokens, val_bytes: evaluation.bytes }),
            ..protocol
        },
    };
    folder.write_json(summary::FILE, &summary)?;
    record.enter(Phase::Done)?;
    say(&summary);
    Ok(folder.path().to_path_buf())
}

/// Evaluates the checkpoint of the run in `run` and prints the outcome.
///
/// # Errors
/// If the folder holds no whole run or the data is not prepared.
pub fn evaluate(run: &Path, place: Place, cache_dir: Option<&Path>, eval_tokens: Option<usize>) -> Result<()> {
    let checkpoint = Checkpoint::open(run, place)?;
    let config = &checkpoint.resolved.config;
    let tokens = eval_tokens.unwrap_or(config.eval_tokens);
    if tokens < config.sequence_len {
        bail!(
            "--eval-tokens: expected at least one row of {} tokens, found {tokens}; hint: leave it out",
            config.sequence_len
        );
    }
    let prepared = Prepared::open(&config.dataset, cache_dir, None)?;
    let Checkpoint { model, tokenizer, compute, .. } = &checkpoint;
    let evaluation = evaluate_rows(model, &prepared, tokenizer, config, tokens, compute)?;
    say("---");
    say(format_args!("val_bpb:          {:.6}", evaluation.bpb()));
    say(format_args!("val_bpb_upstream: {:.6}", evaluation.bpb_upstream()));
    say(format_args!("val_tokens:       {}", evaluation.tokens));
    say(format_args!("val_bytes:        {}", evaluation.bytes));
    say(format_args!("eval_seconds:     {:.1}", evaluation.duration.as_secs_f64()));
    Ok(())
}

/// What the model of the run in `run` writes after `prompt`.
///
/// # Errors
/// If the folder holds no whole run.
pub fn sample(run: &Path, place: Place, prompt: &str, sampling: &Sampling) -> Result<String> {
    let Checkpoint { model, tokenizer, compute, .. } = Checkpoint::open(run, place)?;
    Ok(crate::sample::sample(&model, &tokenizer, prompt, sampling, &compute.device))
}

/// Where to use a checkpoint; what is not named is as in its run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Place<'a> {
    /// One of [`crate::device::DEVICE_NAMES`].
    pub device: Option<&'a str>,
    /// In which type to multiply matrices.
    pub compute_type: Option<ComputeType>,
}

impl Place<'_> {
    fn select(&self, config: &Config) -> Result<ComputeDevice> {
        // On another device the run's own type may not be there.
        let usual = if self.device.is_some() { ComputeType::Auto } else { config.compute_type };
        ComputeDevice::select(self.device.unwrap_or(&config.device), self.compute_type.unwrap_or(usual))
    }
}

/// A line of a run's metrics.
#[derive(Serialize)]
struct StepRecord<'a> {
    #[serde(flatten)]
    step: &'a StepReport,
    /// The most memory that was taken so far, in MiB.
    memory_mb: Option<f64>,
}

/// A run's trained model and what it takes to use it.
struct Checkpoint {
    resolved: Resolved,
    compute: ComputeDevice,
    tokenizer: Arc<Tokenizer>,
    model: Gpt,
}

impl Checkpoint {
    fn open(run: &Path, place: Place) -> Result<Self> {
        let path = run.join("config.json");
        let hint = "hint: --checkpoint names a run's folder, such as runs/20260131-235900";
        let text = std::fs::read_to_string(&path)
            .map_err(|error| anyhow!("{}: expected a run's configuration ({error}); {hint}", path.display()))?;
        let resolved: Resolved = serde_json::from_str(&text)
            .map_err(|error| anyhow!("{}: expected a run's configuration, found: {error}; {hint}", path.display()))?;
        let weights = run.join(WEIGHTS);
        if !weights.exists() {
            bail!("{}: expected a run that came to its end, found no {WEIGHTS}; {hint}", run.display());
        }
        if !folder::has_this_model(run) {
            let (then, now) = (run.join("model.rs"), "src/model.rs");
            tracing::warn!(
                "{now} is not what this run was trained with; hint: copy {} over it and build again",
                then.display()
            );
        }
        let file = TensorFile::read(&weights)?;
        // Before a model of these sizes takes memory.
        let sizes = file.metadata.get(SIZES).and_then(|text| serde_json::from_str::<GptConfig>(text).ok());
        if sizes.is_some_and(|sizes| sizes != resolved.model) {
            bail!(
                "{}: expected weights of the sizes in {}, found others; hint: both files must be of one run",
                weights.display(),
                path.display()
            );
        }
        let compute = place.select(&resolved.config)?;
        if let Some(problem) = resolved.model.problem() {
            bail!("{}: these sizes make no model: {problem}; {hint}", path.display());
        }
        let tokenizer = Tokenizer::load(run)?;
        if tokenizer.vocab_size() != resolved.model.vocab_size {
            bail!(
                "{}: expected a tokenizer with a vocabulary of {}, found one of {}; hint: all files must be of one run",
                run.display(),
                resolved.model.vocab_size,
                tokenizer.vocab_size()
            );
        }
        let model = Gpt::new(&resolved.model, compute.compute_type, 0, &compute.device);
        let model = load_weights(model, &file.with_prefix("")).with_context(|| weights.display().to_string())?;
        let model = in_compute_type(&model, compute.compute_type);
        Ok(Self { resolved, compute, tokenizer: Arc::new(tokenizer), model })
    }
}

fn training_rows(documents: Documents, prepared: &Prepared, plan: &BatchPlan, sequence_len: usize) -> Result<Loader> {
    let packing = Packing::new(sequence_len);
    Loader::new(
        Arc::new(documents),
        prepared.tokenizer().clone(),
        plan.device_batch_size,
        packing,
        Passes::Endless,
        None,
    )
}

/// Makes sure that the validation text gives a row to evaluate.
fn require_validation_row(prepared: &Prepared, sequence_len: usize) -> Result<()> {
    if validation_rows(prepared, prepared.tokenizer(), 1, sequence_len)?.next_batch()?.is_none() {
        bail!(
            "{}: expected validation text for at least one row of sequence_len {sequence_len} tokens, found less; hint: use more text or a shorter context",
            prepared.name()
        );
    }
    Ok(())
}

fn validation_rows(
    prepared: &Prepared,
    tokenizer: &Arc<Tokenizer>,
    rows: usize,
    sequence_len: usize,
) -> Result<Loader> {
    let documents = Arc::new(prepared.documents(Split::Validation)?);
    let packing = Packing::new(sequence_len);
    Loader::new(documents, tokenizer.clone(), 1, packing, Passes::OnePass { at_most_rows: rows }, None)
}

fn evaluate_rows(
    model: &Gpt,
    prepared: &Prepared,
    tokenizer: &Arc<Tokenizer>,
    config: &Config,
    eval_tokens: usize,
    compute: &ComputeDevice,
) -> Result<Evaluation> {
    // Not the model's own: an edit must not change what is evaluated.
    let sequence_len = config.sequence_len;
    let rows = validation_rows(prepared, tokenizer, eval_tokens / sequence_len, sequence_len);
    let mut rows = rows.map_err(DataError::from)?;
    let sizes = if compute.is_cpu { PassSizes::CPU } else { PassSizes::GPU };
    let evaluation = evaluate_bpb(model, &mut rows, &ByteLengths::of(tokenizer), &compute.device, sizes)?;
    let bpb = evaluation.bpb();
    if !bpb.is_finite() {
        let message = format!(
            "val_bpb is {bpb}, expected a number; hint: the last steps diverged, a learning rate in src/model.rs may be too large"
        );
        bail!(Diverged::new(bpb, message));
    }
    Ok(evaluation)
}

/// What the evaluated part of the built-in stories holds, in bits per byte.
fn bpb_floor(prepared: &Prepared, config: &Config) -> Result<f64> {
    let (tokenizer, mut texts) = (prepared.tokenizer(), Vec::new());
    let mut rows = validation_rows(prepared, tokenizer, config.eval_tokens / config.sequence_len, config.sequence_len)?;
    while let Some(batch) = rows.next_batch()? {
        // Every document in a row is there from its start, the last one maybe not to its end.
        let rows = batch.rows.chunks_exact(batch.row_length);
        let documents = rows.flat_map(|row| row.split(|&id| id == tokenizer.bos_id()));
        texts.extend(documents.filter(|ids| !ids.is_empty()).map(|ids| tokenizer.decode(ids)));
    }
    tales::bpb_floor(&texts)
        .context("the built-in validation text is none of its own grammar; hint: prepare the data set tales again")
}

fn announce(resolved: &Resolved, model: &Gpt, groups: &[ParameterGroup], plan: &BatchPlan, run: &Path) {
    let Resolved { config, hyperparameters, model: sizes, .. } = resolved;
    say(format_args!("config:     {}", resolved.config_name));
    say(format_args!("device:     {}, {}", resolved.device, resolved.compute_type));
    say(format_args!("data set:   {}, vocabulary {}", resolved.dataset, config.vocab_size));
    let windows: Vec<String> = sizes.windows().iter().map(usize::to_string).collect();
    say(format_args!(
        "model:      depth {}, width {}, {} heads, {} key/value heads, context {}, windows {}",
        hyperparameters.depth,
        sizes.n_embd,
        sizes.n_head,
        sizes.n_kv_head,
        sizes.sequence_len,
        windows.join(" ")
    ));
    let counts: HashMap<String, usize> =
        parameters(model).into_iter().map(|parameter| (parameter.name.clone(), parameter.elements())).collect();
    let in_group = |group: &ParameterGroup| group.parameters.iter().map(|name| counts[name]).sum::<usize>();
    let with_members = groups.iter().filter(|group| !group.parameters.is_empty());
    let kinds: Vec<String> = with_members.map(|group| format!("{} {}", group.name, in_group(group))).collect();
    say(format_args!("parameters: {} ({})", counts.values().sum::<usize>(), kinds.join(", ")));
    say(format_args!("FLOPs:      {:.3e} a token", model.flops_per_token() as f64));
    say(format_args!(
        "batch:      {} tokens a step = {} forward x {} rows x {} tokens",
        plan.tokens, plan.micro_batches, plan.device_batch_size, config.sequence_len
    ));
    let in_all =
        config.kill_limit_seconds.map_or(String::new(), |limit| format!("; {limit} s in all, then it is ended"));
    match resolved.steps {
        Some(steps) => say(format_args!("limit:      {steps} steps{in_all}")),
        None => say(format_args!(
            "limit:      {} s of training, at most the first {} steps not counted{in_all}",
            config.time_budget_seconds,
            config.uncharged_steps.max(1)
        )),
    }
    say(format_args!("run:        {}", run.display()));
}
