//! What the loop refuses, and that nothing is changed by it.

use super::{GAIN, LOSS, Study, wait_for};
use std::fs;
use std::process::Stdio;

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
