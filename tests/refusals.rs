//! How the built program refuses what it cannot do: in one line that names the thing and ends with a hint.

use crate::goldens::change_tensor;
use crate::place::{Finished, Place, SMOKE, edit_json, stories, text, truncate, write_shard};
use autoresearch::config::Profile;
use autoresearch::data::command::PROGRAM;
use autoresearch::model::Hyperparameters;
use autoresearch::train::BatchPlan;
use serde_json::json;
use std::fs;

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
    let features = [
        ("libtorch", cfg!(feature = "tch"), "tch"),
        ("wgpu", cfg!(feature = "wgpu"), if cfg!(target_vendor = "apple") { "wgpu" } else { "vulkan" }),
    ];
    for (device, compiled_in, feature) in features {
        if compiled_in {
            continue;
        }
        let flag = format!("--device {device}");
        for command in [&["train", "--config", "ci.toml", "--device", device][..], &["verify", "--device", device]] {
            place.assert_refused(command, &[&flag, &format!("--features {feature}")]);
        }
    }
    // Where there is one device, `auto` is refused as it is.
    let is_only_device = cfg!(feature = "flex") && !cfg!(any(feature = "tch", feature = "wgpu"));
    if is_only_device {
        for device in ["cpu", "auto"] {
            let verify = ["verify", "--device", device, "--compute-type", "bfloat16"];
            place.assert_refused(&verify, &["--compute-type bfloat16: expected float32 for --device cpu"]);
        }
    }
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
