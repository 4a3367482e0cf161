//! The built program as a user meets it: what it prints and what it leaves.

use crate::place::{Finished, Place, SMOKE, read_json, stories, text};
use autoresearch::data::command::PROGRAM;
use autoresearch::run::protocol::{Budget, Protocol};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

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
    let run = || place.ok(&SMOKE);
    let together = thread::scope(|scope| [scope.spawn(run), scope.spawn(run)].map(|run| run.join().unwrap()));
    for trained in together {
        assert_eq!(trained.value("val_bpb"), first.value("val_bpb"));
        assert_ne!(trained.value("run_dir"), first.value("run_dir"));
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
        thread::sleep(Duration::from_millis(milliseconds));
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
    let refused = place.run(&train);
    assert_eq!(kind(), "data");
    assert_eq!(read_json(&place.path("run/failure.json"))["message"], refused.refusal());

    place.texts("short", (0..8).map(|number| format!("a few words {number}")));
    place.ok(&["prepare", "--dataset", "short", "--vocab-size", "262"]);
    place.assert_refused(&[&smoke_in("run")[..], &["--dataset", "short", "--vocab-size", "262"]].concat(), &["short"]);
    assert_eq!(kind(), "data");
    place.assert_refused(&["train", "--config", "missing.toml", "--run-dir", "run"], &["missing.toml"]);
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
    let ended = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if ended.elapsed().as_secs() > 60 {
            child.kill().unwrap();
            panic!("it goes on");
        }
        thread::sleep(Duration::from_millis(10));
    }
    assert!(!place.path("run/summary.json").exists());
    // Without the flag it does not matter.
    assert_eq!(place.command(&SMOKE).stdin(Stdio::null()).output().unwrap().status.code(), Some(0));
}

#[test]
fn a_run_that_exceeds_its_kill_limit_is_ended_with_fail() {
    let place = Place::with_tales();
    let endless = ["train", "--config", "ci.toml", "--steps", "100000000", "--time-budget", "0.5", "--kill-limit", "1"];
    let Finished { code, stdout, stderr, .. } = place.run(&endless);
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
