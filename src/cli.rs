//! Commands and flags: each command is a few calls into the library.

mod research;

use crate::config::Config;
use crate::data::command::{command, prepare_command};
use crate::data::manifest::Manifest;
use crate::data::prepare::{DEFAULT_VOCAB_SIZE, PrepareOptions, prepare};
use crate::device::compute_type::ComputeType;
use crate::device::list::devices;
use crate::device::{ComputeDevice, DEVICE_NAMES};
#[cfg(feature = "wgpu")]
use crate::device::{compute_type::type_name, wgpu::adapters, wgpu::trial};
use crate::output::say;
use crate::run::{self, Conditions, Record, RunPlace, Watchdog};
use crate::sample::Sampling;
use crate::verify::{self, Finding, Goldens};
use anyhow::{Result, bail, ensure};
use clap::{Args, Parser, Subcommand};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Starting a GPU's driver takes seconds; adapters of wgpu are tried before their first use, at most twice.
const LONGEST_CHOICE: Duration = Duration::from_secs(if cfg!(feature = "wgpu") { 600 } else { 120 });
const HUNG_DRIVER: &str = "a GPU's driver may hang, see the system's log (dmesg)";

const CPU_CONFIG: &str = include_str!("../configs/cpu.toml");
const HALO_CONFIG: &str = include_str!("../configs/halo.toml");

/// Language-model pretraining research on one machine: train for a fixed time, read one number.
#[derive(Debug, Parser)]
#[command(name = "autoresearch", version)]
pub struct Cli {
    /// Also print what is usually of no interest, such as how long each step waited for data.
    #[arg(short, long, global = true)]
    pub verbose: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Do everything once on the built-in stories: prepare, train for a minute, evaluate, write a sample.
    Quickstart(CacheArgs),
    /// Get a data set and train its tokenizer.
    Prepare(PrepareArgs),
    /// Train for the budget, evaluate, write the run's folder.
    Train(TrainArgs),
    /// Evaluate a run's checkpoint.
    Eval(EvalArgs),
    /// Let a run's checkpoint continue a text.
    Sample(SampleArgs),
    /// Check this build, on a device, against golden values.
    Verify(VerifyArgs),
    /// List what `--device` can name on this machine.
    Devices,
    /// Try whether an adapter computes what it should, and print the type it multiplies matrices in.
    #[cfg(feature = "wgpu")]
    #[command(hide = true)]
    TryAdapter(TryAdapterArgs),
    /// Ask the drivers of wgpu's adapters what there is, and say that they came to an end with it.
    #[cfg(feature = "wgpu")]
    #[command(hide = true)]
    ListAdapters,
    /// Make a branch for experiments and measure its baseline.
    Start(research::StartArgs),
    /// Measure the edit in the work tree: commit, build, train, keep or take back.
    Experiment(research::ExperimentArgs),
    /// Measure an earlier experiment's commit again.
    Retry(research::RetryArgs),
    /// Take back the unfinished experiment, or the latest that was kept.
    Undo,
    /// Show where the branch stands.
    Status(research::OutputArgs),
    /// Show the experiments.
    Log(research::LogArgs),
    /// Put results beside each other, if they may be compared.
    Compare(research::CompareArgs),
    /// Measure how far val_bpb differs between equal runs.
    Noise(research::NoiseArgs),
    /// Let an agent edit and measure what it edits, again and again.
    Loop(research::LoopArgs),
}

#[derive(Debug, Args)]
struct CacheArgs {
    /// Folder for data sets and tokenizers [default: $AUTORESEARCH_CACHE_DIR, or ~/.cache/autoresearch].
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct PrepareArgs {
    /// Training shards to fetch; -1 for all. The validation shard is always fetched.
    #[arg(long, value_name = "N", default_value_t = 10, allow_negative_numbers = true)]
    num_shards: i64,
    /// Files to fetch at a time.
    #[arg(long, value_name = "N", default_value_t = 8)]
    download_workers: usize,
    /// A data set's name (climbmix, tinystories, tales) or a folder of .parquet, .txt, .md or .jsonl files
    /// [default: what `train` takes: tales on a CPU, climbmix on a GPU].
    #[arg(long, value_name = "NAME|DIR")]
    dataset: Option<String>,
    /// Token ids, special tokens included [default: the data set's usual].
    #[arg(long, value_name = "N")]
    vocab_size: Option<usize>,
    /// Take the data set and the vocabulary from this configuration.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Train the tokenizer anew, even if there is one.
    #[arg(long)]
    retrain_tokenizer: bool,
    #[command(flatten)]
    cache: CacheArgs,
}

#[derive(Debug, Args)]
struct TrainArgs {
    /// Configuration [default: configs/cpu.toml on a CPU, configs/halo.toml on a GPU, as built in].
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Train for this many steps instead of a time.
    #[arg(long, value_name = "N")]
    steps: Option<usize>,
    /// Folder in which the run gets its own.
    #[arg(long, value_name = "DIR", default_value = "runs")]
    runs_dir: PathBuf,
    /// The run's own folder, instead of a new one in --runs-dir. What an earlier run left in it is replaced.
    #[arg(long, value_name = "DIR", conflicts_with = "runs_dir")]
    run_dir: Option<PathBuf>,
    /// End at once when standard input closes: for programs that start a run and must not leave it behind.
    #[arg(long, hide = true)]
    end_with_stdin: bool,
    #[command(flatten)]
    conditions: ConditionArgs,
    #[command(flatten)]
    cache: CacheArgs,
}

/// Conditions that replace those of the configuration.
#[derive(Debug, Args)]
struct ConditionArgs {
    #[doc = "Where to compute."]
    #[arg(long, value_name = "NAME", help = format!("Where to compute: {DEVICE_NAMES} [default: the configuration's]"))]
    device: Option<String>,
    /// In which type to multiply matrices [default: the configuration's].
    #[arg(long, value_name = "TYPE")]
    compute_type: Option<ComputeType>,
    /// Data set's name or folder [default: the configuration's].
    #[arg(long, value_name = "NAME|DIR")]
    dataset: Option<String>,
    /// Token ids [default: the configuration's].
    #[arg(long, value_name = "N")]
    vocab_size: Option<usize>,
    /// Training time in seconds [default: the configuration's]. A longer one raises the kill limit in proportion.
    #[arg(long, value_name = "SECONDS")]
    time_budget: Option<f64>,
    /// End the run if it takes longer than this from start to summary, in seconds [default: the configuration's; with
    /// --steps, any time].
    #[arg(long, value_name = "SECONDS")]
    kill_limit: Option<f64>,
    /// Validation tokens to evaluate [default: the configuration's].
    #[arg(long, value_name = "N")]
    eval_tokens: Option<usize>,
    /// Seed of the initial weights [default: the configuration's].
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

impl ConditionArgs {
    fn apply(&self, config: &mut Config) {
        fn replace<T: Clone>(value: &mut T, flag: &Option<T>) {
            if let Some(flag) = flag {
                *value = flag.clone();
            }
        }
        replace(&mut config.device, &self.device);
        replace(&mut config.compute_type, &self.compute_type);
        replace(&mut config.dataset, &self.dataset);
        replace(&mut config.vocab_size, &self.vocab_size);
        config.kill_limit_seconds = self.kill_limit.or_else(|| self.raised_kill_limit(config));
        replace(&mut config.time_budget_seconds, &self.time_budget);
        replace(&mut config.eval_tokens, &self.eval_tokens);
        replace(&mut config.seed, &self.seed);
    }

    /// As `train` takes them, in another process and folder.
    fn arguments(&self) -> Result<Vec<String>> {
        let dataset = self.dataset.as_ref().map(|dataset| match Path::new(dataset).is_dir() {
            true => std::path::absolute(dataset).map(|path| path.to_string_lossy().into_owned()),
            false => Ok(dataset.clone()),
        });
        let flags = [
            ("--device", self.device.clone()),
            ("--compute-type", self.compute_type.map(|value| value.to_string())),
            ("--dataset", dataset.transpose()?),
            ("--vocab-size", self.vocab_size.map(|value| value.to_string())),
            ("--time-budget", self.time_budget.map(|value| value.to_string())),
            ("--kill-limit", self.kill_limit.map(|value| value.to_string())),
            ("--eval-tokens", self.eval_tokens.map(|value| value.to_string())),
            ("--seed", self.seed.map(|value| value.to_string())),
        ];
        Ok(flags.into_iter().filter_map(|(flag, value)| Some([flag.to_owned(), value?])).flatten().collect())
    }

    /// The limit of `config`, as many times longer as the budget that was asked for is longer than its own.
    fn raised_kill_limit(&self, config: &Config) -> Option<f64> {
        let longer = self.time_budget.map_or(1.0, |budget| (budget / config.time_budget_seconds).max(1.0));
        config.kill_limit_seconds.map(|limit| limit * longer)
    }
}

#[derive(Debug, Args)]
struct EvalArgs {
    /// A run's folder.
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// Validation tokens to evaluate [default: as in the run].
    #[arg(long, value_name = "N")]
    eval_tokens: Option<usize>,
    #[arg(long, value_name = "NAME", help = format!("Where to compute: {DEVICE_NAMES} [default: as in the run]"))]
    device: Option<String>,
    /// In which type to multiply matrices [default: as in the run].
    #[arg(long, value_name = "TYPE")]
    compute_type: Option<ComputeType>,
    #[command(flatten)]
    cache: CacheArgs,
}

#[derive(Debug, Args)]
struct SampleArgs {
    /// A run's folder.
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// Text to continue.
    #[arg(long, default_value = "")]
    prompt: String,
    /// Tokens to write at most.
    #[arg(long, value_name = "N", default_value_t = Sampling::default().tokens)]
    tokens: usize,
    /// Below 1 likely tokens become likelier; 0 always takes the likeliest.
    #[arg(long, value_name = "X", default_value_t = Sampling::default().temperature)]
    temperature: f64,
    /// Draw only from this many of the likeliest tokens.
    #[arg(long, value_name = "N", default_value_t = Sampling::default().top_k)]
    top_k: usize,
    /// Seed of the draws.
    #[arg(long, value_name = "N", default_value_t = Sampling::default().seed)]
    seed: u64,
    #[arg(long, value_name = "NAME", help = format!("Where to compute: {DEVICE_NAMES} [default: as in the run]"))]
    device: Option<String>,
}

#[derive(Debug, Args)]
struct VerifyArgs {
    /// Folder of golden values [default: the small set that is built in].
    #[arg(long, value_name = "DIR")]
    golden: Option<PathBuf>,
    /// Folder of the text that the goldens were made from; without it those that need it are left out.
    #[arg(long, value_name = "DIR")]
    corpus: Option<PathBuf>,
    #[arg(long, value_name = "NAME", default_value = "auto", help = format!("Where to compute: {DEVICE_NAMES}"))]
    device: String,
    /// In which type to multiply matrices; the goldens are float32, the others have wider tolerances.
    #[arg(long, value_name = "TYPE", default_value = "float32")]
    compute_type: ComputeType,
}

#[cfg(feature = "wgpu")]
#[derive(Debug, Args)]
struct TryAdapterArgs {
    #[arg(long)]
    device: String,
    #[arg(long)]
    compute_type: ComputeType,
}

impl Cli {
    /// Does what was asked.
    ///
    /// # Errors
    /// If it cannot be done; the message is one line and ends with a hint.
    pub fn run(self) -> Result<()> {
        #[cfg(feature = "wgpu")]
        if !matches!(self.command, Command::TryAdapter(_) | Command::ListAdapters) {
            trial::use_program(std::env::current_exe()?);
        }
        match self.command {
            Command::Quickstart(args) => quickstart(args.cache_dir.as_deref()),
            Command::Prepare(args) => prepare_dataset(args),
            Command::Train(args) => train(args),
            Command::Eval(args) => evaluate(&args),
            Command::Sample(args) => sample(&args),
            Command::Verify(args) => verify_goldens(&args),
            Command::Devices => {
                devices().iter().for_each(say);
                Ok(())
            }
            #[cfg(feature = "wgpu")]
            Command::TryAdapter(args) => {
                run::end_with_stdin();
                let compute = ComputeDevice::select(&args.device, args.compute_type)?;
                trial::run(&compute)?;
                say(type_name(compute.product_type));
                Ok(())
            }
            #[cfg(feature = "wgpu")]
            Command::ListAdapters => {
                run::end_with_stdin();
                adapters();
                say(trial::LISTED);
                Ok(())
            }
            Command::Start(args) => research::start_branch(&args),
            Command::Experiment(args) => research::experiment(&args),
            Command::Retry(args) => research::retry(&args),
            Command::Undo => research::undo_last(),
            Command::Status(args) => research::status(&args),
            Command::Log(args) => research::log(&args),
            Command::Compare(args) => research::compare_experiments(&args),
            Command::Noise(args) => research::measure_noise(&args),
            Command::Loop(args) => research::run_loop(&args),
        }
    }
}

fn quickstart(cache_dir: Option<&Path>) -> Result<()> {
    let config = Config::parse(CPU_CONFIG, "configs/cpu.toml")?;
    let options = PrepareOptions {
        dataset: config.dataset.clone(),
        cache_dir: cache_dir.map(Path::to_path_buf),
        vocab_size: config.vocab_size,
        ..PrepareOptions::default()
    };
    prepare(&options, |line| say(line))?;
    let conditions = Conditions {
        config,
        config_name: "configs/cpu.toml".to_owned(),
        steps: None,
        place: RunPlace::NewIn(PathBuf::from("runs")),
        cache_dir: options.cache_dir,
    };
    let run = recorded(|record| {
        let watchdog = watch(&conditions.config, record);
        run::train(&conditions, record, watchdog.as_ref())
    })?;
    let prompt = "Once upon a time";
    say(format_args!("---\nA sample after \"{prompt}\":"));
    let text = run::sample(&run, run::Place::default(), prompt, &Sampling::default())?;
    say(format_args!("{prompt}{text}"));
    let train = command(&["train", "--config", "configs/cpu.toml"], cache_dir);
    let more = command(&["sample", "--checkpoint", &run.to_string_lossy(), "--prompt", "The end of"], None);
    let own = prepare_command("FOLDER", &[], cache_dir);
    say(format_args!(
        "---\nNext: edit src/model.rs and compare val_bpb:  {train}\n      more samples:  {more}\n      your own text: {own}"
    ));
    Ok(())
}

fn prepare_dataset(args: PrepareArgs) -> Result<()> {
    let config = match (&args.config, &args.dataset) {
        (None, Some(_)) => None,
        (path, _) => Some(configuration(path.as_deref(), None)?.0),
    };
    let (from_config, usual_of_config) = config.map(|config| (config.dataset, config.vocab_size)).unzip();
    let dataset = args.dataset.or(from_config).expect("without --dataset there is a configuration");
    let usual = Manifest::named(&dataset).map_or(DEFAULT_VOCAB_SIZE, |manifest| manifest.vocab_size);
    let options = PrepareOptions {
        vocab_size: args.vocab_size.or(usual_of_config).unwrap_or(usual),
        dataset,
        cache_dir: args.cache.cache_dir,
        num_shards: args.num_shards,
        download_workers: args.download_workers,
        retrain_tokenizer: args.retrain_tokenizer,
    };
    prepare(&options, |line| say(line))?;
    let (config, vocab_size) =
        (args.config.map(|path| path.to_string_lossy().into_owned()), options.vocab_size.to_string());
    let mut train = vec!["train"];
    train.extend(config.iter().flat_map(|path| ["--config", path]));
    train.extend(["--dataset", &options.dataset, "--vocab-size", &vocab_size]);
    say(format_args!("ready; next: {}", command(&train, options.cache_dir.as_deref())));
    Ok(())
}

/// The configuration at `path` or, without one, the built-in one for `device`; with its name.
fn configuration(path: Option<&Path>, device: Option<&str>) -> Result<(Config, String)> {
    match path {
        Some(path) => Ok((Config::read(path)?, path.display().to_string())),
        None => built_in_configuration(ComputeDevice::select(device.unwrap_or("auto"), ComputeType::Auto)?.is_cpu),
    }
}

fn built_in_configuration(is_cpu: bool) -> Result<(Config, String)> {
    let (text, name) = if is_cpu { (CPU_CONFIG, "configs/cpu.toml") } else { (HALO_CONFIG, "configs/halo.toml") };
    Ok((Config::parse(text, name)?, name.to_owned()))
}

fn train(args: TrainArgs) -> Result<()> {
    if args.end_with_stdin {
        run::end_with_stdin();
    }
    recorded(|record| {
        let place = match &args.run_dir {
            Some(folder) => {
                run::clear(folder)?;
                // From now on, so that what goes wrong before training is found there, too.
                record.lie_in(folder)?;
                RunPlace::At(folder.clone())
            }
            None => RunPlace::NewIn(args.runs_dir.clone()),
        };
        train_in(place, args, record)
    })
}

/// What `run` gives; if it fails, its record says why.
fn recorded<T>(run: impl FnOnce(&Record) -> Result<T>) -> Result<T> {
    let record = Record::start();
    record.note_panics();
    run(&record).inspect_err(|error| record.fail_with(error))
}

fn train_in(place: RunPlace, args: TrainArgs, record: &Record) -> Result<()> {
    // Not under the limit of the configuration: without a file the device decides on that, and an adapter's first trial takes its
    // time.
    let asking = Watchdog::start(
        LONGEST_CHOICE,
        format!("FAIL: choosing the device took longer than {LONGEST_CHOICE:?}; hint: {HUNG_DRIVER}"),
        record,
    );
    let (mut config, config_name) = configuration(args.config.as_deref(), args.conditions.device.as_deref())?;
    let usual_limit = config.kill_limit_seconds;
    args.conditions.apply(&mut config);
    if args.steps.is_some() && args.conditions.kill_limit.is_none() {
        // As many steps as asked for, however long they take.
        config.kill_limit_seconds = None;
    }
    config.validate(&format!("{config_name} with the flags given"))?;
    if args.steps == Some(0) {
        bail!("--steps: expected at least 1, found 0; hint: leave it out to train for the time budget");
    }
    if let (None, Some(usual), Some(limit)) = (args.conditions.kill_limit, usual_limit, config.kill_limit_seconds)
        && limit > usual
    {
        say(format_args!("kill limit: raised from {usual} to {limit} s, in proportion to --time-budget"));
    }
    // Asked for again when the run begins, at once then.
    ComputeDevice::select(&config.device, config.compute_type)?;
    drop(asking);
    let watchdog = watch(&config, record);
    let conditions = Conditions { config, config_name, steps: args.steps, place, cache_dir: args.cache.cache_dir };
    run::train(&conditions, record, watchdog.as_ref())?;
    Ok(())
}

/// Ends the process when a run under `config` exceeds its kill limit, from now on.
fn watch(config: &Config, record: &Record) -> Option<Watchdog> {
    let limit = config.kill_limit_seconds?;
    let line = format!(
        "FAIL: the run took longer than kill_limit_seconds {limit}; hint: {HUNG_DRIVER}; a machine that is only slow needs a larger --kill-limit"
    );
    Some(Watchdog::start(Duration::from_secs_f64(limit), line, record))
}

fn evaluate(args: &EvalArgs) -> Result<()> {
    let cache_dir = args.cache.cache_dir.as_deref();
    let place = run::Place { device: args.device.as_deref(), compute_type: args.compute_type };
    run::evaluate(&args.checkpoint, place, cache_dir, args.eval_tokens)
}

fn sample(args: &SampleArgs) -> Result<()> {
    let SampleArgs { tokens, temperature, top_k, seed, .. } = *args;
    ensure!(
        temperature.is_finite() && temperature >= 0.0,
        "--temperature: expected a number of at least 0, found {temperature}; hint: 0.8 is the default"
    );
    ensure!(top_k > 0, "--top-k: expected at least 1, found 0; hint: 1 always takes the likeliest token");
    let sampling = Sampling { tokens, temperature, top_k, seed };
    let text = run::sample(
        &args.checkpoint,
        run::Place { device: args.device.as_deref(), compute_type: None },
        &args.prompt,
        &sampling,
    )?;
    say(format_args!("{}{text}", args.prompt));
    Ok(())
}

fn verify_goldens(args: &VerifyArgs) -> Result<()> {
    let compute = ComputeDevice::select(&args.device, args.compute_type)?;
    say(format_args!("device: {}, {}", compute.name, compute.types()));
    let built_in;
    let folder = match &args.golden {
        Some(folder) => folder.clone(),
        None => {
            built_in = verify::write_built_in_goldens()?;
            built_in.path().to_path_buf()
        }
    };
    let ComputeDevice { device, compute_type, product_type, .. } = compute;
    let goldens = Goldens { folder, corpus: args.corpus.clone(), device, compute_type, product_type };
    let (mut passed, mut failed, mut first_unusable) = (0, 0, None);
    goldens.verify(|finding| match finding {
        Finding::Compared(check) => {
            say(&check);
            *(if check.passed() { &mut passed } else { &mut failed }) += 1;
        }
        Finding::LeftOut { case, reason } => say(format_args!("{case}: left out, {reason}")),
        Finding::Unusable(error) => {
            say(format_args!("{error}: fail"));
            failed += 1;
            first_unusable.get_or_insert(error);
        }
    })?;
    say(format_args!("{passed} passed, {failed} failed"));
    if let Some(error) = first_unusable {
        return Err(error);
    }
    ensure!(
        passed + failed > 0,
        "{}: nothing was compared; hint: most goldens need the corpus, --corpus names its folder",
        goldens.folder.display()
    );
    ensure!(
        failed == 0,
        "{failed} golden values differ; hint: with src/model.rs and src/optim.rs as they came, this device or its driver computes wrong numbers"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_takes_the_generated_stories_and_a_gpu_web_text() {
        let choice =
            |is_cpu| built_in_configuration(is_cpu).map(|(config, _)| (config.dataset, config.vocab_size)).unwrap();
        assert_eq!(choice(true), ("tales".to_owned(), 1024));
        assert_eq!(choice(false), ("climbmix".to_owned(), 8192));
    }

    #[test]
    fn a_longer_budget_raises_the_kill_limit_in_proportion_unless_it_is_given() {
        let limit = |flags: &[&str]| {
            let Command::Train(args) = Cli::parse_from([&["autoresearch", "train"], flags].concat()).command else {
                unreachable!("the command is train")
            };
            let mut config = Config::parse(HALO_CONFIG, "halo.toml").unwrap();
            args.conditions.apply(&mut config);
            config.kill_limit_seconds
        };
        assert_eq!(limit(&[]), Some(900.0));
        assert_eq!(limit(&["--time-budget", "60"]), Some(900.0));
        assert_eq!(limit(&["--time-budget", "1200"]), Some(1800.0));
        assert_eq!(limit(&["--time-budget", "1200", "--kill-limit", "1300"]), Some(1300.0));
    }
}
