//! The shipped edits of src/model.rs (`tests/edits/`): each applies, builds, trains, and changes the result.

use crate::checkout::Checkout;
use serde_json::Value;
use std::fs;
use std::path::Path;

/// Every edit, with what it multiplies the tokens of an optimizer step by, and the parameters it adds.
const EDITS: [(&str, f64, i64); 5] = [
    ("swiglu", 1.0, 2 * 1024),
    ("window_pattern", 1.0, 0),
    ("layer_scalar", 1.0, 2),
    ("tied_embeddings", 1.0, -1024 * 128),
    ("batch_size", 0.5, 0),
];

/// What a run on the smallest configuration left.
#[derive(Debug, PartialEq)]
struct Run {
    losses: Vec<f64>,
    val_bpb: f64,
    tokens_per_step: f64,
    parameters: i64,
}

/// Trains `program` in `checkout` for a few steps.
fn train(checkout: &Checkout, program: &Path) -> Run {
    let arguments = ["--config", "configs/ci.toml", "--device", "cpu", "--steps", "6", "--eval-tokens", "2048"];
    let output = checkout.command(program).arg("train").args(arguments).output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stdout}{stderr}");
    // A parameter that nothing uses is said in a warning.
    assert!(!stderr.contains("got no gradient"), "{stderr}");
    let folder = stdout.lines().find_map(|line| line.strip_prefix("run_dir:")).expect("a summary with run_dir").trim();
    let read = |name: &str| fs::read_to_string(checkout.path().join(folder).join(name)).unwrap();
    let summary: Value = serde_json::from_str(&read("summary.json")).unwrap();
    let number = |key: &str| summary[key].as_f64().unwrap();
    let metrics = read("metrics.jsonl");
    let losses = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64());
    Run {
        losses: losses.collect::<Option<_>>().unwrap(),
        val_bpb: number("val_bpb"),
        tokens_per_step: (number("total_tokens_M") * 1e6 / number("num_steps")).round(),
        parameters: (number("num_params_M") * 1e6).round() as i64,
    }
}

#[test]
fn each_shipped_edit_of_the_model_builds_trains_and_changes_the_result() {
    let checkout = Checkout::to_build();
    let as_it_is = Path::new(env!("CARGO_BIN_EXE_autoresearch"));
    let prepared = checkout.command(as_it_is).args(["prepare", "--config", "configs/ci.toml"]).output().unwrap();
    assert!(prepared.status.success(), "{}", String::from_utf8_lossy(&prepared.stderr));
    let unedited = train(&checkout, as_it_is);
    // What differs below is then the edit's doing.
    assert_eq!(train(&checkout, &checkout.build().unwrap()), unedited);

    let mut shipped: Vec<String> = fs::read_dir(checkout.path().join("tests/edits"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter_map(|name| Some(name.strip_suffix(".patch")?.to_owned()))
        .collect();
    shipped.sort();
    let mut known = EDITS.map(|(name, ..)| name);
    known.sort();
    assert_eq!(shipped, known);

    for (name, batch, more_parameters) in EDITS {
        checkout.git(&["apply", &format!("tests/edits/{name}.patch")]);
        assert_eq!(checkout.git(&["status", "--porcelain"]), "M src/model.rs", "{name}");
        let program = checkout.build().unwrap_or_else(|messages| panic!("{name}: {messages}"));
        let run = train(&checkout, &program);
        let falls = run.losses.last() < run.losses.first() && run.losses.iter().all(|loss| loss.is_finite());
        assert!(falls && run.val_bpb.is_finite(), "{name}: {run:?}");
        assert_ne!(run.losses, unedited.losses, "{name}");
        assert_ne!(run.val_bpb, unedited.val_bpb, "{name}");
        assert_eq!(run.tokens_per_step, batch * unedited.tokens_per_step, "{name}");
        assert_eq!(run.parameters, unedited.parameters + more_parameters, "{name}");
        checkout.git(&["restore", "src/model.rs"]);
    }
}
