//! The commands of the research loop.

use super::{CacheArgs, ConditionArgs, configuration};
use crate::data::prepared::{Prepared, cache_folder};
use crate::output::say;
use crate::research::agent_loop::{self, Plan, unix_time};
use crate::research::compare::compare;
use crate::research::experiment::{Experiment, Finished, Options};
use crate::research::git::Repository;
use crate::research::interruption::on_signals;
use crate::research::ledger::Ledger;
use crate::research::noise::{self, Spread};
use crate::research::overview::{Order, Overview, Table, sorted};

use crate::research::start::start;
use crate::research::study::{Settings, Study, own_folder};
use crate::research::undo::undo;
use crate::research::worktree;
use crate::run::LONGEST_TUNING;
use crate::tokenizer::hexadecimal;
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

/// Added to the budget where the configuration has no limit for a whole run.
const GRACE_SECONDS: f64 = 300.0;
/// A run ends itself at its limit, in which its first step does not count; it is killed where even that does not work.
const KILL_GRACE_SECONDS: f64 = 20.0 + if cfg!(feature = "wgpu") { LONGEST_TUNING.as_secs_f64() } else { 0.0 };
/// Limit of runs that have a number of steps.
const STEPS_LIMIT_SECONDS: f64 = 3600.0;

#[derive(Debug, Args)]
pub struct StartArgs {
    /// The branch becomes autoresearch/TAG.
    tag: String,
    /// Configuration of all experiments [default: configs/cpu.toml on a CPU, configs/halo.toml on a GPU].
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Train for this many steps instead of a time: for trying things out, since whatever makes a step larger then wins.
    #[arg(long, value_name = "N")]
    steps: Option<usize>,
    /// Folder for the experiments' folders [default: runs in the project's folder].
    #[arg(long, value_name = "DIR")]
    runs_dir: Option<PathBuf>,
    /// Keep the weights of runs that are not kept, too.
    #[arg(long)]
    keep_weights: bool,
    #[command(flatten)]
    conditions: ConditionArgs,
    #[command(flatten)]
    cache: CacheArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub struct OutputArgs {
    /// Print JSON, for programs.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub struct ExperimentArgs {
    /// What the edit tries, in a sentence.
    #[arg(short, long, value_name = "TEXT", required_unless_present = "resume", allow_hyphen_values = true)]
    message: Option<String>,
    /// The edit makes the code simpler: keep it unless it is worse by more than chance explains.
    #[arg(long, conflicts_with = "resume")]
    simpler: bool,
    /// Go on with the experiment that was interrupted.
    #[arg(long, conflicts_with = "message")]
    resume: bool,
    #[command(flatten)]
    confirm: ConfirmArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub struct ConfirmArgs {
    /// Before keeping a gain that chance may explain, train both sides with N new seeds; 2 without a number.
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "2")]
    confirm: Option<usize>,
}

#[derive(Debug, Args)]
pub struct RetryArgs {
    /// Number of the experiment [default: the latest].
    number: Option<u32>,
    #[command(flatten)]
    confirm: ConfirmArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub struct LogArgs {
    /// Lowest val_bpb first [default: in time].
    #[arg(long)]
    best: bool,
    /// Those of all branches.
    #[arg(long)]
    all: bool,
    /// At most so many.
    #[arg(short = 'n', long, value_name = "N")]
    number: Option<usize>,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub struct CompareArgs {
    /// Experiments (7, nov30-007, a commit) or runs' folders; the first is what the others are compared with.
    #[arg(required = true, num_args = 2.., value_name = "EXPERIMENT")]
    experiments: Vec<String>,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub struct NoiseArgs {
    /// Runs of the kept commit, each with another seed.
    #[arg(long, value_name = "N", default_value_t = 5)]
    runs: usize,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub struct LoopArgs {
    /// Command line that starts the agent: it gets a prompt on standard input, edits, and ends.
    #[arg(long, value_name = "COMMAND", required_unless_present = "resume")]
    agent: Option<String>,
    /// End after this many hours [default: 8, if there is no --experiments].
    #[arg(long, value_name = "HOURS")]
    hours: Option<f64>,
    /// End after this many experiments.
    #[arg(long, value_name = "N")]
    experiments: Option<usize>,
    /// Minutes that the agent may take for one edit.
    #[arg(long, value_name = "MINUTES", default_value_t = 30.0)]
    agent_limit: f64,
    /// End after this many rounds in turn that led to no experiment [default: 20, if there is no time at which it ends].
    #[arg(long, value_name = "N")]
    most_idle: Option<usize>,
    /// Go on with the loop that was stopped.
    #[arg(long, conflicts_with_all = ["agent", "hours", "experiments"])]
    resume: bool,
    #[command(flatten)]
    confirm: ConfirmArgs,
}

impl ConfirmArgs {
    fn options(&self, simpler: bool) -> Options {
        Options { confirm: self.confirm.unwrap_or_default(), simpler }
    }
}

impl OutputArgs {
    fn show(&self, value: &impl Serialize, text: impl std::fmt::Display) -> Result<()> {
        if self.json {
            say(serde_json::to_string_pretty(value)?);
        } else {
            say(text);
        }
        Ok(())
    }

    fn show_finished(&self, finished: &Finished) -> Result<()> {
        self.show(&finished.record, finished)
    }
}

/// The folder that the program was started in.
fn here() -> Result<Study> {
    Study::open(Path::new("."))
}

pub fn start_branch(args: &StartArgs) -> Result<()> {
    let settings = settings(args, Repository::open(Path::new("."))?.root())?;
    let interruption = on_signals()?;
    let finished = start(Path::new("."), &args.tag, settings, &interruption)?;
    args.output.show_finished(&finished)?;
    if !args.output.json {
        let program = Path::new(".").join(format!("autoresearch{}", std::env::consts::EXE_SUFFIX));
        say(format_args!(
            "program: {} is this program, whatever the edits: `{} experiment -m \"…\"`",
            program.display(),
            program.display()
        ));
    }
    Ok(())
}

/// What all experiments of the branch will share.
fn settings(args: &StartArgs, root: &Path) -> Result<Settings> {
    let (mut config, name) = configuration(args.config.as_deref(), args.conditions.device.as_deref())?;
    args.conditions.apply(&mut config);
    config.validate(&format!("{name} with the flags given"))?;
    ensure!(
        args.steps != Some(0),
        "--steps: expected at least 1, found 0; hint: leave it out to train for the time budget"
    );
    // Here and not in the first run: a branch without data is of no use.
    Prepared::open(&config.dataset, args.cache.cache_dir.as_deref(), Some(config.vocab_size))?;
    let usual = match (args.steps, args.conditions.kill_limit) {
        (Some(_), None) => STEPS_LIMIT_SECONDS,
        _ => config.kill_limit_seconds.unwrap_or(config.time_budget_seconds + GRACE_SECONDS),
    };
    let absolute = |path: &Path| std::path::absolute(path).map(|path| path.to_string_lossy().into_owned());
    let mut train_arguments = vec!["--config".to_owned(), name.clone()];
    if let Some(path) = &args.config {
        train_arguments[1] = absolute(path)?;
    }
    if let Some(steps) = args.steps {
        train_arguments.extend(["--steps".to_owned(), steps.to_string()]);
    }
    // As it is now, whatever the environment says later.
    let cache = cache_folder(args.cache.cache_dir.as_deref())?;
    train_arguments.extend(["--cache-dir".to_owned(), absolute(&cache)?]);
    train_arguments.extend(args.conditions.arguments()?);
    Ok(Settings {
        train_arguments,
        config: name,
        config_sha256: hexadecimal(&Sha256::digest(serde_json::to_vec(&(&config, args.steps))?)),
        device: config.device,
        seed: config.seed,
        runs_dir: match &args.runs_dir {
            Some(folder) => std::path::absolute(folder)?,
            None => root.join("runs"),
        },
        locks_dir: std::path::absolute(cache)?.join("locks"),
        limit_seconds: usual + KILL_GRACE_SECONDS,
        keep_weights: args.keep_weights,
        cargo_settings_sha256: worktree::Settings::of(root)?.sha256(),
    })
}

pub fn experiment(args: &ExperimentArgs) -> Result<()> {
    let study = here()?;
    let interruption = on_signals()?;
    let _locks = study.lock("experiment")?;
    let experiment = if args.resume {
        let Some(experiment) = Experiment::resume(&study, &interruption)? else {
            bail!(
                "experiment --resume: expected an interrupted experiment, found none; hint: `experiment -m \"…\"` begins one"
            );
        };
        experiment
    } else {
        Experiment::begin(
            &study,
            &interruption,
            args.message.as_deref().unwrap_or_default(),
            args.confirm.options(args.simpler),
        )?
    };
    args.output.show_finished(&experiment.finish()?)
}

pub fn retry(args: &RetryArgs) -> Result<()> {
    let study = here()?;
    let interruption = on_signals()?;
    let _locks = study.lock("retry")?;
    let experiment = Experiment::retry(&study, &interruption, args.number, args.confirm.options(false))?;
    args.output.show_finished(&experiment.finish()?)
}

pub fn undo_last() -> Result<()> {
    let study = here()?;
    let interruption = on_signals()?;
    let _locks = study.lock("undo")?;
    say(undo(&study, &interruption)?);
    Ok(())
}

pub fn status(args: &OutputArgs) -> Result<()> {
    let overview = Overview::of(&here()?)?;
    args.show(&overview, &overview)
}

pub fn log(args: &LogArgs) -> Result<()> {
    let records = if args.all {
        let repository = Repository::open(Path::new("."))?;
        Ledger::new(&own_folder(&repository), repository.root()).all_records()?
    } else {
        let study = here()?;
        study.ledger.records(&study.tag)?
    };
    let records = sorted(records, if args.best { Order::Best } else { Order::Time }, args.number);
    args.output.show(&records, Table(&records))
}

pub fn compare_experiments(args: &CompareArgs) -> Result<()> {
    let comparison = compare(&here()?, &args.experiments)?;
    args.output.show(&comparison, &comparison)
}

pub fn measure_noise(args: &NoiseArgs) -> Result<()> {
    let study = here()?;
    let interruption = on_signals()?;
    let _locks = study.lock("noise")?;
    let is_for_people = !args.output.json;
    let noise = noise::measure(&study, &interruption, args.runs, |run| {
        if is_for_people {
            say(format_args!("seed {:<6} val_bpb {:.6}", run.seed, run.val_bpb));
        }
    })?;
    let spread = Spread::of(&noise).context("at least two runs have a spread")?;
    args.output.show(&spread, &spread)
}

pub fn run_loop(args: &LoopArgs) -> Result<()> {
    let study = here()?;
    let interruption = on_signals()?;
    let _locks = study.lock("loop")?;
    let plan = match &args.agent {
        None => Plan::read(&study)?,
        Some(agent) => {
            study.require_finished()?;
            new_plan(&study, agent.clone(), args)?
        }
    };
    agent_loop::run(&study, &interruption, plan)
}

fn new_plan(study: &Study, agent: String, args: &LoopArgs) -> Result<Plan> {
    let hours = args.hours.or(if args.experiments.is_none() { Some(8.0) } else { None });
    for (flag, value) in [("--hours", hours), ("--agent-limit", Some(args.agent_limit))] {
        let is_usable = value.is_none_or(|value| value > 0.0 && value <= 1e6);
        ensure!(
            is_usable,
            "{flag}: expected a number above 0 and up to a million, found {}; hint: leave it out",
            value.unwrap_or_default()
        );
    }
    ensure!(args.most_idle != Some(0), "--most-idle: expected at least 1, found 0; hint: leave it out");
    Ok(Plan {
        agent,
        until: hours.map(|hours| unix_time() + (hours * 3600.0) as u64),
        experiments: args.experiments,
        agent_limit_seconds: args.agent_limit * 60.0,
        most_idle: args.most_idle.or(if hours.is_none() { Some(20) } else { None }),
        options: args.confirm.options(false),
        first: study.next_number()?,
        rounds: 0,
        agent_process: None,
    })
}
