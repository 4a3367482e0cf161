//! One run: train, evaluate, print the summary, leave everything in `runs/<id>/`; evaluate or sample from it later.

mod folder;
mod progress;
mod summary;

use crate::checkpoint::{self, TensorFile, load_weights};
use crate::config::Config;
use crate::data::documents::Split;
use crate::data::loader::Loader;
use crate::data::packing::{Epochs, Packing};
use crate::data::prepare::Prepared;
use crate::data::tales;
use crate::device::{ComputeDevice, peak_host_memory_mib};
use crate::eval::{ByteLengths, Evaluation, evaluate_bpb};
use crate::model::{Gpt, GptConfig, Hyperparameters};
use crate::optim::MuonAdamW;
use crate::parameters::parameters;
use crate::sample::Sampling;
use crate::train::{BatchPlan, Limit, MonotonicClock, Training};
use anyhow::{Context, Result, bail};
use burn::module::Module;
use burn::tensor::Device;
use folder::RunFolder;
use progress::ProgressLine;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use summary::Summary;

/// Name of the weights in a run's folder.
const WEIGHTS: &str = "model.safetensors";
/// Key of the model's sizes in the weights' header.
const SIZES: &str = "gpt_config";

/// What a run is to be.
#[derive(Clone, Debug)]
pub struct Conditions {
    /// The configuration, flags applied.
    pub config: Config,
    /// What it is called.
    pub config_name: String,
    /// Train for this many steps instead of the time budget.
    pub steps: Option<usize>,
    /// Folder in which the run gets its own.
    pub runs_dir: PathBuf,
    /// See [`crate::data::prepare::cache_folder`].
    pub cache_dir: Option<PathBuf>,
}

/// The configuration as resolved, as the run's folder keeps it.
#[derive(Debug, Serialize, Deserialize)]
struct Resolved {
    config_name: String,
    config: Config,
    steps: Option<usize>,
    device: String,
    dataset: String,
    hyperparameters: Hyperparameters,
    model: GptConfig,
}

/// Trains, evaluates and prints the summary; gives the run's folder.
///
/// # Errors
/// If the conditions are not legal, the data is not prepared, the training diverges or a file cannot be written.
pub fn train(conditions: &Conditions) -> Result<PathBuf> {
    let started = Instant::now();
    let Conditions { config, config_name, .. } = conditions;
    let compute = ComputeDevice::select(&config.device)?;
    let hyperparameters = Hyperparameters::for_profile(config.profile);
    let plan = BatchPlan::new(&hyperparameters, config.sequence_len)?;
    let sizes = hyperparameters.architecture(config.sequence_len, config.vocab_size);
    if let Some(problem) = sizes.problem() {
        bail!("the model cannot be made: {problem}; hint: see Hyperparameters in src/model.rs and {config_name}");
    }
    let prepared = Prepared::open(&config.dataset, conditions.cache_dir.as_deref(), Some(config.vocab_size))?;
    let model = Gpt::new(&sizes, compute.compute_type, config.seed, &compute.device.clone().autodiff());
    let groups = hyperparameters.parameter_groups(&model);
    let mut optimizer = MuonAdamW::new(&model, &groups, compute.compute_type)?;
    let mut rows = training_rows(&prepared, &plan, config.sequence_len)?;

    let resolved = Resolved {
        config_name: config_name.clone(),
        config: config.clone(),
        steps: conditions.steps,
        device: compute.name.clone(),
        dataset: prepared.name().to_owned(),
        hyperparameters,
        model: sizes,
    };
    let mut folder = RunFolder::create(&conditions.runs_dir, &resolved)?;
    let hyperparameters = &resolved.hyperparameters;
    let flops_per_token = model.flops_per_token() as f64;
    let num_params: usize = model.parameter_counts().iter().map(|(_, count)| count).sum();
    announce(&resolved, &model, &plan, folder.path());

    let mut progress = ProgressLine::new(flops_per_token, compute.peak_flops);
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
        clock: &MonotonicClock::start(),
    }
    .run(|step| {
        progress.show(step);
        folder.append_metrics(step)
    });
    progress.finish();
    let outcome = outcome?;
    // The rows are there no longer than needed: their threads would compete with the evaluation.
    drop(rows);
    let sizes = serde_json::to_string(&resolved.model)?;
    let weights = folder.path().join(WEIGHTS);
    checkpoint::write(&weights, &parameters(&outcome.model), HashMap::from([(SIZES.to_owned(), sizes)]))?;

    let inference = outcome.model.valid();
    let evaluation = evaluate_rows(&inference, &prepared, config.eval_tokens, &compute.device)?;
    let summary = Summary {
        val_bpb: evaluation.bpb(),
        training_seconds: outcome.training_time.as_secs_f64(),
        total_seconds: started.elapsed().as_secs_f64(),
        peak_vram_mb: peak_host_memory_mib(),
        mfu_percent: compute.peak_flops.map(|peak| 100.0 * flops_per_token * outcome.tokens_per_second / peak),
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
        bpb_floor: prepared.is_tales().then(tales::bpb_floor),
        dropped_percent: outcome.dropped_percent,
        seed: config.seed,
        config: config_name.clone(),
        run_dir: folder.path().display().to_string(),
    };
    folder.write_json("summary.json", &summary)?;
    println!("{summary}");
    Ok(folder.path().to_path_buf())
}

/// Evaluates the checkpoint of the run in `run` and prints the outcome.
///
/// # Errors
/// If the folder holds no whole run or the data is not prepared.
pub fn evaluate(run: &Path, device: Option<&str>, cache_dir: Option<&Path>, eval_tokens: Option<usize>) -> Result<()> {
    let checkpoint = Checkpoint::open(run, device, cache_dir)?;
    let config = &checkpoint.resolved.config;
    let tokens = eval_tokens.unwrap_or(config.eval_tokens);
    if tokens < config.sequence_len {
        bail!(
            "--eval-tokens: expected at least one row of {} tokens, found {tokens}; hint: leave it out",
            config.sequence_len
        );
    }
    let device = &checkpoint.compute.device;
    let evaluation = evaluate_rows(&checkpoint.model, &checkpoint.prepared, tokens, device)?;
    println!("---");
    println!("val_bpb:          {:.6}", evaluation.bpb());
    println!("val_bpb_upstream: {:.6}", evaluation.bpb_upstream());
    println!("val_tokens:       {}", evaluation.tokens);
    println!("val_bytes:        {}", evaluation.bytes);
    println!("eval_seconds:     {:.1}", evaluation.duration.as_secs_f64());
    Ok(())
}

/// What the model of the run in `run` writes after `prompt`.
///
/// # Errors
/// If the folder holds no whole run or the tokenizer is not there.
pub fn sample(
    run: &Path,
    device: Option<&str>,
    cache_dir: Option<&Path>,
    prompt: &str,
    sampling: &Sampling,
) -> Result<String> {
    let Checkpoint { model, prepared, compute, .. } = Checkpoint::open(run, device, cache_dir)?;
    Ok(crate::sample::sample(&model, prepared.tokenizer(), prompt, sampling, &compute.device))
}

/// A run's trained model and what it takes to use it.
struct Checkpoint {
    resolved: Resolved,
    compute: ComputeDevice,
    prepared: Prepared,
    model: Gpt,
}

impl Checkpoint {
    fn open(run: &Path, device: Option<&str>, cache_dir: Option<&Path>) -> Result<Self> {
        let path = run.join("config.json");
        let hint = "hint: --checkpoint names a run's folder, such as runs/20260131-235900";
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}; {hint}", path.display()))?;
        let resolved: Resolved = serde_json::from_str(&text)
            .with_context(|| format!("{} is no run's configuration; {hint}", path.display()))?;
        let weights = run.join(WEIGHTS);
        if !weights.exists() {
            bail!("{} has no {WEIGHTS}, expected a run that came to its end; {hint}", run.display());
        }
        let file = TensorFile::read(&weights)?;
        let compute = ComputeDevice::select(device.unwrap_or(&resolved.config.device))?;
        let config = &resolved.config;
        let prepared = Prepared::open(&config.dataset, cache_dir, Some(config.vocab_size))?;
        if let Some(problem) = resolved.model.problem() {
            bail!("{}: these sizes make no model: {problem}; {hint}", path.display());
        }
        let model = Gpt::new(&resolved.model, compute.compute_type, 0, &compute.device);
        let model = load_weights(model, &file.with_prefix(""))
            .with_context(|| format!("{} does not fit this build's src/model.rs", weights.display()))?;
        Ok(Self { resolved, compute, prepared, model })
    }
}

fn training_rows(prepared: &Prepared, plan: &BatchPlan, sequence_len: usize) -> Result<Loader> {
    let documents = Arc::new(prepared.documents(Split::Train)?);
    let packing = Packing::new(sequence_len);
    Loader::new(documents, prepared.tokenizer().clone(), plan.device_batch_size, packing, Epochs::Repeat, None)
}

fn evaluate_rows(model: &Gpt, prepared: &Prepared, eval_tokens: usize, device: &Device) -> Result<Evaluation> {
    let sequence_len = model.config().sequence_len;
    let documents = Arc::new(prepared.documents(Split::Validation)?);
    let epochs = Epochs::AtMost(eval_tokens / sequence_len);
    let tokenizer = prepared.tokenizer();
    let packing = Packing::new(sequence_len);
    let mut rows = Loader::new(documents, tokenizer.clone(), 1, packing, epochs, None)?;
    evaluate_bpb(model, &mut rows, &ByteLengths::of(tokenizer), device)
}

fn announce(resolved: &Resolved, model: &Gpt, plan: &BatchPlan, run: &Path) {
    let Resolved { config, hyperparameters, model: sizes, .. } = resolved;
    println!("config:     {} (profile {:?})", resolved.config_name, config.profile);
    println!("device:     {}", resolved.device);
    println!("data set:   {}, vocabulary {}", resolved.dataset, config.vocab_size);
    println!(
        "model:      depth {}, width {}, {} heads, {} key/value heads, context {}, windows {}",
        hyperparameters.depth, sizes.n_embd, sizes.n_head, sizes.n_kv_head, sizes.sequence_len, sizes.window_pattern
    );
    let counts = model.parameter_counts();
    let kinds: Vec<String> = counts.iter().map(|(kind, count)| format!("{kind} {count}")).collect();
    println!("parameters: {} ({})", counts.iter().map(|(_, count)| count).sum::<usize>(), kinds.join(", "));
    println!("FLOPs:      {:.3e} a token", model.flops_per_token() as f64);
    println!(
        "batch:      {} tokens a step, {} forward passes of {} rows",
        plan.tokens, plan.micro_batches, plan.device_batch_size
    );
    match resolved.steps {
        Some(steps) => println!("limit:      {steps} steps"),
        None => println!(
            "limit:      {} s of training, the first {} steps not counted",
            config.time_budget_seconds, config.uncharged_steps
        ),
    }
    println!("run:        {}", run.display());
}
