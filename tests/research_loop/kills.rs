//! Kills at every step of an experiment.

use super::{LOSS, Study, wait_for};
use serde_json::Value;
use std::fs;
use std::process::{Child, Command, Stdio};

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
