//! `autoresearch verify`: what it prints, and goldens that it cannot compare with.

use crate::goldens::{change_tensor, copy_shipped};
use crate::place::{Finished, Place, edit_json, truncate};
use serde_json::json;
use std::fs;

#[test]
fn verify_prints_every_comparison_and_counts_them() {
    let place = Place::new();
    let verified = place.ok(&["verify"]);
    let lines: Vec<&str> = verified.stdout.lines().collect();
    let passed = lines.iter().filter(|line| line.ends_with(": pass")).count();
    assert_eq!(lines[lines.len() - 1], format!("{passed} passed, 0 failed"));
    assert_eq!(lines.len(), passed + 2);
    assert!(passed > 50);
    let Finished { code, stderr, .. } = place.run(&["verify", "--compute-type", "bf16"]);
    assert_eq!(code, Some(2));
    assert!(stderr.contains("float32") && stderr.contains("bfloat16"), "{stderr}");

    copy_shipped(&["muon.json", "muon.safetensors"], &place.path(""));
    change_tensor(&place.path("muon.safetensors"), "case0/orthogonal", |bytes, shape| (vec![0; bytes.len()], shape));
    let Finished { code, stdout, stderr, .. } = place.run(&["verify", "--golden", "."]);
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
