//! GPUs through wgpu, as a user meets them: on whatever adapter there is, which in CI is Mesa's for the CPU.

use crate::place::{Finished, Place, read_json, text};
use autoresearch::device::wgpu::{AdapterKind, adapters};
use std::env;
use std::process::Command;

/// The program with what was tuned on this machine before, which need not be tuned for each test.
fn command(place: &Place, arguments: &[&str]) -> Command {
    const CACHE: &str = "AUTORESEARCH_CACHE_DIR";
    let mut command = place.command(arguments);
    match env::var_os(CACHE) {
        Some(folder) => command.env(CACHE, folder),
        None => command.env_remove(CACHE),
    };
    command
}

fn run(place: &Place, arguments: &[&str]) -> Finished {
    Finished::of(command(place, arguments))
}

/// [`run`] where Vulkan finds no driver.
fn run_without_driver(place: &Place, arguments: &[&str]) -> Finished {
    let mut command = command(place, arguments);
    let nowhere = place.path("no-driver.json");
    command.env("VK_DRIVER_FILES", &nowhere).env("VK_ICD_FILENAMES", &nowhere);
    Finished::of(command)
}

fn has_adapter() -> bool {
    let has_one = !adapters().is_empty();
    if !has_one {
        eprintln!("left out: wgpu finds no adapter");
    }
    has_one
}

#[test]
fn without_an_adapter_wgpu_is_refused_and_auto_takes_the_cpu() {
    // Other systems have drivers that cannot be hidden.
    if !cfg!(target_os = "linux") {
        return;
    }
    let place = Place::new();
    for device in ["wgpu", "wgpu:0"] {
        let refused = run_without_driver(&place, &["verify", "--device", device]);
        refused.assert_refused(&["--device wgpu", "no adapter at all", "mesa-vulkan-drivers"]);
    }
    let listed = run_without_driver(&place, &["devices"]).stdout;
    assert!(listed.lines().any(|line| line.starts_with("wgpu ") && line.contains("no adapter; hint: ")), "{listed}");
    if cfg!(feature = "flex") {
        let taken = run_without_driver(&place, &["verify", "--device", "auto", "--golden", "nowhere"]);
        assert!(taken.stdout.starts_with("device: cpu"), "{taken:?}");
    }
}

#[test]
fn adapters_are_listed_and_others_refused() {
    if !has_adapter() {
        return;
    }
    let place = Place::new();
    let listed = run(&place, &["devices"]).stdout;
    let first = listed.lines().find(|line| line.starts_with("wgpu:0 ")).expect("wgpu:0 is listed");
    let adapter = &adapters()[0];
    for part in [&adapter.name, &adapter.driver, &adapter.kind.to_string()] {
        assert!(first.contains(part.as_str()), "{first}");
    }
    let verify = |device: &str| run(&place, &["verify", "--device", device, "--golden", "nowhere"]);
    verify("wgpu:77").assert_refused(&["--device wgpu:77", "from wgpu:0 to"]);
    for name in ["wgpu:", "wgpu:-1", "wgpu:x", "wgpu:00", "vulkan"] {
        verify(name).assert_refused(&[&format!("found '{name}'"), "wgpu:N"]);
    }
    if adapter.kind == AdapterKind::Software {
        let refused = run(&place, &["verify", "--device", "wgpu", "--compute-type", "bfloat16"]);
        refused.assert_refused(&["--compute-type bfloat16", &adapter.name]);
        if cfg!(feature = "flex") {
            // A real GPU would come first.
            let taken = verify("auto");
            assert!(taken.stdout.starts_with("device: cpu"), "{taken:?}");
        }
    }
}

/// Trains, evaluates what was trained there on the CPU, and lets it write.
#[test]
fn a_run_goes_from_training_to_text() {
    if !has_adapter() {
        return;
    }
    let place = Place::with_tales();
    // The flag names the data's folder, the variable that of tuned kernels.
    let data = place.path("cache");
    let ok = |arguments: &[&str]| run(&place, &[arguments, &["--cache-dir", text(&data)]].concat()).ok();
    let steps = ["--steps", "3", "--eval-tokens", "1024", "--kill-limit", "900", "--run-dir", "run"];
    let on_wgpu = ["train", "--config", "ci.toml", "--device", "wgpu", "--compute-type", "float32"];
    let trained = ok(&[&on_wgpu[..], &steps].concat());
    let config = read_json(&place.path("run/config.json"));
    assert_eq!((&config["protocol"]["compute_type"], &config["compute_type"]), (&"float32".into(), &"float32".into()));
    assert_ne!(trained.value("peak_vram_mb"), "n/a");

    let on_cpu = ok(&["eval", "--checkpoint", "run", "--device", "cpu", "--eval-tokens", "1024"]);
    let [trained, on_cpu] = [trained, on_cpu].map(|finished| finished.value("val_bpb").parse::<f64>().unwrap());
    assert!((trained - on_cpu).abs() < 1e-4, "{trained} {on_cpu}");
    run(&place, &["sample", "--checkpoint", "run", "--tokens", "3", "--temperature", "0"]).ok();
}
