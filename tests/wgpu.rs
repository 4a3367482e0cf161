//! GPUs through wgpu, as a user meets them: on whatever adapter there is, which in CI is Mesa's for the CPU.

use crate::place::{Finished, Place, SMOKE, goes_from_training_to_text, read_json, text};
use autoresearch::device::wgpu::{AdapterKind, adapters};
use serde_json::json;
use std::env;
use std::fs;
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
fn a_driver_that_ends_whoever_asks_it_is_told_and_auto_takes_the_cpu() {
    if !cfg!(target_os = "linux") {
        return;
    }
    let place = Place::new();
    let (source, library, driver) = (place.path("driver.c"), place.path("driver.so"), place.path("driver.json"));
    fs::write(&source, "#include <stdlib.h>\n__attribute__((constructor)) static void load(void) { abort(); }\n")
        .unwrap();
    let made = Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status().unwrap();
    assert!(made.success());
    let icd = json!({"file_format_version": "1.0.0", "ICD": {"library_path": &library, "api_version": "1.3.0"}});
    fs::write(&driver, icd.to_string()).unwrap();
    let run = |arguments: &[&str]| {
        let mut command = place.command(arguments);
        command.env("VK_DRIVER_FILES", &driver).env("VK_ICD_FILENAMES", &driver);
        Finished::of(command)
    };
    let said = "a process which asks them was ended by signal 6";
    let refused = run(&["verify", "--device", "wgpu"]);
    assert!(refused.code == Some(1) && refused.stderr.contains(said), "{refused:?}");
    assert!(refused.stderr.contains("error: --device wgpu: expected an adapter"), "{refused:?}");
    let listed = run(&["devices"]).ok();
    assert!(listed.stderr.contains(said) && listed.stdout.contains("no adapter"), "{listed:?}");
    if cfg!(feature = "flex") {
        let taken = run(&["verify", "--device", "auto", "--golden", "nowhere"]);
        assert!(taken.stdout.starts_with("device: cpu") && taken.stderr.contains(said), "{taken:?}");
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

#[test]
fn a_run_goes_from_training_to_text() {
    if !has_adapter() {
        return;
    }
    let place = Place::with_tales();
    let data = place.path("cache");
    let ok = |arguments: &[&str]| {
        // The flag names the data's folder, the variable that of tuned kernels.
        let flag: &[&str] = if arguments[0] == "sample" { &[] } else { &["--cache-dir", text(&data)] };
        run(&place, &[arguments, flag].concat()).ok()
    };
    let options = ["--device", "wgpu", "--compute-type", "float32", "--kill-limit", "900", "--run-dir", "run"];
    let trained = goes_from_training_to_text(&[&SMOKE[..], &options].concat(), ok);
    assert_ne!(trained.value("peak_vram_mb"), "n/a");
    let config = read_json(&place.path("run/config.json"));
    assert_eq!((&config["protocol"]["compute_type"], &config["compute_type"]), (&"float32".into(), &"float32".into()));
}
