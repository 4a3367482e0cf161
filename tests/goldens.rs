//! Golden values, through the code of `autoresearch verify`.

use autoresearch::device::ComputeDevice;
use autoresearch::verify::{Check, Finding, Goldens};
use safetensors::tensor::{SafeTensors, TensorView};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The goldens that come along.
fn shipped() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// All comparisons and the cases that were left out.
fn verify(folder: &Path, corpus: Option<PathBuf>) -> (Vec<Check>, Vec<String>) {
    let device = ComputeDevice::select("auto").unwrap().device;
    let goldens = Goldens { folder: folder.to_path_buf(), corpus, device, compute_type };
    let (mut checks, mut left_out) = (Vec::new(), Vec::new());
    let report = |finding| match finding {
        Finding::Compared(check) => checks.push(check),
        Finding::LeftOut { case, .. } => left_out.push(case),
        Finding::Unusable(error) => panic!("{error}"),
    };
    goldens.verify(report).unwrap();
    (checks, left_out)
}

/// Says something past the test runner, which keeps what tests print to itself.
fn note(text: &str) {
    std::io::stderr().write_all(format!("{text}\n").as_bytes()).unwrap();
}

fn failures(checks: &[Check]) -> Vec<String> {
    checks.iter().filter(|check| !check.passed()).map(Check::to_string).collect()
}

/// Rewrites tensor `name` of the safetensors file at `path`: `change` gets its bytes and gives them back, and the shape.
pub fn change_tensor(path: &Path, name: &str, change: impl FnOnce(Vec<u8>, Vec<usize>) -> (Vec<u8>, Vec<usize>)) {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let view = file.tensor(name).unwrap();
    let (data, shape) = change(view.data().to_vec(), view.shape().to_vec());
    let changed = TensorView::new(view.dtype(), shape, &data).unwrap();
    let views = file.iter().map(|(other, view)| if other == name { (other, changed.clone()) } else { (other, view) });
    let written = safetensors::serialize(views, None).unwrap();
    fs::write(path, written).unwrap();
}

/// Copies files of the shipped goldens to `folder`.
pub fn copy_shipped(names: &[&str], folder: &Path) {
    for name in names {
        fs::copy(shipped().join(name), folder.join(name)).unwrap();
    }
}

#[test]
fn the_shipped_goldens_are_met() {
    let (checks, left_out) = verify(&shipped(), None);
    assert!(failures(&checks).is_empty(), "{:#?}", failures(&checks));
    assert!(left_out.is_empty(), "{left_out:?}");
    for case in ["model-gqa", "model-gqa-optim", "muon"] {
        assert!(checks.iter().any(|check| check.case == case), "nothing of {case} was compared");
    }
}

#[test]
fn further_goldens_are_met_where_autoresearch_golden_and_autoresearch_corpus_name_folders() {
    let [golden, corpus] =
        ["AUTORESEARCH_GOLDEN", "AUTORESEARCH_CORPUS"].map(|name| std::env::var_os(name).map(PathBuf::from));
    let Some(golden) = golden else {
        note("left out: all goldens but those in tests/golden (AUTORESEARCH_GOLDEN is not set)");
        return;
    };
    let has_corpus = corpus.is_some();
    let (checks, left_out) = verify(&golden, corpus);
    for case in &left_out {
        note(&format!("left out: {case} (AUTORESEARCH_CORPUS is not set)"));
    }
    assert!(failures(&checks).is_empty(), "{:#?}", failures(&checks));
    assert!(!checks.is_empty() || !left_out.is_empty());
    assert!(left_out.is_empty() || !has_corpus, "{left_out:?}");
}

#[test]
fn one_changed_value_fails_its_check_alone() {
    let cases = [
        ("muon", "case0/params_after", "case0 params_after"),
        ("model-gqa", "logits", "logits"),
        ("model-gqa", "grad/transformer.h.1.mlp.c_fc.weight", "grad transformer.h.1.mlp.c_fc.weight"),
    ];
    for (case, tensor, quantity) in cases {
        let folder = tempfile::tempdir().unwrap();
        let (description, tensors) = (format!("{case}.json"), format!("{case}.safetensors"));
        copy_shipped(&[&description, &tensors], folder.path());
        change_tensor(&folder.path().join(&tensors), tensor, |mut bytes, shape| {
            let value = f32::from_le_bytes(bytes[..4].try_into().unwrap());
            bytes[..4].copy_from_slice(&(value + 1.0).to_le_bytes());
            (bytes, shape)
        });
        let (checks, _) = verify(folder.path(), None);
        let failed: Vec<&str> =
            checks.iter().filter(|check| !check.passed()).map(|check| check.quantity.as_str()).collect();
        assert_eq!(failed, [quantity], "{case}");
    }
}

#[test]
fn a_value_that_is_no_number_fails() {
    let folder = tempfile::tempdir().unwrap();
    copy_shipped(&["muon.json", "muon.safetensors"], folder.path());
    change_tensor(&folder.path().join("muon.safetensors"), "case2/orthogonal", |mut bytes, shape| {
        bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes());
        (bytes, shape)
    });
    assert_eq!(failures(&verify(folder.path(), None).0).len(), 1);
}

#[test]
fn goldens_that_are_zero_are_met_by_zeros_alone() {
    let folder = tempfile::tempdir().unwrap();
    copy_shipped(&["muon.json", "muon.safetensors"], folder.path());
    let path = folder.path().join("muon.safetensors");
    let zeroed = |bytes: Vec<u8>, shape| (vec![0; bytes.len()], shape);
    for input in ["params", "grads", "momentum"] {
        change_tensor(&path, &format!("case1/{input}"), zeroed);
    }
    for output in ["params_after", "momentum_after", "orthogonal"] {
        change_tensor(&path, &format!("case1/{output}"), zeroed);
    }
    let (checks, _) = verify(folder.path(), None);
    let failed: Vec<&str> =
        checks.iter().filter(|check| !check.passed()).map(|check| check.quantity.as_str()).collect();
    // The variance decays, which its golden does not show.
    assert_eq!(failed, ["case1 second_momentum_after"]);
    change_tensor(&path, "case1/grads", |mut bytes, shape| {
        bytes[..4].copy_from_slice(&1f32.to_le_bytes());
        (bytes, shape)
    });
    assert!(failures(&verify(folder.path(), None).0).len() > 1);
}
