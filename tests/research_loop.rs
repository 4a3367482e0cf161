//! The research loop from outside: a recorded loop with a scripted agent, kills at every step, and what it refuses.
//!
//! Experiments here have a number of steps instead of a time, so that their results do not depend on how busy the machine is.

use crate::checkout::Checkout;
use crate::place::Finished;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
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
}

/// Edits that the tests know the outcome of.
const GAIN: (&str, &str) = ("total_batch_size: 1 << 8", "total_batch_size: 1 << 9");
const LOSS: (&str, &str) = ("matrix_lr: 0.04", "matrix_lr: 0.8");

/// An agent that does something else each time: the last lets the loop end.
const AGENT: &str = r#"
cat > prompt.txt
round=$(($(cat ../round 2>/dev/null || echo 0) + 1))
echo $round > ../round
cp prompt.txt ../prompt-$round.txt && rm prompt.txt
change() { sed -i "0,/$1/s//$2/" src/model.rs; }
case $round in
1) change 'total_batch_size: 1 << 8' 'total_batch_size: 1 << 9'; echo 'EXPERIMENT: twice the batch';;
2) change 'matrix_lr: 0.04' 'matrix_lr: 0.8'; echo 'EXPERIMENT: huge steps';;
3) change 'const SOFTCAP: f64 = 15.0;' 'const SOFTCAP: f64 = "fifteen";'; echo 'EXPERIMENT: no number';;
4) change 'matrix_lr: 0.04' 'matrix_lr: f64::NAN'; echo 'EXPERIMENT: no number either';;
5) change 'let \[_, t\] = tokens.dims();' 'let [_, t] = tokens.dims(); while t > 0 {}'; echo 'EXPERIMENT: a hang';;
6) echo '// shrunk' >> src/eval.rs; echo 'EXPERIMENT: out of bounds';;
7) git restore src/eval.rs; exit 3;;
8) sleep 1000;;
9) echo nothing to do;;
10) change 'tokens: Tensor<2, Int>) -> Tensor<3> {' 'tokens: Tensor<2, Int>) -> Tensor<3> { let tokens = Tensor::cat(vec![tokens.clone().slice([0..tokens.dims()[0], 1..tokens.dims()[1]]), tokens.clone().slice([0..tokens.dims()[0], 0..1])], 1);'
    echo 'EXPERIMENT: looks ahead';;
*) exit 4;;
esac
"#;

#[test]
fn a_loop_with_an_agent_that_does_everything_wrong_keeps_the_one_gain() {
    let study = Study::start("loop", "40");
    fs::write(study.path("notes.txt"), "the user's own").unwrap();
    fs::write(study.checkout.path().parent().unwrap().join("agent.sh"), AGENT).unwrap();
    fs::remove_file(study.checkout.path().parent().unwrap().join("round")).ok();
    let start = study.head();

    let looped = study.ok(&["loop", "--agent", "sh ../agent.sh", "--experiments", "6", "--agent-limit", "0.25"]);

    let statuses: Vec<String> = study.rows().into_iter().map(|(status, words)| format!("{status}: {words}")).collect();
    assert_eq!(
        statuses,
        [
            "keep: baseline",
            "keep: twice the batch",
            "discard: huge steps",
            "crash: no number",
            "crash: no number either",
            "crash: a hang",
            "crash: looks ahead"
        ],
        "{}",
        looped.stdout
    );
    let records = study.records();
    let kinds: Vec<&str> = records.iter().filter_map(|record| record["crash"]["kind"].as_str()).collect();
    assert_eq!(kinds, ["build", "nan", "timeout", "dishonest"]);
    let excerpt = records[3]["crash"]["excerpt"].as_str().unwrap();
    assert!(excerpt.contains("mismatched types") && excerpt.lines().count() <= 20, "{excerpt}");
    let table = study.read("results.tsv");
    assert!(table.lines().filter(|row| row.contains("\tcrash\t")).all(|row| row.contains("\t0.000000\t0.0\t")));

    // A build takes the dependencies as the user's own builds left them.
    let log = study.read("runs/loop-001/build.log");
    let compiled: Vec<&str> = log.lines().filter_map(|line| line.trim_start().strip_prefix("Compiling ")).collect();
    assert!(matches!(compiled[..], [one] if one.starts_with("autoresearch ")), "{log}");

    // The branch is at the gain, everything else is reachable and the work tree is clean.
    assert_eq!(records[1]["commit"], study.head());
    assert_eq!(records[1]["parent"], start);
    assert_eq!(study.checkout.git(&["status", "--porcelain"]), "?? notes.txt");
    assert_eq!(study.read("notes.txt"), "the user's own");
    for record in &records {
        let reference = format!("refs/autoresearch/loop/{}", record["number"]);
        assert_eq!(record["commit"], study.checkout.git(&["rev-parse", &reference]));
        let patch = fs::read_to_string(record["patch"].as_str().unwrap()).unwrap();
        assert_eq!(patch.is_empty(), record["number"] == 0, "{patch}");
    }
    assert_eq!(study.checkout.git(&["rev-list", "--count", "main..HEAD"]), "1");

    // What the agent was told, and what the loop wrote of its rounds.
    let prompt = |round: usize| fs::read_to_string(study.path(&format!("../prompt-{round}.txt"))).unwrap();
    assert!(prompt(2).contains("loop-001: keep (gain)"), "{}", prompt(2));
    assert!(prompt(4).contains("| error[E0308]: mismatched types"), "{}", prompt(4));
    assert!(prompt(7).contains("src/eval.rs") && prompt(7).contains("git restore"), "{}", prompt(7));
    assert!(prompt(8).contains("ended with code 3"), "{}", prompt(8));
    assert!(prompt(9).contains("took longer than"), "{}", prompt(9));
    assert!(prompt(10).contains("expected an edit"), "{}", prompt(10));
    let rounds = study.read("runs/loop-loop.jsonl");
    assert_eq!(rounds.lines().count(), 10, "{rounds}");

    // A new loop may begin; the ledger as a table; a comparison.
    assert!(!study.path(".git/autoresearch/branches/loop/loop.json").exists());
    let log = study.ok(&["log", "--best"]).stdout;
    assert!(log.lines().nth(1).unwrap().starts_with("loop-001"), "{log}");
    let comparison = study.ok(&["compare", "0", "loop-001", "--json"]).stdout;
    let comparison: Value = serde_json::from_str(&comparison).unwrap();
    assert!(comparison["sides"][1]["difference"].as_f64().unwrap() < 0.0);
    study.assert_refused(&["compare", "0", "3"], &["loop-003", "a crash"]);
    let status: Value = serde_json::from_str(&study.ok(&["status", "--json"]).stdout).unwrap();
    assert_eq!((status["kept"].clone(), status["crashed"].clone()), (2.into(), 4.into()));

    // What was taken back stays reachable, and what was discarded can be measured again.
    study.ok(&["undo"]);
    assert_eq!(study.head(), start);
    assert_eq!(study.checkout.git(&["status", "--porcelain"]), "?? notes.txt");
    assert_eq!(study.rows()[1].0, "undone");
    study.assert_refused(&["undo"], &["found the branch at its start"]);
    let again = study.ok(&["retry", "1"]).stdout;
    assert!(again.starts_with("experiment loop-007: keep (gain)\ntried:   retry: twice the batch\n"), "{again}");
    assert!(again.lines().count() <= 15, "{again}");
    assert_eq!(records[1]["commit"], study.head());
    assert_eq!(study.records().last().unwrap()["val_bpb"], records[1]["val_bpb"]);
}

impl Study {
    /// Starts an experiment with the edit [`LOSS`], which takes `number` and will be discarded.
    fn begin(&self, number: usize) -> Child {
        self.edit("src/model.rs", LOSS.0, LOSS.1);
        let message = format!("killed {number}");
        let mut command = self.command(&["experiment", "-m", &message]);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }

    /// Kills `child` with SIGKILL as soon as `when` holds.
    #[track_caller]
    fn kill_when(&self, mut child: Child, what: &str, when: impl Fn() -> bool) {
        wait_for(&mut child, what, when);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Resumes, and makes sure that the experiment `number` is in the ledger once, discarded, and everything as before it.
    #[track_caller]
    fn resume(&self, number: usize, before: &str) {
        self.assert_refused(&["experiment", "-m", "another"], &[&format!("experiment {number}"), "interrupted"]);
        let resumed = self.ok(&["experiment", "--resume"]);
        assert!(
            resumed.stdout.starts_with(&format!("experiment kill-{number:03}: discard (not better)\n")),
            "{resumed:?}"
        );
        assert_eq!(self.head(), before);
        assert_eq!(self.checkout.git(&["status", "--porcelain"]), "?? notes.txt");
        assert_eq!(self.read("notes.txt"), "the user's own");
        let expected: Vec<String> = (1..=number).map(|number| format!("killed {number}")).collect();
        let described = self.rows().into_iter().skip(1).map(|(_, words)| words).collect::<Vec<_>>();
        assert_eq!(described, expected);
        let numbers: Vec<Value> = self.records().iter().map(|record| record["number"].clone()).collect();
        assert_eq!(numbers, (0..=number).map(Value::from).collect::<Vec<_>>());
        let nothing = self.run(&["experiment", "--resume"]);
        assert!(nothing.stderr.contains("found none"), "{nothing:?}");
    }

    /// Writes the hook `name`; it runs `script` in `sh`, with a function `wait` that says `../waits` and waits for `../go`.
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

#[test]
fn an_experiment_that_is_killed_anywhere_is_finished_once() {
    let study = Study::start("kill", "60");
    fs::write(study.path("notes.txt"), "the user's own").unwrap();
    let before = study.head();
    for name in ["waits", "go"] {
        fs::remove_file(study.path("..").join(name)).ok();
    }
    let waits = || study.path("../waits").exists();
    let remove_hook = |name: &str| fs::remove_file(study.path(".git/hooks").join(name)).unwrap();

    // While the commit is made, which git then does and does not finish.
    for (number, code) in [(1, "0"), (2, "1")] {
        study.hook("pre-commit", &format!("wait_for_test; exit {code}"));
        study.kill_when(study.begin(number), "the commit", waits);
        study.let_hook_go();
        assert_eq!(study.head() == before, code == "1");
        remove_hook("pre-commit");
        study.resume(number, &before);
    }

    // While it builds.
    let journal = |text: &str| {
        fs::read_to_string(study.path(".git/autoresearch/branches/kill/journal.json"))
            .is_ok_and(|journal| journal.contains(text))
    };
    study.kill_when(study.begin(3), "the build", || {
        journal("\"measure\"") && study.path("runs/kill-003/build.log").exists()
    });
    study.resume(3, &before);

    // While it trains and evaluates: the training ends with its parent.
    for (number, phase) in [(4, "training"), (5, "evaluation")] {
        let run = format!("runs/kill-{number:03}");
        study.kill_when(study.begin(number), phase, || study.phase(&run) == phase);
        study.resume(number, &before);
    }

    // Before the ledger is written: what was measured counts, and is not measured again.
    let mut child = study.begin(6);
    let ledger = study.path("results.jsonl");
    wait_for(&mut child, "training", || study.phase("runs/kill-006") == "training");
    // Reading it waits for ever.
    fs::rename(&ledger, study.path("../saved")).unwrap();
    assert!(Command::new("mkfifo").arg(&ledger).status().unwrap().success());
    study.kill_when(child, "the evaluation's end", || study.phase("runs/kill-006") == "done");
    fs::rename(study.path("../saved"), &ledger).unwrap();
    let metrics = study.path("runs/kill-006/metrics.jsonl");
    let written = fs::metadata(&metrics).unwrap().modified().unwrap();
    study.resume(6, &before);
    assert_eq!(fs::metadata(&metrics).unwrap().modified().unwrap(), written);
    // What is not kept leaves no weights.
    assert!(!study.path("runs/kill-006/model.safetensors").exists());
    assert!(study.path("runs/kill-000/model.safetensors").exists());

    // After it is written, before the branch moves back; and after that, before the files are restored.
    for (number, state) in [(7, "prepared"), (8, "committed")] {
        let moves_back =
            format!("[ $1 = {state} ] && grep -q ' {before} refs/heads/autoresearch/kill' && wait_for_test; exit 0");
        study.hook("reference-transaction", &moves_back);
        study.kill_when(study.begin(number), "the move of the branch", waits);
        remove_hook("reference-transaction");
        assert_eq!(study.rows().len(), number + 1);
        study.let_hook_go();
        assert_ne!(study.checkout.git(&["status", "--porcelain"]), "");
        study.resume(number, &before);
    }

    // Taken back instead: the edit is in the work tree as before, nothing is recorded.
    study.kill_when(study.begin(9), "training", || study.phase("runs/kill-009") == "training");
    study.ok(&["undo"]);
    assert_eq!(study.head(), before);
    assert!(study.read("src/model.rs").contains(LOSS.1));
    assert_eq!(study.checkout.git(&["diff", "--cached", "--name-only"]), "");
    assert_eq!(study.rows().len(), 9);

    // An edit that comes while another one is measured is left alone.
    study.checkout.git(&["restore", "src/model.rs"]);
    fs::remove_dir_all(study.path("runs/kill-009")).unwrap();
    let mut child = study.begin(9);
    wait_for(&mut child, "training", || study.phase("runs/kill-009") == "training");
    study.edit("src/model.rs", "matrix_lr: 0.8", "matrix_lr: 0.03");
    assert!(child.wait().unwrap().success());
    assert_eq!(study.head(), before);
    assert!(study.read("src/model.rs").contains("matrix_lr: 0.03"));
    assert_eq!(study.rows().last().unwrap().0, "discard");
}

#[test]
fn what_speaks_against_an_experiment_is_said_before_anything_is_done() {
    let study = Study::prepared();
    study.assert_refused(&["experiment", "-m", "x"], &["autoresearch/<tag>", "found main", "start"]);
    study.checkout.git(&["checkout", "--quiet", "--detach"]);
    study.assert_refused(&["status"], &["detached HEAD"]);
    study.checkout.git(&["switch", "--quiet", "main"]);
    study.assert_refused(&["start", "a/b", "--config", "configs/ci.toml"], &["tag", "a/b"]);
    study.edit("src/eval.rs", "//!", "//! changed");
    study.assert_refused(&["start", "x", "--config", "configs/ci.toml"], &["uncommitted", "src/eval.rs"]);
    study.checkout.git(&["restore", "src/eval.rs"]);
    study.assert_refused(&["start", "x", "--config", "configs/ci.toml", "--dataset", "nowhere"], &["nowhere"]);

    let study = {
        drop(study);
        Study::start("refuse", "6")
    };
    study.assert_refused(&["experiment", "-m", "x"], &["expected an edit"]);
    study.edit("src/model.rs", GAIN.0, GAIN.1);
    study.assert_refused(&["experiment", "-m", " \t"], &["--message"]);
    study.assert_refused(&["noise", "--runs", "2"], &["without an edit"]);
    study.assert_refused(&["retry"], &["without an edit"]);
    // Files that are none of an experiment's, in every way that git knows.
    study.edit("src/eval.rs", "//!", "//! changed");
    study.assert_refused(&["experiment", "-m", "x"], &["src/eval.rs", "git restore"]);
    study.checkout.git(&["add", "src/eval.rs"]);
    study.assert_refused(&["experiment", "-m", "x"], &["src/eval.rs"]);
    study.checkout.git(&["commit", "--quiet", "-m", "sneaky"]);
    study.assert_refused(&["experiment", "-m", "x"], &["src/eval.rs"]);
    study.checkout.git(&["restore", "--source=HEAD^", "--staged", "--worktree", "src/eval.rs"]);
    study.assert_refused(&["experiment", "-m", "x"], &["src/eval.rs", "git reset --soft"]);
    study.checkout.git(&["reset", "--quiet", "--soft", "HEAD^"]);
    study.checkout.git(&["update-index", "--assume-unchanged", "src/eval.rs"]);
    study.edit("src/eval.rs", "//!", "//! changed");
    study.assert_refused(&["experiment", "-m", "x"], &["src/eval.rs", "--no-assume-unchanged"]);
    study.checkout.git(&["update-index", "--no-assume-unchanged", "src/eval.rs"]);
    study.checkout.git(&["restore", "src/eval.rs"]);
    // What reaches beyond the model.
    study.edit("src/model.rs", "use crate::ops;", "use crate::ops;\nuse std::time::Instant as _;");
    study.assert_refused(&["experiment", "-m", "x"], &["src/model.rs:", "std::time"]);
    study.edit("src/model.rs", "\nuse std::time::Instant as _;", "");

    // A link, whose target is in no commit.
    let model = study.path("src/model.rs");
    fs::rename(&model, study.path("../elsewhere.rs")).unwrap();
    std::os::unix::fs::symlink("../../elsewhere.rs", &model).unwrap();
    study.assert_refused(&["experiment", "-m", "x"], &["src/model.rs", "expected a file"]);
    fs::rename(study.path("../elsewhere.rs"), &model).unwrap();

    // A hook that refuses leaves the edit; one that hangs on is not waited for twice.
    study.hook("pre-commit", "echo not today >&2; exit 1");
    study.assert_refused(&["experiment", "-m", "x"], &["not today"]);
    // One that changes what is measured.
    study.hook("pre-commit", "echo '// formatted' >> src/model.rs");
    let kept = study.checkout.git(&["rev-parse", "refs/autoresearch/refuse/kept"]);
    let refused = study.run(&["experiment", "-m", "x"]);
    assert!(refused.stderr.contains("a hook of this repository"), "{refused:?}");
    assert_eq!(study.head(), kept);
    // One that commits more.
    study.hook("pre-commit", "echo '// more' >> src/eval.rs; git add src/eval.rs");
    let refused = study.run(&["experiment", "-m", "x"]);
    assert!(
        refused.stderr.contains("src/eval.rs: expected the commit to have the edit and nothing else"),
        "{refused:?}"
    );
    assert_eq!(study.head(), kept);
    study.checkout.git(&["restore", "--staged", "--worktree", "src/eval.rs"]);
    study.hook("pre-commit", "wait_for_test");
    fs::remove_file(study.path("../waits")).ok();

    // While one experiment has the device and the work tree, no other begins; looking is possible.
    let mut child = study.command(&["experiment", "-m", "first"]).stdout(Stdio::null()).spawn().unwrap();
    wait_for(&mut child, "the commit", || study.path("../waits").exists());
    let second = study.run(&["experiment", "-m", "second"]);
    assert!(second.stderr.contains("taken by process"), "{second:?}");
    assert!(study.ok(&["status"]).stdout.contains("running:     refuse-001"));
    study.let_hook_go();
    assert!(child.wait().unwrap().success());
    assert_eq!(study.rows()[1], ("keep".to_owned(), "first".to_owned()));

    // Decisions go by git's folder: what cleans the work tree takes nothing from them.
    fs::remove_file(study.path(".git/hooks/pre-commit")).unwrap();
    fs::remove_file(study.path("results.jsonl")).unwrap();
    fs::remove_file(study.path("results.tsv")).unwrap();
    fs::remove_dir_all(study.path("runs")).unwrap();
    study.edit("src/model.rs", LOSS.0, LOSS.1);
    let worse = study.ok(&["experiment", "-m", "-5 % and worse"]).stdout;
    assert!(worse.starts_with("experiment refuse-002: discard (not better)\n"), "{worse}");
    assert_eq!(study.rows(), [("discard".to_owned(), "-5 % and worse".to_owned())]);
    study.checkout.git(&["switch", "--quiet", "main"]);
    study.checkout.git(&["branch", "--quiet", "-D", "autoresearch/refuse"]);
    study.assert_refused(&["start", "refuse", "--config", "configs/ci.toml"], &["never used"]);
    fs::write(study.path("autoresearch"), "the user's own").unwrap();
    study.assert_refused(&["start", "other", "--config", "configs/ci.toml"], &["autoresearch: expected a free place"]);
}

#[test]
fn a_full_disk_and_a_read_only_folder_lose_nothing() {
    let study = Study::prepared();
    let runs = study.path("../small");
    fs::create_dir_all(&runs).unwrap();
    let mount = |options: &str| {
        let mut command = Command::new("mount");
        command
            .args(["-t", "tmpfs", "-o", options, "tmpfs"])
            .arg(&runs)
            .output()
            .is_ok_and(|output| output.status.success())
    };
    if !mount("size=64m") {
        eprintln!("left out: a small disk cannot be mounted here (only root may)");
        return;
    }
    let _unmount = Unmount(&runs);
    let arguments = ["--config", "configs/ci.toml", "--device", "cpu", "--steps", "60", "--eval-tokens", "8192"];
    let place = ["--runs-dir", "../small", "--kill-limit", KILL_LIMIT];
    study.ok(&[&["start", "disk"][..], &arguments, &place].concat());
    let before = study.head();

    // Read-only.
    study.edit("src/model.rs", LOSS.0, LOSS.1);
    assert!(mount("remount,ro"));
    study.assert_refused(&["experiment", "-m", "x"], &["small", "may be written"]);
    assert!(mount("remount,rw,size=64m"));

    // Full before it begins.
    let fill = runs.join("fill");
    fs::write(&fill, vec![1; 50 << 20]).unwrap();
    study.assert_refused(&["experiment", "-m", "x"], &["MiB of free space"]);
    fs::remove_file(&fill).unwrap();

    // Full while it trains: a crash that says why, and the branch goes on.
    let mut child = study.command(&["experiment", "-m", "no room"]).stdout(Stdio::piped()).spawn().unwrap();
    wait_for(&mut child, "training", || study.phase("../small/disk-001") == "training");
    // Writes as much as there is room for.
    fs::write(&fill, vec![1; 64 << 20]).unwrap_err();
    let status = child.wait().unwrap();
    let finish = || {
        fs::remove_file(&fill).unwrap();
        study.run(&["experiment", "--resume"])
    };
    // Where not even the log can be written, the experiment is unfinished.
    if !status.success() {
        let resumed = finish();
        assert_eq!(resumed.code, Some(0), "{resumed:?}");
    }
    let rows = study.rows();
    assert_eq!((rows.len(), rows[1].1.as_str()), (2, "no room"));
    assert!(["crash", "discard"].contains(&rows[1].0.as_str()), "{rows:?}");
    assert_eq!(study.head(), before);
    assert_eq!(study.checkout.git(&["status", "--porcelain"]), "");
}

/// Unmounts in the end.
struct Unmount<'a>(&'a Path);

impl Drop for Unmount<'_> {
    fn drop(&mut self) {
        Command::new("umount").arg(self.0).status().ok();
    }
}
