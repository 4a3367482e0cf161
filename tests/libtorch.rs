//! Devices of libtorch, as a user meets them: on whatever GPU there is, which in CI is none, and on the CPU.

use crate::place::{Place, SMOKE, goes_from_training_to_text};
use std::fs;

/// Whether this machine may have a GPU that libtorch computes on.
fn may_have_gpu() -> bool {
    ["/dev/nvidia0", "/dev/kfd", "/dev/dxg"].iter().any(|node| fs::exists(node).unwrap_or(true))
}

#[test]
fn a_gpu_that_is_not_there_is_refused_with_the_cause() {
    let place = Place::with_tales();
    for name in ["libtorch:", "libtorch:-1", "libtorch:1.5", "libtorch:gpu", "libtorch:99999999999999999999"] {
        place.assert_refused(&["verify", "--device", name], &[&format!("found '{name}'"), "libtorch:N"]);
    }
    let expected = "expected a GPU that libtorch can compute on, found ";
    for command in [&["train", "--config", "ci.toml", "--device"][..], &["verify", "--device"]] {
        place.assert_refused(&[command, &["libtorch:4096"]].concat(), &["--device libtorch:4096: ", expected]);
    }
    if !may_have_gpu() {
        place.assert_refused(&["verify", "--device", "libtorch"], &["--device libtorch: ", expected]);
        // Without a GPU it is no news that none is used.
        if !cfg!(feature = "wgpu") {
            assert_eq!(place.ok(&SMOKE).stderr, "");
        }
        let verbose = place.ok(&["verify", "-v"]).stderr;
        assert!(verbose.contains(&format!("passed over: --device libtorch: {expected}")), "{verbose}");
    }
}

#[test]
fn goldens_are_met_in_bfloat16_with_wider_tolerances() {
    let place = Place::new();
    let verify =
        |compute_type| place.ok(&["verify", "--device", "libtorch:cpu", "--compute-type", compute_type]).stdout;
    let [high, low] = ["float32", "bfloat16"].map(verify);
    assert_eq!(high.lines().count(), low.lines().count());
    assert_eq!(high.lines().next_back(), low.lines().next_back());
    assert!(low.contains("model-gqa: logits: error ") && low.contains(", tolerance 2e-2: pass"), "{low}");
}

#[test]
fn a_run_goes_from_training_to_text() {
    let place = Place::with_tales();
    let on_libtorch = [&SMOKE[..], &["--device", "libtorch:cpu", "--run-dir", "run"]].concat();
    goes_from_training_to_text(&on_libtorch, |arguments| place.ok(arguments));
}
