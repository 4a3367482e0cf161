//! Golden values, through the code of `autoresearch verify`.

use crate::precision::cpus;
use autoresearch::verify::{Check, Finding, Goldens};
use burn::tensor::{Device, FloatDType};
use safetensors::tensor::{SafeTensors, TensorView};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The goldens that come along.
fn shipped() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// The types of matrix products that goldens are compared in.
const COMPUTE_TYPES: [FloatDType; 2] = [FloatDType::F32, FloatDType::BF16];

/// All comparisons and the cases that were left out, in float32 on the first device.
fn verify(folder: &Path, corpus: Option<PathBuf>) -> (Vec<Check>, Vec<String>) {
    verify_on(cpus().remove(0), FloatDType::F32, folder, corpus)
}

fn verify_on(
    device: Device,
    compute_type: FloatDType,
    folder: &Path,
    corpus: Option<PathBuf>,
) -> (Vec<Check>, Vec<String>) {
    let goldens = Goldens { folder: folder.to_path_buf(), corpus, device, compute_type, product_type: compute_type };
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
fn the_shipped_goldens_are_met_in_both_types_on_every_cpu_backend() {
    for (device, compute_type) in cpus().into_iter().flat_map(|device| COMPUTE_TYPES.map(|kind| (device.clone(), kind)))
    {
        let (checks, left_out) = verify_on(device.clone(), compute_type, &shipped(), None);
        assert!(failures(&checks).is_empty(), "{device:?}, {compute_type:?}: {:#?}", failures(&checks));
        assert!(left_out.is_empty(), "{left_out:?}");
        for case in ["model-gqa", "model-gqa-optim", "muon"] {
            assert!(checks.iter().any(|check| check.case == case), "nothing of {case} was compared");
        }
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
    for (number, device) in cpus().into_iter().enumerate() {
        for compute_type in COMPUTE_TYPES {
            // Products of bfloat16 are slow in libtorch on a CPU: models and optimizers take seconds, a whole run minutes.
            let is_slow = number > 0 && compute_type == FloatDType::BF16;
            let corpus = corpus.clone().filter(|_| !is_slow);
            let why = if is_slow { "too slow in bfloat16 through libtorch" } else { "AUTORESEARCH_CORPUS is not set" };
            let (checks, left_out) = verify_on(device.clone(), compute_type, &golden, corpus.clone());
            for case in &left_out {
                note(&format!("left out: {case} ({why})"));
            }
            assert!(failures(&checks).is_empty(), "{device:?}, {compute_type:?}: {:#?}", failures(&checks));
            assert!(!checks.is_empty() || !left_out.is_empty());
            assert!(left_out.is_empty() || corpus.is_none(), "{left_out:?}");
        }
    }
}

#[test]
fn a_bf16_model_that_lacks_a_factor_fails_in_bf16() {
    // The weights of one matrix a tenth too large: what a missing factor or a wrong scale amounts to.
    let folder = tempfile::tempdir().unwrap();
    copy_shipped(&["model-gqa.json", "model-gqa.safetensors"], folder.path());
    let matrix = "param/transformer.h.1.mlp.c_proj.weight";
    change_tensor(&folder.path().join("model-gqa.safetensors"), matrix, |bytes, shape| {
        let scaled = bytes.chunks_exact(4).flat_map(|value| {
            let value = f32::from_le_bytes(value.try_into().unwrap());
            (value * 1.1).to_le_bytes()
        });
        (scaled.collect(), shape)
    });
    for device in cpus() {
        let (checks, _) = verify_on(device, FloatDType::BF16, folder.path(), None);
        let failed = checks.iter().filter(|check| !check.passed()).map(|check| check.quantity.as_str());
        assert!(failed.collect::<Vec<_>>().contains(&"logits"), "{checks:#?}");
    }
}

#[test]
fn a_compute_type_without_tolerances_is_refused() {
    let goldens = Goldens {
        folder: shipped(),
        corpus: None,
        device: cpus().remove(0),
        compute_type: FloatDType::F64,
        product_type: FloatDType::F64,
    };
    let message = goldens.verify(|_| ()).unwrap_err().to_string();
    assert!(message.contains("F64") && message.contains("; hint: "), "{message}");
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
