//! The research loop from outside.
//!
//! Experiments here have a number of steps instead of a time, so that their results do not depend on how busy the machine is.

mod agent;
mod full_disk;
mod kills;
mod refusals;

use crate::checkout::Checkout;
use crate::place::Finished;
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

const PROGRAM: &str = env!("CARGO_BIN_EXE_autoresearch");
/// Longest that anything here is waited for.
const LONG: Duration = Duration::from_secs(600);
/// A hung training of these tests is ended after this time, in seconds; the others take a few, on a busy machine more.
const KILL_LIMIT: &str = "45";

/// A checkout with a branch for experiments and its baseline.
struct Study {
    checkout: Checkout,
}

/// Waits until `when` holds, which it must before `child` ends.
#[track_caller]
fn wait_for(child: &mut Child, what: &str, when: impl Fn() -> bool) {
    let begun = Instant::now();
    while !when() {
        assert!(begun.elapsed() < LONG, "{what} did not come");
        assert!(child.try_wait().unwrap().is_none(), "ended before {what}");
        sleep(Duration::from_millis(2));
    }
}

impl Study {
    /// The branch `autoresearch/<tag>` with a baseline of `steps`.
    fn start(tag: &str, steps: &str) -> Self {
        let study = Self::prepared();
        let arguments = ["--config", "configs/ci.toml", "--device", "cpu", "--eval-tokens", "8192"];
        let limits = ["--steps", steps, "--kill-limit", KILL_LIMIT];
        let started = study.ok(&[&["start", tag][..], &arguments, &limits].concat());
        assert!(started.stdout.contains(&format!("experiment {tag}-000: keep (baseline)")), "{}", started.stdout);
        study
    }

    /// A checkout with the data of configs/ci.toml.
    fn prepared() -> Self {
        let study = Self { checkout: Checkout::to_build() };
        study.ok(&["prepare", "--config", "configs/ci.toml"]);
        study
    }

    fn path(&self, name: &str) -> PathBuf {
        self.checkout.path().join(name)
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.checkout.command(PROGRAM);
        command.args(arguments);
        command
    }

    #[track_caller]
    fn run(&self, arguments: &[&str]) -> Finished {
        Finished::of(self.command(arguments))
    }

    #[track_caller]
    fn ok(&self, arguments: &[&str]) -> Finished {
        self.run(arguments).ok()
    }

    /// Makes sure that `arguments` are refused in one line with a hint that has `parts`, and that nothing changes.
    #[track_caller]
    fn assert_refused(&self, arguments: &[&str], parts: &[&str]) {
        let before = self.state();
        self.run(arguments).assert_refused(parts);
        assert_eq!(self.state(), before, "{arguments:?}");
    }

    /// What no command may change by the way: branch, commit, index and work tree, references, ledger.
    fn state(&self) -> Vec<String> {
        let git = |arguments: &[&str]| self.checkout.git(arguments);
        let model = self.read("src/model.rs");
        let ledger =
            ["results.tsv", "results.jsonl"].map(|name| fs::read_to_string(self.path(name)).unwrap_or_default());
        let head = fs::read_to_string(self.path(".git/HEAD")).unwrap();
        let references = git(&["for-each-ref", "--format=%(refname) %(objectname)"]);
        [vec![head, git(&["status", "--porcelain"]), references, model], ledger.to_vec()].concat()
    }

    fn head(&self) -> String {
        self.checkout.git(&["rev-parse", "HEAD"])
    }

    /// Replaces text in a file.
    fn edit(&self, name: &str, old: &str, new: &str) {
        let text = self.read(name);
        assert!(text.contains(old), "{name}: {old}");
        fs::write(self.path(name), text.replacen(old, new, 1)).unwrap();
    }

    /// The rows of results.tsv after its header: status and description.
    fn rows(&self) -> Vec<(String, String)> {
        let table = self.read("results.tsv");
        assert_eq!(table.lines().next(), Some("commit\tval_bpb\tmemory_gb\tstatus\tdescription"));
        let cells = table.lines().skip(1).map(|row| row.split('\t').map(str::to_owned).collect::<Vec<_>>());
        cells
            .map(|cells| {
                assert_eq!(cells.len(), 5, "{table}");
                (cells[3].clone(), cells[4].clone())
            })
            .collect()
    }

    /// The objects of results.jsonl.
    fn records(&self) -> Vec<Value> {
        self.read("results.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Writes the hook `name`; it runs `script` in `sh`, with a function `wait_for_test` that makes `../waits` and waits for
    /// `../go`.
    fn hook(&self, name: &str, script: &str) {
        let path = self.path(".git/hooks").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let wait = "wait_for_test() { touch ../waits; while [ ! -e ../go ]; do sleep 0.02; done; rm ../go; }";
        fs::write(&path, format!("#!/bin/sh\n{wait}\n{script}\n")).unwrap();
        let made = Command::new("chmod").arg("+x").arg(&path).status().unwrap();
        assert!(made.success());
    }

    /// Lets the hook that waits go on, and waits until its git has ended.
    fn let_hook_go(&self) {
        fs::remove_file(self.path("../waits")).unwrap();
        fs::write(self.path("../go"), "").unwrap();
        let begun = Instant::now();
        while self.path("../go").exists() || self.path(".git/index.lock").exists() {
            assert!(begun.elapsed() < LONG);
            sleep(Duration::from_millis(5));
        }
        // Git takes a moment to end.
        sleep(Duration::from_millis(300));
    }

    fn phase(&self, run: &str) -> String {
        let text = fs::read_to_string(self.path(run).join("phase.json")).unwrap_or_default();
        let phase: Value = serde_json::from_str(&text).unwrap_or_default();
        phase["phase"].as_str().unwrap_or_default().to_owned()
    }
}

/// Edits that the tests know the outcome of.
const GAIN: (&str, &str) = ("total_batch_size: 1 << 8", "total_batch_size: 1 << 9");
const LOSS: (&str, &str) = ("matrix_lr: 0.04", "matrix_lr: 0.8");
