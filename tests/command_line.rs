//! The built program as a user meets it: what it prints, what it leaves, and how it refuses what it cannot do.

use crate::goldens::{change_tensor, copy_shipped};
use arrow_array::{ArrayRef, RecordBatch, StringArray};
use autoresearch::config::Profile;
use autoresearch::data::command::PROGRAM;
use autoresearch::model::Hyperparameters;
use autoresearch::run::protocol::{Budget, Protocol};
use autoresearch::train::BatchPlan;
use parquet::arrow::ArrowWriter;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use tempfile::TempDir;

/// A folder to run the program in, with a cache of its own.
struct Place {
    folder: TempDir,
}

/// What a finished command left.
struct Finished {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Finished {
    /// The value of `key` in the block that the command printed.
    fn value(&self, key: &str) -> &str {
        let line = self.stdout.lines().rfind(|line| line.split_once(':').is_some_and(|(found, _)| found == key));
        line.unwrap_or_else(|| panic!("no {key} in {}", self.stdout))[key.len() + 1..].trim()
    }
}

const SMOKE: [&str; 7] = ["train", "--config", "ci.toml", "--steps", "3", "--eval-tokens", "2048"];

impl Place {
    /// A folder with `ci.toml` in it and nothing prepared.
    fn new() -> Self {
        let place = Self { folder: tempfile::tempdir().unwrap() };
        fs::write(place.path("ci.toml"), include_str!("../configs/ci.toml")).unwrap();
        place
    }

    /// A folder in which the built-in data set is prepared.
    fn with_tales() -> Self {
        let place = Self::new();
        place.ok(&["prepare", "--dataset", "tales"]);
        place
    }

    /// A folder in which `ci.toml` was trained for three steps, and its run.
    fn with_run() -> (Self, Finished, PathBuf) {
        let place = Self::with_tales();
        let trained = place.ok(&SMOKE);
        let run = place.path(trained.value("run_dir"));
        (place, trained, run)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_autoresearch"));
        command.args(arguments).current_dir(self.folder.path());
        command.env("AUTORESEARCH_CACHE_DIR", self.path("cache")).env_remove("RUST_BACKTRACE");
        // What ROCm needs: without it the program says on standard error that it corrects it.
        command.env("TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL", "1");
        for name in ["PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"] {
            command.env_remove(name);
        }
        command
    }

    fn run(&self, arguments: &[&str]) -> Finished {
        let output = self.command(arguments).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let (stdout, stderr) = (text(output.stdout), text(output.stderr));
        assert!(!stderr.contains("panicked"), "{arguments:?}: {stderr}");
        Finished { code: output.status.code(), stdout, stderr }
    }

    fn ok(&self, arguments: &[&str]) -> Finished {
        let finished = self.run(arguments);
        assert_eq!(finished.code, Some(0), "{arguments:?}: {}{}", finished.stdout, finished.stderr);
        finished
    }

    /// The message with which `arguments` are refused: one line that ends with a hint.
    fn refusal(&self, arguments: &[&str]) -> String {
        let Finished { code, stdout, stderr } = self.run(arguments);
        assert!(matches!(code, Some(1 | 2)), "{arguments:?}: {code:?} {stdout}{stderr}");
        let message = stderr.strip_prefix("error: ").unwrap_or_else(|| panic!("{arguments:?}: {stderr:?}"));
        let message = message.strip_suffix('\n').unwrap();
        assert!(!message.contains(char::is_control), "{arguments:?}: {message:?}");
        let (_, hint) = message.split_once("; hint: ").unwrap_or_else(|| panic!("{arguments:?}: no hint in {message}"));
        assert!(!hint.contains("hint: ") && !hint.contains("os error") && !hint.is_empty(), "{arguments:?}: {message}");
        message.to_owned()
    }

    #[track_caller]
    fn assert_refused(&self, arguments: &[&str], parts: &[&str]) {
        let message = self.refusal(arguments);
        for part in parts {
            assert!(message.contains(part), "{arguments:?}: expected {part:?} in {message}");
        }
    }

    /// Writes `name` as ci.toml with some lines replaced.
    fn config(&self, name: &str, changes: &[(&str, &str)]) {
        let mut text = include_str!("../configs/ci.toml").to_owned();
        for (key, value) in changes {
            let line = text.lines().find(|line| line.starts_with(key)).unwrap().to_owned();
            text = text.replace(&line, &format!("{key} = {value}"));
        }
        fs::write(self.path(name), text).unwrap();
    }

    /// A folder of text files.
    fn texts(&self, name: &str, texts: impl IntoIterator<Item = String>) {
        fs::create_dir(self.path(name)).unwrap();
        for (number, text) in texts.into_iter().enumerate() {
            fs::write(self.path(name).join(format!("{number:03}.txt")), text).unwrap();
        }
    }

    /// Two shards of text, the second of which is validation.
    fn shards(&self, name: &str) {
        fs::create_dir(self.path(name)).unwrap();
        write_shard(&self.path(name).join("a.parquet"), "text", &stories(0..300));
        write_shard(&self.path(name).join("b.parquet"), "text", &stories(300..400));
    }
}

fn stories(numbers: std::ops::Range<usize>) -> Vec<String> {
    let story =
        |number: usize| format!("The fox number {number} saw {} hens. ", number * 7 % 31).repeat(5 + number % 5);
    numbers.map(story).collect()
}

fn write_shard(path: &Path, column: &str, texts: &[String]) {
    let texts: ArrayRef = Arc::new(StringArray::from_iter_values(texts));
    let batch = RecordBatch::try_from_iter([(column, texts)]).unwrap();
    let mut writer = ArrowWriter::try_new(File::create(path).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

fn edit_json(path: &Path, edit: impl FnOnce(&mut Value)) {
    let mut value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    edit(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

fn truncate(path: &Path) {
    let bytes = fs::read(path).unwrap();
    fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

// The good road.

#[test]
fn prepare_train_evaluate_and_sample_go_end_to_end() {
    let (place, trained, run) = Place::with_run();
    let block = trained.stdout.split_once("\n---\n").unwrap().1;
    let keys: Vec<&str> = block.lines().map(|line| line.split_once(':').unwrap().0).collect();
    let familiar = [
        "val_bpb",
        "training_seconds",
        "total_seconds",
        "peak_vram_mb",
        "mfu_percent",
        "total_tokens_M",
        "num_steps",
        "num_params_M",
        "depth",
    ];
    let ours = ["device", "tokens_per_second", "eval_seconds", "val_tokens", "val_bytes", "val_bpb_upstream"];
    let ours_too = ["bpb_floor", "dropped_percent", "seed", "config", "run_dir", "uncharged_seconds"];
    assert_eq!(keys, [&familiar[..], &ours, &ours_too].concat());
    for (key, digits) in
        [("val_bpb", 6), ("training_seconds", 1), ("total_seconds", 1), ("total_tokens_M", 1), ("num_params_M", 1)]
    {
        let value = trained.value(key);
        assert!(value.parse::<f64>().is_ok(), "{key}: {value}");
        assert_eq!(value.split_once('.').unwrap().1.len(), digits, "{key}: {value}");
    }
    assert!(block.lines().all(|line| line.as_bytes()[line.find(':').unwrap() + 1] == b' '), "{block}");
    let values = ["num_steps", "depth", "mfu_percent", "seed", "config", "val_tokens"].map(|key| trained.value(key));
    assert_eq!(values, ["3", "2", "n/a", "42", "ci.toml", "2048"]);

    let files =
        ["config.json", "model.rs", "optim.rs", "commit.txt", "metrics.jsonl", "summary.json", "model.safetensors"];
    for file in files {
        assert!(run.join(file).metadata().unwrap().len() > 0, "{file}");
    }
    let steps = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let steps: Vec<Value> = steps.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(steps.iter().map(|step| step["step"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2]);
    let summary: Value = serde_json::from_str(&fs::read_to_string(run.join("summary.json")).unwrap()).unwrap();
    assert_eq!(format!("{:.6}", summary["val_bpb"].as_f64().unwrap()), trained.value("val_bpb"));

    // What must be the same to compare is there from the start of the run, and what was evaluated at its end.
    let config: Value = serde_json::from_str(&fs::read_to_string(run.join("config.json")).unwrap()).unwrap();
    let protocol = |of: &Value| serde_json::from_value::<Protocol>(of["protocol"].clone()).unwrap();
    let (start, end) = (protocol(&config), protocol(&summary));
    assert_eq!(start.differences(&end), Vec::<String>::new());
    assert_eq!((start.evaluated, end.budget, end.seed, end.sequence_len), (None, Budget::Steps(3), 42, 128));
    assert_eq!(end.evaluated.unwrap().val_bytes.to_string(), trained.value("val_bytes"));
    assert_eq!(end.validation_sha256, config["validation_sha256"]);

    let evaluated = place.ok(&["eval", "--checkpoint", text(&run)]);
    for key in ["val_bpb", "val_bpb_upstream", "val_tokens", "val_bytes"] {
        assert_eq!(evaluated.value(key), trained.value(key), "{key}");
    }
    let fewer = place.ok(&["eval", "--checkpoint", text(&run), "--eval-tokens", "1000"]);
    assert_eq!(fewer.value("val_tokens"), "896");

    let sample = ["sample", "--checkpoint", text(&run), "--prompt", "Once upon", "--tokens", "20"];
    let written = place.ok(&sample).stdout;
    assert!(written.starts_with("Once upon") && written.trim_end().len() > "Once upon".len() + 10, "{written}");
    assert_eq!(place.ok(&sample).stdout, written);
    assert_ne!(place.ok(&[&sample[..], &["--seed", "2"]].concat()).stdout, written);
    assert_eq!(place.ok(&["sample", "--checkpoint", text(&run), "--prompt", "Once", "--tokens", "0"]).stdout, "Once\n");
}

#[test]
fn the_same_command_gives_the_same_number_in_a_folder_of_its_own() {
    let (place, first, _) = Place::with_run();
    let runs: Vec<_> = (0..2).map(|_| place.command(&SMOKE).stdout(Stdio::piped()).spawn().unwrap()).collect();
    for run in runs {
        let output = run.wait_with_output().unwrap();
        let stdout = String::from_utf8(output.stdout).unwrap();
        let finished = Finished { code: output.status.code(), stdout, stderr: String::new() };
        assert_eq!(finished.code, Some(0));
        assert_eq!(finished.value("val_bpb"), first.value("val_bpb"));
        assert_ne!(finished.value("run_dir"), first.value("run_dir"));
    }
    assert_eq!(fs::read_dir(place.path("runs")).unwrap().count(), 3);
    let other = place.ok(&[&SMOKE[..], &["--seed", "18446744073709551615"]].concat());
    assert_ne!(other.value("val_bpb"), first.value("val_bpb"));
    assert_eq!(other.value("seed"), "18446744073709551615");
    place.ok(&["eval", "--checkpoint", other.value("run_dir")]);
}

#[test]
fn a_folder_of_text_goes_end_to_end_from_anywhere() {
    let place = Place::new();
    place.texts("my text", stories(0..60));
    let prepared = place.ok(&["prepare", "--dataset", "my text", "--vocab-size", "262", "--config", "ci.toml"]);
    assert!(prepared.stdout.contains("60 text files") && prepared.stdout.contains("SHA-256"), "{}", prepared.stdout);
    let next = format!("next: {PROGRAM} train --config ci.toml --dataset 'my text' --vocab-size 262\n");
    assert!(prepared.stdout.ends_with(&next), "{}", prepared.stdout);
    let trained = place.ok(&[&SMOKE[..], &["--dataset", "my text", "--vocab-size", "262"]].concat());
    assert_eq!(trained.value("bpb_floor"), "n/a");
    let run = place.path(trained.value("run_dir"));
    let elsewhere = tempfile::tempdir().unwrap();
    let evaluated =
        place.command(&["eval", "--checkpoint", text(&run)]).current_dir(elsewhere.path()).output().unwrap();
    let stdout = String::from_utf8(evaluated.stdout).unwrap();
    assert!(stdout.contains(trained.value("val_bpb")), "{stdout} {}", String::from_utf8_lossy(&evaluated.stderr));
}

#[test]
fn shards_go_end_to_end() {
    let place = Place::new();
    place.shards("shards");
    let flags = ["--dataset", "shards", "--vocab-size", "280"];
    let prepared = place.ok(&[&["prepare"], &flags[..]].concat());
    assert!(prepared.stdout.contains("validation on b.parquet"), "{}", prepared.stdout);
    place.ok(&[&SMOKE[..], &flags].concat());
}

#[test]
fn without_a_terminal_the_first_and_the_last_step_have_their_lines() {
    let trained = Place::with_tales().ok(&SMOKE);
    assert!(!trained.stdout.contains(['\r', '\x1b']), "{}", trained.stdout);
    let steps: Vec<&str> = trained.stdout.lines().filter(|line| line.starts_with("step ")).collect();
    assert!(steps[0].starts_with("step 00000 (0.0%) | loss: "), "{steps:?}");
    assert!(steps[steps.len() - 1].starts_with("step 00002 (66.7%) | loss: "), "{steps:?}");
}

#[test]
fn a_run_outlives_the_reader_of_its_output() {
    let place = Place::with_tales();
    // `| head -1`, of both streams: the log goes on writing lines too.
    let mut child =
        place.command(&[&SMOKE[..], &["-v"]].concat()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("config:"), "{line}");
    drop(child.stderr.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let run = fs::read_dir(place.path("runs")).unwrap().next().unwrap().unwrap().path();
    assert!(run.join("summary.json").exists());
    // An error that nobody reads is an error still, and no panic.
    let mut child = place.command(&["train", "--steps", "0"]).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    assert!(matches!(child.wait().unwrap().code(), Some(1 | 2)));
}

#[test]
fn an_interrupted_prepare_leaves_nothing_in_the_way() {
    let place = Place::new();
    place.texts("text", (0..40).map(|number| stories(number * 50..number * 50 + 50).concat()));
    let prepare = ["prepare", "--dataset", "text", "--vocab-size", "300"];
    for milliseconds in [5, 20, 40, 80] {
        let mut child = place.command(&prepare).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        // However far it has got, it must not have left a half-written state behind.
        std::thread::sleep(std::time::Duration::from_millis(milliseconds));
        child.kill().unwrap();
        child.wait().unwrap();
        let _ = place.run(&[&SMOKE[..], &["--dataset", "text", "--vocab-size", "300"]].concat());
    }
    place.ok(&prepare);
    place.ok(&[&SMOKE[..], &["--dataset", "text", "--vocab-size", "300"]].concat());
}

#[test]
fn several_prepares_of_the_same_data_set_do_not_disturb_each_other() {
    let place = Place::new();
    let spawn =
        |_| place.command(&["prepare", "--dataset", "tales"]).stderr(Stdio::piped()).stdout(Stdio::null()).spawn();
    let children: Vec<_> = (0..4).map(spawn).collect();
    for child in children {
        let output = child.unwrap().wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    place.ok(&SMOKE);
}

// A run that is started by another program.

/// The flags of a run in the folder `run`.
fn smoke_in(run: &str) -> Vec<&str> {
    [&SMOKE[..], &["--run-dir", run]].concat()
}

fn read_json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())))
        .unwrap()
}

#[test]
fn a_run_in_a_folder_that_is_named_replaces_what_an_earlier_one_left() {
    let place = Place::with_tales();
    let run = place.path("made/by/the/run");
    let first = place.ok(&smoke_in("made/by/the/run"));
    assert_eq!(first.value("run_dir"), "made/by/the/run");
    assert!(!place.path("runs").exists());
    fs::write(run.join("run.log"), "of the program that started it").unwrap();
    fs::write(run.join("failure.json"), "{}").unwrap();
    place.ok(&smoke_in("made/by/the/run"));
    let steps = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    assert_eq!(steps.lines().count(), 3, "{steps}");
    assert!(run.join("run.log").exists() && !run.join("failure.json").exists());
    // One that fails leaves nothing that could be taken for its result.
    place.assert_refused(&[&smoke_in("made/by/the/run")[..], &["--device", "tpu"]].concat(), &["'tpu'"]);
    assert!(!run.join("summary.json").exists() && !run.join("model.safetensors").exists());
    assert_eq!(read_json(&run.join("failure.json"))["kind"], "error");
    assert_eq!(read_json(&run.join("failure.json"))["phase"], "start_up");
}

#[test]
fn a_run_writes_when_its_phases_began() {
    let place = Place::with_tales();
    place.ok(&smoke_in("run"));
    let phases = read_json(&place.path("run/phase.json"));
    assert_eq!(phases["phase"], "done");
    let began = ["start_up", "training", "evaluation", "done"].map(|phase| phases["began"][phase].as_f64().unwrap());
    assert!(began[0] == 0.0 && began.is_sorted_by(|one, next| one < next), "{began:?}");
    let summary = read_json(&place.path("run/summary.json"));
    let seconds = |key: &str| summary[key].as_f64().unwrap();
    assert_eq!(seconds("startup_seconds"), began[1]);
    let parts = seconds("startup_seconds") + seconds("training_seconds") + seconds("eval_seconds");
    assert!(parts <= seconds("total_seconds") && seconds("total_seconds") <= began[3], "{summary}");
}

#[test]
fn a_folder_that_is_no_runs_is_left_alone() {
    let place = Place::with_tales();
    fs::create_dir(place.path("src")).unwrap();
    fs::write(place.path("src/model.rs"), "mine").unwrap();
    place.assert_refused(&smoke_in("src"), &["src", "model.rs", "--run-dir"]);
    assert_eq!(fs::read_to_string(place.path("src/model.rs")).unwrap(), "mine");
    assert_eq!(fs::read_dir(place.path("src")).unwrap().count(), 1);
    place.assert_refused(&smoke_in("ci.toml"), &["ci.toml", "--run-dir"]);
    place.assert_refused(&[&smoke_in("run")[..], &["--runs-dir", "runs"]].concat(), &["--run-dir", "--runs-dir"]);
}

#[test]
fn data_that_cannot_be_used_is_told_from_a_models_faults() {
    let place = Place::new();
    let kind = || read_json(&place.path("run/failure.json"))["kind"].as_str().unwrap().to_owned();
    place.shards("shards");
    let train = [&smoke_in("run")[..], &["--dataset", "shards", "--vocab-size", "280"]].concat();
    place.assert_refused(&train, &["prepare"]);
    assert_eq!(kind(), "data");
    place.ok(&["prepare", "--dataset", "shards", "--vocab-size", "280"]);
    place.ok(&train);
    let shard = place.path("shards/a.parquet");
    let mut garbled = fs::read(&shard).unwrap();
    let half = garbled.len() / 2;
    garbled[40..half].fill(0xa5);
    fs::write(&shard, garbled).unwrap();
    let message = place.refusal(&train);
    assert_eq!(kind(), "data");
    assert_eq!(read_json(&place.path("run/failure.json"))["message"], message);

    place.texts("short", (0..8).map(|number| format!("a few words {number}")));
    place.ok(&["prepare", "--dataset", "short", "--vocab-size", "262"]);
    place.refusal(&[&smoke_in("run")[..], &["--dataset", "short", "--vocab-size", "262"]].concat());
    assert_eq!(kind(), "data");
    place.refusal(&["train", "--config", "missing.toml", "--run-dir", "run"]);
    assert_eq!(kind(), "error");
}

#[test]
fn a_run_that_exceeds_its_kill_limit_says_so_in_its_folder() {
    let place = Place::with_tales();
    let endless = ["train", "--config", "ci.toml", "--steps", "100000000", "--time-budget", "0.5", "--kill-limit", "3"];
    place.run(&[&endless[..], &["--run-dir", "run"]].concat());
    let failure = read_json(&place.path("run/failure.json"));
    assert_eq!((&failure["kind"], &failure["phase"]), (&json!("timeout"), &json!("training")), "{failure}");
    assert!(failure["message"].as_str().unwrap().contains("kill_limit_seconds 3"), "{failure}");
}

#[test]
fn a_run_ends_when_the_program_that_started_it_is_gone() {
    let place = Place::with_tales();
    let endless = ["train", "--config", "ci.toml", "--steps", "100000000", "--run-dir", "run", "--end-with-stdin"];
    let mut child = place.command(&endless).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let first_step = lines.map(Result::unwrap).find(|line| line.starts_with("step "));
    assert!(first_step.is_some() && child.try_wait().unwrap().is_none());
    assert_eq!(read_json(&place.path("run/phase.json"))["phase"], "training");
    // As the kernel does for a process that ends in whatever way.
    drop(child.stdin.take());
    let ended = std::time::Instant::now();
    while child.try_wait().unwrap().is_none() {
        if ended.elapsed().as_secs() > 60 {
            child.kill().unwrap();
            panic!("it goes on");
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert!(!place.path("run/summary.json").exists());
    // Without the flag it does not matter.
    assert_eq!(place.command(&SMOKE).stdin(Stdio::null()).output().unwrap().status.code(), Some(0));
}

// Arguments and configurations.

#[test]
fn wrong_arguments_are_refused_in_one_line() {
    let place = Place::with_tales();
    place.assert_refused(&["train", "--steps", "many"], &["--steps", "'many'"]);
    place.assert_refused(&["train", "--steps", "-1"], &["'-1'"]);
    place.assert_refused(&["train", "--steps", "0"], &["--steps", "at least 1, found 0"]);
    place.assert_refused(&["train", "--step", "3"], &["--step", "similar argument exists: '--steps'"]);
    place.assert_refused(&["train", "--seed", "18446744073709551616"], &["--seed"]);
    place.assert_refused(&["trian"], &["trian", "hint: a similar subcommand exists: 'train'"]);
    place.assert_refused(&["eval"], &["--checkpoint <DIR>"]);
    place.assert_refused(&["sample", "--checkpoint", "x", "--temperature", "nan"], &["--temperature", "NaN"]);
    place.assert_refused(&["sample", "--checkpoint", "x", "--temperature=-1"], &["--temperature", "-1"]);
    for budget in ["nan", "inf", "1e300", "0", "-5", "1e-300"] {
        let budget = format!("--time-budget={budget}");
        place.assert_refused(&["train", "--config", "ci.toml", &budget], &["ci.toml", "time_budget_seconds"]);
    }
    for limit in ["5", "0", "-1", "nan", "inf", "1e300"] {
        let limit = format!("--kill-limit={limit}");
        place.assert_refused(
            &["train", "--config", "ci.toml", &limit],
            &["kill_limit_seconds", "time_budget_seconds 5"],
        );
    }
    place.assert_refused(&["train", "--config", "ci.toml", "--vocab-size", "0"], &["vocab_size", "found 0"]);
    place.assert_refused(
        &["train", "--config", "ci.toml", "--eval-tokens", "127"],
        &["eval_tokens", "128", "found 127"],
    );
    place.assert_refused(&["train", "--config", "missing.toml"], &["missing.toml", "cannot read"]);
    place.assert_refused(&["train", "--config", "."], &["cannot read"]);
}

#[test]
fn help_and_version_are_no_errors() {
    let place = Place::new();
    assert!(place.ok(&["--version"]).stdout.starts_with("autoresearch "));
    for command in ["quickstart", "prepare", "train", "eval", "sample", "verify", "devices"] {
        assert!(place.ok(&["--help"]).stdout.contains(command));
        assert!(place.ok(&[command, "--help"]).stdout.contains("Usage: autoresearch"));
    }
    let Finished { code, stderr, .. } = place.run(&[]);
    assert!(code == Some(2) && stderr.contains("Usage: autoresearch"), "{stderr}");
}

#[test]
fn devices_that_are_unknown_or_not_compiled_in_are_refused() {
    let place = Place::with_tales();
    place.assert_refused(&["train", "--device", "tpu"], &["--device", "'tpu'", "auto, cpu"]);
    place.assert_refused(&["verify", "--device", ""], &["--device", "''"]);
    let features = [("libtorch", cfg!(feature = "tch"), "tch"), ("wgpu", cfg!(feature = "wgpu"), "wgpu")];
    for (device, compiled_in, feature) in features {
        if compiled_in {
            continue;
        }
        let flag = format!("--device {device}");
        for command in [&["train", "--config", "ci.toml", "--device", device][..], &["verify", "--device", device]] {
            place.assert_refused(command, &[&flag, &format!("--features {feature}")]);
        }
    }
}

/// Whether this machine may have a GPU that libtorch computes on.
#[cfg(feature = "tch")]
fn may_have_gpu() -> bool {
    ["/dev/nvidia0", "/dev/kfd", "/dev/dxg"].iter().any(|node| Path::new(node).exists())
}

#[cfg(feature = "tch")]
#[test]
fn a_gpu_that_is_not_there_is_refused_with_the_cause() {
    let place = Place::with_tales();
    for name in ["libtorch:", "libtorch:-1", "libtorch:1.5", "libtorch:gpu", "libtorch:99999999999999999999"] {
        place.assert_refused(&["verify", "--device", name], &[&format!("found '{name}'"), "libtorch:N"]);
    }
    let expected = "expected a GPU that libtorch can compute on, found ";
    for command in [&["train", "--config", "ci.toml", "--device"][..], &["verify", "--device"]] {
        place.assert_refused(&[command, &["libtorch:4096"]].concat(), &["--device libtorch:4096: ", expected]);
    }
    if !may_have_gpu() {
        place.assert_refused(&["verify", "--device", "libtorch"], &["--device libtorch: ", expected]);
        // Without a GPU it is no news that none is used.
        if !cfg!(feature = "wgpu") {
            assert_eq!(place.ok(&SMOKE).stderr, "");
        }
        let verbose = place.ok(&["verify", "-v"]).stderr;
        assert!(verbose.contains(&format!("not used: --device libtorch: {expected}")), "{verbose}");
    }
}

#[test]
fn a_run_that_exceeds_its_kill_limit_is_ended_with_fail() {
    let place = Place::with_tales();
    let endless = ["train", "--config", "ci.toml", "--steps", "100000000", "--time-budget", "0.5", "--kill-limit", "1"];
    let Finished { code, stdout, stderr } = place.run(&endless);
    assert_eq!(code, Some(1), "{stdout}{stderr}");
    let last = stdout.lines().next_back().unwrap();
    assert!(last.starts_with("FAIL: the run took longer than kill_limit_seconds 1; hint: "), "{stdout}");
    assert!(!stdout.contains("val_bpb"), "{stdout}");
    // Steps alone may take any time, and a limit that is not reached changes nothing.
    let limit_of = |flags: &[&str]| {
        let trained = place.ok(&[&SMOKE[..], flags].concat());
        let config = fs::read_to_string(place.path(trained.value("run_dir")).join("config.json")).unwrap();
        serde_json::from_str::<Value>(&config).unwrap()["config"]["kill_limit_seconds"].clone()
    };
    assert_eq!(limit_of(&[]), Value::Null);
    assert_eq!(limit_of(&["--kill-limit", "300"]), json!(300.0));
}

#[test]
fn a_longer_budget_says_that_it_raises_the_kill_limit() {
    let place = Place::with_tales();
    place.config("short.toml", &[("time_budget_seconds", "0.1"), ("kill_limit_seconds", "60")]);
    let trained = place.ok(&["train", "--config", "short.toml", "--time-budget", "0.2", "--eval-tokens", "2048"]);
    assert!(trained.stdout.starts_with("kill limit: raised from 60 to 120 s"), "{}", trained.stdout);
    assert!(trained.stdout.contains("; 120 s in all"), "{}", trained.stdout);
}

#[test]
fn configurations_are_refused_by_file_and_key() {
    let place = Place::with_tales();
    let refused = |content: &[u8], parts: &[&str]| {
        fs::write(place.path("my.toml"), content).unwrap();
        place.assert_refused(&["train", "--config", "my.toml"], &[&["my.toml"], parts].concat());
        place.assert_refused(&["prepare", "--config", "my.toml"], &["my.toml"]);
    };
    let usual = include_str!("../configs/ci.toml");
    refused(format!("{usual}learning_rate = 1\n").as_bytes(), &["line 14", "learning_rate"]);
    refused(usual.replace("seed = 42\n", "").as_bytes(), &["seed"]);
    refused(usual.replace("seed = 42", "seed = \"x\"").as_bytes(), &["line 13"]);
    refused(usual.replace("seed = 42", "seed = -1").as_bytes(), &["line 13"]);
    refused(usual.replace("\"ci\"", "\"tpu\"").as_bytes(), &["tpu"]);
    refused(usual.replace("time_budget_seconds = 5", "time_budget_seconds = nan").as_bytes(), &["time_budget_seconds"]);
    refused(usual.replace("sequence_len = 128", "sequence_len = 0").as_bytes(), &["sequence_len", "found 0"]);
    refused(format!("{usual}seed = 1\n").as_bytes(), &["line 14, at `seed`", "duplicate key"]);
    refused(b"", &["profile"]);
    refused(b"\xff\xfe\x00", &["UTF-8"]);
    refused(b"= = =\n\n[", &["line 1"]);
}

#[test]
fn a_configuration_may_have_a_byte_order_mark_and_windows_line_ends() {
    let place = Place::with_tales();
    let usual = include_str!("../configs/ci.toml");
    fs::write(place.path("ci.toml"), format!("\u{feff}{}", usual.replace('\n', "\r\n"))).unwrap();
    place.ok(&SMOKE);
}

#[test]
fn a_batch_that_is_not_whole_names_the_nearest_that_are() {
    let refusal = |total_batch_size, sequence_len| {
        let usual = Hyperparameters::for_profile(Profile::Ci);
        let hyperparameters = Hyperparameters { device_batch_size: 4, total_batch_size, ..usual };
        let message = BatchPlan::new(&hyperparameters, sequence_len).unwrap_err().to_string();
        assert!(message.contains("; hint: ") && !message.contains('\n'), "{message}");
        message
    };
    let message = refusal(1000, 64);
    assert!(message.contains("1000") && message.contains("are 768 or 1024"), "{message}");
    assert!(refusal(100, 64).contains("is 256"), "{}", refusal(100, 64));
    assert!(refusal(0, 64).contains("is 256"));
    assert!(refusal(1000, usize::MAX).contains("not a multiple"));
    assert!(refusal(1000, 0).contains("at least 1"));

    let place = Place::with_tales();
    for length in ["127", "3", "100000", "9223372036854775807"] {
        place.config("odd.toml", &[("sequence_len", length), ("eval_tokens", "9223372036854775807")]);
        place.assert_refused(&["train", "--config", "odd.toml", "--steps", "1"], &["total_batch_size 256", length]);
    }
    // The shortest context there is.
    place.config("one.toml", &[("sequence_len", "1"), ("eval_tokens", "64")]);
    place.ok(&["train", "--config", "one.toml", "--steps", "1"]);
}

// Data sets and the cache.

#[test]
fn a_data_set_that_is_not_prepared_names_the_command() {
    let place = Place::new();
    place.assert_refused(&SMOKE, &["tales", &format!("{PROGRAM} prepare --dataset tales --vocab-size 1024")]);
    place
        .assert_refused(&["train", "--config", "ci.toml", "--dataset", "nosuch"], &["--dataset nosuch", "tinystories"]);
    place.assert_refused(&["prepare", "--dataset", "ci.toml"], &["ci.toml", "folder"]);
}

#[test]
fn another_vocabulary_than_on_disk_is_refused() {
    let place = Place::with_tales();
    let parts = ["2048", "1024", "--retrain-tokenizer"];
    place.assert_refused(&["train", "--config", "ci.toml", "--vocab-size", "2048"], &parts);
    place.assert_refused(&["prepare", "--dataset", "tales", "--vocab-size", "2048"], &parts);
    place.ok(&["prepare", "--dataset", "tales", "--vocab-size", "300", "--retrain-tokenizer"]);
    place.assert_refused(&SMOKE, &["1024", "300"]);
    place.ok(&[&SMOKE[..], &["--vocab-size", "300"]].concat());
}

#[test]
fn numbers_for_prepare_are_checked() {
    let place = Place::new();
    for size in ["0", "1", "260"] {
        place.assert_refused(&["prepare", "--dataset", "tales", "--vocab-size", size], &["--vocab-size", "261"]);
    }
    place.assert_refused(&["prepare", "--dataset", "tales", "--vocab-size", "18446744073709551615"], &["--vocab-size"]);
    for shards in ["0", "-2"] {
        place.assert_refused(&["prepare", "--num-shards", shards], &["--num-shards", shards]);
    }
    place.assert_refused(&["prepare", "--num-shards", "99999999999999999999"], &["--num-shards"]);
}

#[test]
fn text_that_cannot_be_used_is_refused() {
    let place = Place::new();
    let refused = |name: &str, parts: &[&str]| place.assert_refused(&["prepare", "--dataset", name], parts);
    place.texts("nothing", []);
    refused("nothing", &["nothing", ".parquet, .txt"]);
    place.texts("empty", vec![String::new(); 3]);
    refused("empty", &["empty", "non-empty documents"]);
    place.texts("one", stories(0..1));
    refused("one", &["at least two"]);
    place.texts("short", ["a".to_owned(), "b".to_owned()]);
    refused("short", &["--vocab-size 8192"]);
    place.texts("binary", stories(0..3));
    fs::write(place.path("binary/999.txt"), b"\xff\xff").unwrap();
    refused("binary", &["999.txt", "UTF-8"]);

    place.texts("column", []);
    write_shard(&place.path("column/a.parquet"), "content", &stories(0..3));
    refused("column", &["a.parquet", "training shard"]);
    write_shard(&place.path("column/b.parquet"), "content", &stories(3..6));
    refused("column", &["a.parquet", "`text`", "content"]);

    place.shards("cut");
    truncate(&place.path("cut/a.parquet"));
    refused("cut", &["a.parquet", "complete parquet file"]);
    fs::write(place.path("cut/a.parquet"), "").unwrap();
    refused("cut", &["a.parquet", "complete parquet file"]);

    place.texts("void", []);
    write_shard(&place.path("void/a.parquet"), "text", &[String::new(), String::new()]);
    write_shard(&place.path("void/b.parquet"), "text", &[]);
    refused("void", &["void, training split", "no non-empty document"]);
}

#[test]
fn names_of_any_kind_fit_into_the_line() {
    let place = Place::new();
    for name in ["line\nbreak", "bell\x07 \x1b[31m", "quote\"'", "-", " ", "träumerei"] {
        place.texts(name, []);
        place.assert_refused(&["prepare", "--dataset", &format!("./{name}")], &[".parquet, .txt"]);
    }
}

#[test]
fn text_too_short_for_the_context_is_refused_before_training() {
    let place = Place::new();
    place.texts("short", (0..8).map(|number| format!("a few words {number}")));
    place.ok(&["prepare", "--dataset", "short", "--vocab-size", "262"]);
    let train = ["train", "--config", "ci.toml", "--dataset", "short", "--vocab-size", "262"];
    place.assert_refused(&train, &["short", "validation", "128"]);
    assert!(!place.path("runs").exists());
}

#[test]
fn shards_that_were_damaged_later_are_named() {
    let place = Place::new();
    place.shards("shards");
    place.ok(&["prepare", "--dataset", "shards", "--vocab-size", "280"]);
    let shard = place.path("shards/a.parquet");
    let train = [&SMOKE[..], &["--dataset", "shards", "--vocab-size", "280"]].concat();
    let whole = fs::read(&shard).unwrap();
    let mut garbled = whole.clone();
    garbled[40..whole.len() / 2].fill(0xa5);
    fs::write(&shard, garbled).unwrap();
    place.assert_refused(&train, &["a.parquet"]);
    fs::write(&shard, &whole[..whole.len() / 2]).unwrap();
    place.assert_refused(&train, &["a.parquet", "bytes that was prepared", "prepare --dataset shards"]);
    fs::remove_file(&shard).unwrap();
    place.assert_refused(&train, &["a.parquet"]);
}

#[test]
fn a_cache_that_cannot_be_used_is_named() {
    let place = Place::new();
    fs::write(place.path("file"), "").unwrap();
    for command in ["prepare", "train"] {
        place.assert_refused(&[command, "--dataset", "tales", "--cache-dir", "file"], &["file/tales", "--cache-dir"]);
    }
    place.ok(&["prepare", "--dataset", "tales"]);
    let record = place.path("cache/tales/prepared.json");
    for content in [
        "",
        "{}",
        "[1]",
        "{\"format\": 7, \"name\": \"tales\", \"corpus\": null, \"files\": {\"kind\": \"generated\"}}",
    ] {
        fs::write(&record, content).unwrap();
        place.assert_refused(&SMOKE, &["prepared.json", "prepare --dataset tales"]);
    }
    fs::remove_file(&record).unwrap();
    fs::create_dir(&record).unwrap();
    place.assert_refused(&SMOKE, &["prepared.json", "cannot be read"]);
    place.assert_refused(&["prepare", "--dataset", "tales"], &["prepared.json"]);
}

#[test]
fn a_damaged_tokenizer_is_refused_and_made_again_by_prepare() {
    let place = Place::with_tales();
    for file in ["tokenizer.tiktoken", "tokenizer.json"] {
        let path = place.path("cache/tales").join(file);
        truncate(&path);
        place.assert_refused(&SMOKE, &[file, &format!("{PROGRAM} prepare --dataset tales")]);
        fs::remove_file(&path).unwrap();
        place.assert_refused(&SMOKE, &[file, &format!("{PROGRAM} prepare --dataset tales")]);
        place.ok(&["prepare", "--dataset", "tales"]);
        place.ok(&SMOKE);
    }
}

// Runs and checkpoints.

#[test]
fn a_folder_for_runs_that_cannot_be_made_is_named() {
    let place = Place::with_tales();
    for root in ["ci.toml", "ci.toml/runs"] {
        place.assert_refused(&[&SMOKE[..], &["--runs-dir", root]].concat(), &["ci.toml", "--runs-dir"]);
    }
}

#[test]
fn checkpoints_that_are_not_whole_are_refused() {
    let (place, _, run) = Place::with_run();
    let refused = |parts: &[&str]| {
        place.assert_refused(&["eval", "--checkpoint", text(&run)], parts);
        place.assert_refused(&["sample", "--checkpoint", text(&run)], parts);
    };
    place.assert_refused(&["eval", "--checkpoint", "nowhere"], &["nowhere", "--checkpoint"]);
    place.assert_refused(&["sample", "--checkpoint", "ci.toml"], &["ci.toml", "--checkpoint"]);
    place.assert_refused(&["eval", "--checkpoint", text(&run), "--eval-tokens", "127"], &["--eval-tokens", "127"]);
    place.assert_refused(&["eval", "--checkpoint", text(&run), "--cache-dir", "empty"], &["empty", "prepare"]);

    let (weights, config) = (run.join("model.safetensors"), run.join("config.json"));
    let (weight_bytes, config_text) = (fs::read(&weights).unwrap(), fs::read_to_string(&config).unwrap());
    for damaged in [&weight_bytes[..weight_bytes.len() / 2], b"", b"\xff\xff\xff\xff\xff\xff\xff\xff{}"] {
        fs::write(&weights, damaged).unwrap();
        refused(&["model.safetensors", "whole safetensors file"]);
    }
    fs::write(&weights, &weight_bytes).unwrap();
    // This rewrites the file without the header's sizes, so that only the shapes tell.
    change_tensor(&weights, "resid_lambdas", |bytes, _| (bytes[..4].to_vec(), vec![1]));
    refused(&["model.safetensors", "resid_lambdas", "[1]", "[2]"]);
    fs::write(&weights, &weight_bytes).unwrap();
    change_tensor(&weights, "lm_head.weight", |bytes, shape| (f32::NAN.to_le_bytes().repeat(bytes.len() / 4), shape));
    let Finished { code, stdout, .. } = place.run(&["eval", "--checkpoint", text(&run)]);
    assert!(code == Some(1) && stdout.starts_with("FAIL: val_bpb is NaN") && stdout.lines().count() == 1, "{stdout}");
    place.ok(&["sample", "--checkpoint", text(&run), "--tokens", "3"]);
    fs::remove_file(&weights).unwrap();
    refused(&["no model.safetensors", "came to its end"]);
    fs::write(&weights, &weight_bytes).unwrap();

    for damaged in ["", "{}", "null", &config_text[..100]] {
        fs::write(&config, damaged).unwrap();
        refused(&["config.json", "run's configuration"]);
    }
    for (key, value) in
        [("n_head", 0), ("n_embd", 1 << 40), ("n_layer", 3), ("sequence_len", usize::MAX), ("vocab_size", 1)]
    {
        fs::write(&config, &config_text).unwrap();
        edit_json(&config, |config| config["model"][key] = json!(value));
        refused(&["model.safetensors", "sizes"]);
    }
    fs::write(&config, &config_text).unwrap();
    place.ok(&["eval", "--checkpoint", text(&run)]);
    // As runs were written before there was a kill limit.
    edit_json(&config, |config| {
        assert!(config["config"].as_object_mut().unwrap().remove("kill_limit_seconds").is_some())
    });
    place.ok(&["eval", "--checkpoint", text(&run)]);
    fs::remove_file(&config).unwrap();
    refused(&["config.json"]);
}

#[test]
fn a_run_keeps_the_tokenizer_it_was_trained_with() {
    let place = Place::new();
    place.texts("text", stories(0..60));
    let flags = ["--dataset", "text", "--vocab-size", "262"];
    place.ok(&[&["prepare"], &flags[..]].concat());
    let trained = place.ok(&[&SMOKE[..], &flags].concat());
    let run = trained.value("run_dir");
    let sampled = place.ok(&["sample", "--checkpoint", run]).stdout;
    place.ok(&["prepare", "--dataset", "text", "--vocab-size", "270", "--retrain-tokenizer"]);
    assert_eq!(place.ok(&["eval", "--checkpoint", run]).value("val_bpb"), trained.value("val_bpb"));
    assert_eq!(place.ok(&["sample", "--checkpoint", run]).stdout, sampled);
    fs::write(place.path(run).join("tokenizer.tiktoken"), "IQ== 0\n").unwrap();
    place.assert_refused(&["sample", "--checkpoint", run], &["tokenizer.tiktoken"]);
}

// Goldens.

#[test]
fn verify_prints_every_comparison_and_counts_them() {
    let place = Place::new();
    let verified = place.ok(&["verify"]);
    let lines: Vec<&str> = verified.stdout.lines().collect();
    let passed = lines.iter().filter(|line| line.ends_with(": pass")).count();
    assert_eq!(lines[lines.len() - 1], format!("{passed} passed, 0 failed"));
    assert_eq!(lines.len(), passed + 2);
    assert!(passed > 50);
    let low = place.ok(&["verify", "--compute-type", "bfloat16"]).stdout;
    assert!(low.ends_with(&format!("\n{passed} passed, 0 failed\n")), "{low}");
    assert!(low.contains("model-gqa: logits: error ") && low.contains(", tolerance 2e-2: pass"), "{low}");
    let Finished { code, stderr, .. } = place.run(&["verify", "--compute-type", "bf16"]);
    assert_eq!(code, Some(2));
    assert!(stderr.contains("float32") && stderr.contains("bfloat16"), "{stderr}");

    copy_shipped(&["muon.json", "muon.safetensors"], &place.path(""));
    change_tensor(&place.path("muon.safetensors"), "case0/orthogonal", |bytes, shape| (vec![0; bytes.len()], shape));
    let Finished { code, stdout, stderr } = place.run(&["verify", "--golden", "."]);
    assert_eq!(code, Some(1));
    assert!(stdout.contains("case0 orthogonal: error ") && stdout.ends_with(" passed, 1 failed\n"), "{stdout}");
    assert!(stderr.starts_with("error: 1 golden values differ; hint: ") && stderr.lines().count() == 1, "{stderr}");
}

#[test]
fn folders_without_usable_goldens_are_refused() {
    let place = Place::new();
    let refused = |parts: &[&str]| place.assert_refused(&["verify", "--golden", "g"], parts);
    refused(&["g", "--golden"]);
    fs::create_dir(place.path("g")).unwrap();
    refused(&["no goldens", "--golden"]);
    place.assert_refused(&["verify", "--golden", "ci.toml"], &["ci.toml", "--golden"]);
    for (name, parts) in [("odd.json", "nothing was compared"), ("muon.json", "nothing to compare")] {
        fs::write(place.path("g").join(name), "{}").unwrap();
        fs::write(place.path("g/muon.safetensors"), b"\x02\0\0\0\0\0\0\0{}").unwrap();
        refused(&[parts]);
        fs::remove_file(place.path("g").join(name)).unwrap();
    }
    fs::write(place.path("g/run-x.json"), "{}").unwrap();
    refused(&["nothing was compared", "--corpus"]);
    place.assert_refused(&["verify", "--golden", "g", "--corpus", "nowhere"], &["run-x"]);
}

#[test]
fn goldens_of_a_wrong_form_are_refused() {
    let place = Place::new();
    fs::create_dir(place.path("g")).unwrap();
    let refused = |files: &[&str], damage: &dyn Fn(), parts: &[&str]| {
        copy_shipped(files, &place.path("g"));
        damage();
        place.assert_refused(&["verify", "--golden", "g"], parts);
        fs::remove_dir_all(place.path("g")).unwrap();
        fs::create_dir(place.path("g")).unwrap();
    };
    let tensors = |name: &str| place.path("g").join(format!("{name}.safetensors"));
    let muon = ["muon.json", "muon.safetensors"];
    refused(&["muon.json"], &|| {}, &["muon.safetensors", "cannot read"]);
    refused(&muon, &|| truncate(&tensors("muon")), &["muon.safetensors", "whole safetensors file"]);
    refused(&muon, &|| edit_json(&place.path("g/muon.json"), |json| json["case9"] = json["case0"].clone()), &["case9"]);
    refused(
        &muon,
        &|| edit_json(&place.path("g/muon.json"), |json| json["case0"]["ns_steps"] = json!(7)),
        &["case0", "7"],
    );
    refused(&muon, &|| edit_json(&place.path("g/muon.json"), |json| json["case0"] = json!([])), &["muon.json"]);
    for (tensor, shape) in
        [("params", vec![256, 64]), ("grads", vec![2, 128, 64]), ("second_momentum", vec![2, 128, 1])]
    {
        let name = format!("case0/{tensor}");
        let damage = || change_tensor(&tensors("muon"), &name, |bytes, _| (bytes, shape.clone()));
        refused(&muon, &damage, &["muon", &name, "shape"]);
    }
    let cut = || change_tensor(&tensors("muon"), "case0/orthogonal", |bytes, _| (bytes[..256].to_vec(), vec![64]));
    refused(&muon, &cut, &["[64]", "[4, 64, 64]"]);

    let model = ["model-gqa.json", "model-gqa.safetensors"];
    for (key, value) in [
        ("n_head", 0usize),
        ("n_head", 3),
        ("n_kv_head", 0),
        ("n_layer", 0),
        ("n_layer", 1 << 40),
        ("n_embd", 1 << 40),
        ("vocab_size", 1 << 60),
        ("vocab_size", 299),
        ("sequence_len", 0),
        ("sequence_len", 95),
        ("sequence_len", 1 << 60),
    ] {
        let damage = || edit_json(&place.path("g/model-gqa.json"), |json| json["config"][key] = json!(value));
        refused(&model, &damage, &["model-gqa"]);
    }
    let windows = || edit_json(&place.path("g/model-gqa.json"), |json| json["config"]["window_pattern"] = json!("SX"));
    refused(&model, &windows, &["window_pattern"]);
    for (tensor, shape) in
        [("input", vec![192]), ("input", vec![4, 48]), ("target", vec![1, 192]), ("target", vec![192, 1, 1])]
    {
        let damage = || change_tensor(&tensors("model-gqa"), tensor, |bytes, _| (bytes, shape.clone()));
        refused(&model, &damage, &["model-gqa", tensor]);
    }
    for (tensor, id) in [("input", 300i32), ("target", -1), ("input", i32::MAX)] {
        let damage = || {
            change_tensor(&tensors("model-gqa"), tensor, |mut bytes, shape| {
                bytes[..4].copy_from_slice(&id.to_le_bytes());
                (bytes, shape)
            })
        };
        refused(&model, &damage, &["model-gqa", tensor, &id.to_string()]);
    }
    let empty = || change_tensor(&tensors("model-gqa"), "input", |_, _| (Vec::new(), vec![0, 96]));
    refused(&model, &empty, &["'input' is empty"]);

    let trajectory = ["model-gqa.json", "model-gqa.safetensors", "model-gqa-optim.safetensors"];
    for shape in [vec![8, 1, 4, 97], vec![4, 2, 4, 97], vec![8, 2, 194], vec![8, 4, 1, 97]] {
        let damage = || change_tensor(&tensors("model-gqa-optim"), "tokens", |bytes, _| (bytes, shape.clone()));
        refused(&trajectory, &damage, &["model-gqa", "tokens"]);
    }
}

#[test]
fn goldens_that_need_a_corpus_are_checked_before_they_are_computed() {
    let place = Place::new();
    place.shards("corpus");
    fs::create_dir(place.path("g")).unwrap();
    let ranks: String = (0..=255u8).map(|byte| format!("{} {byte}\n", base64(byte))).collect();
    fs::write(place.path("g/tokenizer-b.tiktoken"), ranks).unwrap();
    let usual = json!({"case": {
        "tokenizer": "tokenizer-b", "split": "train", "batch": 2, "seq_len": 7, "batches": 3, "buffer_size": 10, "tokenizer_batch": 4
    }});
    let rows: Vec<u8> = (0..48).flat_map(|_| 1i32.to_le_bytes()).collect();
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::I32, vec![6, 8], &rows).unwrap();
    fs::write(place.path("g/packing-b.safetensors"), safetensors::serialize([("case", view)], None).unwrap()).unwrap();
    let verify = ["verify", "--golden", "g", "--corpus", "corpus"];
    fs::write(place.path("g/packing-b.json"), usual.to_string()).unwrap();
    let Finished { stdout, .. } = place.run(&verify);
    assert!(
        stdout.contains("packing-b: case differing tokens: error ") && stdout.contains("0 passed, 1 failed"),
        "{stdout}"
    );
    for (key, value) in [
        ("batch", json!(0)),
        ("batch", json!(1u64 << 62)),
        ("batches", json!(u64::MAX)),
        ("seq_len", json!(0)),
        ("seq_len", json!(u64::MAX)),
        ("seq_len", json!(6)),
        ("tokenizer_batch", json!(0)),
        ("buffer_size", json!(0)),
        ("split", json!("test")),
        ("tokenizer", json!("tokenizer-none")),
        ("batch", json!(-1)),
    ] {
        let mut changed = usual.clone();
        changed["case"][key] = value;
        fs::write(place.path("g/packing-b.json"), changed.to_string()).unwrap();
        place.assert_refused(&verify, &["packing-b"]);
    }
    fs::remove_file(place.path("g/packing-b.json")).unwrap();
    let tokenizer = json!({
        "trained_on": {"split": "train", "max_chars": 1000, "doc_cap_chars": 100}, "vocab_size": 1u64 << 40, "bos_id": 1,
        "token_bytes_true": [], "token_bytes_upstream": [], "encode_cases": [], "pattern": "", "special_tokens": []
    });
    fs::write(place.path("g/tokenizer-b.json"), tokenizer.to_string()).unwrap();
    place.assert_refused(&verify, &["tokenizer-b", "--vocab-size 1099511627776"]);
    place.assert_refused(&["verify", "--golden", "g", "--corpus", "g"], &["tokenizer-b"]);
}

/// One byte in base64.
fn base64(byte: u8) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digit = |bits: u8| char::from(DIGITS[usize::from(bits)]);
    format!("{}{}==", digit(byte >> 2), digit((byte & 3) << 4))
}
