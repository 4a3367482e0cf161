//! A folder to run the program in, and what the program leaves there.

use arrow_array::{ArrayRef, RecordBatch, StringArray};
use parquet::arrow::ArrowWriter;
use serde_json::Value;
use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use tempfile::TempDir;

/// A training of three steps, on the configuration that every place has.
pub const SMOKE: [&str; 7] = ["train", "--config", "ci.toml", "--steps", "3", "--eval-tokens", "2048"];

/// A folder to run the program in, with a cache of its own.
pub struct Place {
    folder: TempDir,
}

impl Place {
    /// A folder with `ci.toml` in it and nothing prepared.
    pub fn new() -> Self {
        let place = Self { folder: tempfile::tempdir().unwrap() };
        fs::write(place.path("ci.toml"), include_str!("../configs/ci.toml")).unwrap();
        place
    }

    /// A folder in which the built-in data set is prepared.
    pub fn with_tales() -> Self {
        let place = Self::new();
        place.ok(&["prepare", "--dataset", "tales"]);
        place
    }

    /// A folder in which [`SMOKE`] was run, and its run.
    pub fn with_run() -> (Self, Finished, PathBuf) {
        let place = Self::with_tales();
        let trained = place.ok(&SMOKE);
        let run = place.path(trained.value("run_dir"));
        (place, trained, run)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_autoresearch"));
        command.args(arguments).current_dir(self.folder.path());
        command.env("AUTORESEARCH_CACHE_DIR", self.path("cache")).env_remove("RUST_BACKTRACE");
        please_rocm(&mut command);
        command
    }

    #[track_caller]
    pub fn run(&self, arguments: &[&str]) -> Finished {
        Finished::of(self.command(arguments))
    }

    #[track_caller]
    pub fn ok(&self, arguments: &[&str]) -> Finished {
        self.run(arguments).ok()
    }

    #[track_caller]
    pub fn assert_refused(&self, arguments: &[&str], parts: &[&str]) {
        self.run(arguments).assert_refused(parts);
    }

    /// Writes `name` as ci.toml with some lines replaced.
    pub fn config(&self, name: &str, changes: &[(&str, &str)]) {
        let mut text = include_str!("../configs/ci.toml").to_owned();
        for (key, value) in changes {
            let line = text.lines().find(|line| line.starts_with(key)).unwrap().to_owned();
            text = text.replace(&line, &format!("{key} = {value}"));
        }
        fs::write(self.path(name), text).unwrap();
    }

    /// A folder of text files.
    pub fn texts(&self, name: &str, texts: impl IntoIterator<Item = String>) {
        fs::create_dir(self.path(name)).unwrap();
        for (number, text) in texts.into_iter().enumerate() {
            fs::write(self.path(name).join(format!("{number:03}.txt")), text).unwrap();
        }
    }

    /// Two shards of text, the second of which is validation.
    pub fn shards(&self, name: &str) {
        fs::create_dir(self.path(name)).unwrap();
        write_shard(&self.path(name).join("a.parquet"), "text", &stories(0..300));
        write_shard(&self.path(name).join("b.parquet"), "text", &stories(300..400));
    }
}

/// Sets what ROCm needs: without it the program says on standard error that it corrects it.
pub fn please_rocm(command: &mut Command) {
    command.env("TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL", "1");
    for name in ["PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"] {
        command.env_remove(name);
    }
}

/// What a finished command left.
#[derive(Debug)]
pub struct Finished {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
    arguments: String,
}

impl Finished {
    /// Runs `command` to its end, which is no panic.
    #[track_caller]
    pub fn of(mut command: Command) -> Self {
        let output = command.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let (stdout, stderr) = (text(output.stdout), text(output.stderr));
        let arguments = command.get_args().map(|argument| argument.to_string_lossy()).collect::<Vec<_>>().join(" ");
        assert!(!stderr.contains("panicked"), "{arguments}: {stderr}");
        Self { code: output.status.code(), stdout, stderr, arguments }
    }

    #[track_caller]
    pub fn ok(self) -> Self {
        let Self { code, stdout, stderr, arguments } = &self;
        assert_eq!(*code, Some(0), "{arguments}: {stdout}{stderr}");
        self
    }

    /// The value of `key` in the block that the command printed.
    #[track_caller]
    pub fn value(&self, key: &str) -> &str {
        let line = self.stdout.lines().rfind(|line| line.split_once(':').is_some_and(|(found, _)| found == key));
        line.unwrap_or_else(|| panic!("no {key} in {}", self.stdout))[key.len() + 1..].trim()
    }

    /// The message with which it was refused: one line that ends with a hint, after notes.
    #[track_caller]
    pub fn refusal(&self) -> &str {
        let Self { code, stdout, stderr, arguments } = self;
        assert!(matches!(code, Some(1 | 2)), "{arguments}: {code:?} {stdout}{stderr}");
        let mut lines = stderr.lines().filter(|line| !line.starts_with("note: "));
        let message = lines.next().and_then(|line| line.strip_prefix("error: "));
        let message = message.unwrap_or_else(|| panic!("{arguments}: {stderr:?}"));
        assert!(lines.next().is_none() && stderr.ends_with('\n'), "{arguments}: {stderr:?}");
        assert!(!message.contains(char::is_control), "{arguments}: {message:?}");
        let (_, hint) = message.split_once("; hint: ").unwrap_or_else(|| panic!("{arguments}: no hint in {message}"));
        assert!(!hint.contains("hint: ") && !hint.contains("os error") && !hint.is_empty(), "{arguments}: {message}");
        message
    }

    #[track_caller]
    pub fn assert_refused(&self, parts: &[&str]) {
        let message = self.refusal();
        for part in parts {
            assert!(message.contains(part), "{}: expected {part:?} in {message}", self.arguments);
        }
    }
}

/// Trains by the command `train`, whose run is `run`, evaluates on the CPU what was trained, and lets it write. Returns what
/// the training left.
#[cfg(any(feature = "tch", feature = "wgpu"))]
#[track_caller]
pub fn goes_from_training_to_text(train: &[&str], ok: impl Fn(&[&str]) -> Finished) -> Finished {
    let trained = ok(train);
    let on_cpu = ok(&["eval", "--checkpoint", "run", "--device", "cpu", "--eval-tokens", "2048"]);
    let [there, here] = [&trained, &on_cpu].map(|finished| finished.value("val_bpb").parse::<f64>().unwrap());
    assert!((there - here).abs() < 1e-4, "{there} {here}");
    let written =
        ok(&["sample", "--checkpoint", "run", "--prompt", "Once", "--tokens", "3", "--temperature", "0"]).stdout;
    assert!(written.starts_with("Once") && written.trim_end() != "Once", "{written}");
    trained
}

pub fn stories(numbers: Range<usize>) -> Vec<String> {
    let story =
        |number: usize| format!("The fox number {number} saw {} hens. ", number * 7 % 31).repeat(5 + number % 5);
    numbers.map(story).collect()
}

pub fn write_shard(path: &Path, column: &str, texts: &[String]) {
    let texts: ArrayRef = Arc::new(StringArray::from_iter_values(texts));
    let batch = RecordBatch::try_from_iter([(column, texts)]).unwrap();
    let mut writer = ArrowWriter::try_new(File::create(path).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

pub fn read_json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())))
        .unwrap()
}

pub fn edit_json(path: &Path, edit: impl FnOnce(&mut Value)) {
    let mut value = read_json(path);
    edit(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

pub fn truncate(path: &Path) {
    let bytes = fs::read(path).unwrap();
    fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
}

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}
