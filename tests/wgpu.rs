//! GPUs through wgpu, as a user meets them: on whatever adapter there is, which in CI is Mesa's for the CPU.

use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

/// Runs the program in a folder of its own; `drivers` is where Vulkan looks for them, if not where it always does.
fn run(folder: &Path, drivers: Option<&Path>, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_autoresearch"));
    command.current_dir(folder).args(arguments);
    if let Some(drivers) = drivers {
        command.env("VK_DRIVER_FILES", drivers).env("VK_ICD_FILENAMES", drivers);
    }
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What the program refuses, which must be one line that has all `parts`.
fn assert_refused(folder: &Path, drivers: Option<&Path>, arguments: &[&str], parts: &[&str]) {
    let output = run(folder, drivers, arguments);
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    let message = stderr.lines().last().unwrap_or_default();
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {stdout}{stderr}");
    for part in parts.iter().chain(&["error: ", "; hint: "]) {
        assert!(message.contains(part), "{arguments:?}: no '{part}' in: {stderr}");
    }
}

fn has_adapter() -> bool {
    let has_one = !autoresearch::device::wgpu::adapters().is_empty();
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
    let folder = TempDir::new().unwrap();
    let nowhere = folder.path().join("no-driver.json");
    let refused = |arguments: &[&str]| {
        assert_refused(
            folder.path(),
            Some(&nowhere),
            arguments,
            &["--device wgpu", "no adapter at all", "mesa-vulkan-drivers"],
        );
    };
    refused(&["verify", "--device", "wgpu"]);
    refused(&["verify", "--device", "wgpu:0"]);
    let listed = text(&run(folder.path(), Some(&nowhere), &["devices"]).stdout);
    assert!(listed.lines().any(|line| line.starts_with("wgpu ") && line.contains("no adapter; hint: ")), "{listed}");
    if cfg!(feature = "flex") {
        let output = run(folder.path(), Some(&nowhere), &["verify", "--device", "auto", "--golden", "nowhere"]);
        assert!(text(&output.stdout).starts_with("device: cpu"), "{output:?}");
    }
}

#[test]
fn adapters_are_listed_and_others_refused() {
    if !has_adapter() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let output = run(folder.path(), None, &["devices"]);
    let listed = text(&output.stdout);
    let first = listed.lines().find(|line| line.starts_with("wgpu:0 ")).expect("wgpu:0 is listed");
    let adapter = &autoresearch::device::wgpu::adapters()[0];
    for part in [&adapter.name, &adapter.driver, &adapter.kind.to_string()] {
        assert!(first.contains(part.as_str()), "{first}");
    }
    assert_refused(folder.path(), None, &["verify", "--device", "wgpu:77"], &["--device wgpu:77", "from wgpu:0 to"]);
    for name in ["wgpu:", "wgpu:-1", "wgpu:x", "vulkan"] {
        assert_refused(folder.path(), None, &["verify", "--device", name], &[&format!("found '{name}'"), "wgpu:N"]);
    }
    if adapter.kind == autoresearch::device::wgpu::AdapterKind::Software {
        let arguments = ["verify", "--device", "wgpu", "--compute-type", "bfloat16"];
        assert_refused(folder.path(), None, &arguments, &["--compute-type bfloat16", &adapter.name]);
        if cfg!(feature = "flex") {
            // A real GPU would come first.
            let output = run(folder.path(), None, &["verify", "--device", "auto", "--golden", "nowhere"]);
            assert!(text(&output.stdout).starts_with("device: cpu"), "{output:?}");
        }
    }
}

/// Trains, evaluates what was trained there on the CPU, and lets it write.
#[test]
fn a_run_goes_from_training_to_text() {
    if !has_adapter() {
        return;
    }
    let folder = TempDir::new().unwrap();
    fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/ci.toml"), folder.path().join("ci.toml")).unwrap();
    let ok = |arguments: &[&str]| {
        let output = run(folder.path(), None, arguments);
        assert!(output.status.success(), "{arguments:?}: {}{}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    };
    ok(&["prepare", "--config", "ci.toml", "--cache-dir", "cache"]);
    let train =
        ["train", "--config", "ci.toml", "--cache-dir", "cache", "--device", "wgpu", "--compute-type", "float32"];
    let more = ["--steps", "3", "--eval-tokens", "1024", "--kill-limit", "900", "--run-dir", "run"];
    let trained = ok(&[&train[..], &more].concat());
    let config: Value =
        serde_json::from_str(&fs::read_to_string(folder.path().join("run/config.json")).unwrap()).unwrap();
    assert_eq!((&config["protocol"]["compute_type"], &config["compute_type"]), (&"float32".into(), &"float32".into()));
    let bpb = |output: &str| -> f64 {
        let line = output.lines().find_map(|line| line.strip_prefix("val_bpb:")).expect("a line with val_bpb");
        line.trim().parse().unwrap()
    };
    let evaluate = ["eval", "--checkpoint", "run", "--cache-dir", "cache", "--device"];
    let on_cpu = ok(&[&evaluate[..], &["cpu", "--eval-tokens", "1024"]].concat());
    assert!((bpb(&trained) - bpb(&on_cpu)).abs() < 1e-4, "{trained}{on_cpu}");
    assert!(trained.contains("peak_vram_mb:") && !trained.contains("peak_vram_mb:     n/a"), "{trained}");
    ok(&["sample", "--checkpoint", "run", "--tokens", "3", "--temperature", "0"]);
}
