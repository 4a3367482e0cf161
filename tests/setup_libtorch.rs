//! `scripts/setup-libtorch` and `run.sh`, with a Python, a cargo and drivers that are acted by small scripts: what is installed
//! for which GPU, what is written, and what is left alone. That pip really installs PyTorch is seen in `.ci/run`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// Acts as `python3` and as the Python of an environment: writes down what it is asked to install, and "installs" a torch
/// with the GPU part that `$PART` names.
const PYTHON: &str = r#"#!/bin/bash
case "$*" in
  "-m venv --clear "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
  "-m pip install "*)
    echo "$*" >>"$LOG"
    torch=$(dirname "$0")/../torch
    mkdir -p "$torch/lib" "$torch/include/torch/csrc/api/include/torch"
    touch "$torch"/lib/lib{torch,torch_cpu,c10,torch_"$PART",c10_"$PART"}.so
    touch "$torch/include/torch/csrc/api/include/torch/torch.h"
    echo "__version__ = '2.11.0+acted'" >"$torch/version.py"
    ;;
  "-c "*find_spec*) [ -d "$(dirname "$0")/../torch" ] && realpath "$(dirname "$0")/../torch" ;;
esac
"#;

/// Acts as `cargo`: writes down what it is asked to run, and prepares a data set.
const CARGO: &str = r#"#!/bin/bash
echo "$*" >>"$LOG"
case "$*" in *" prepare "*) mkdir -p "$AUTORESEARCH_CACHE_DIR/climbmix" && touch "$AUTORESEARCH_CACHE_DIR/climbmix/prepared.json" ;; esac
"#;

/// A copy of the scripts in a folder of its own, and a machine to run it on.
struct Machine {
    folder: TempDir,
}

struct Finished {
    success: bool,
    stdout: String,
    stderr: String,
}

impl Machine {
    /// A machine without any GPU.
    fn new() -> Self {
        let machine = Self { folder: tempfile::tempdir().unwrap() };
        for script in ["scripts/setup-libtorch", "run.sh"] {
            let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(script)).unwrap();
            machine.write_program(&format!("checkout/{script}"), &text);
        }
        machine.write_program("bin/python3", PYTHON);
        machine.write_program("bin/cargo", CARGO);
        machine.write_program("bin/nvidia-smi", "#!/bin/bash\nexit 9\n");
        machine
    }

    /// A machine with AMD's GPUs, as their driver numbers them.
    fn with_amd(versions: &[u32]) -> Self {
        let machine = Self::new();
        for (node, version) in [0].iter().chain(versions).enumerate() {
            machine.write(&format!("kfd/{node}/properties"), &format!("simd_count 8\ngfx_target_version {version}\n"));
        }
        machine
    }

    /// A machine with an NVIDIA GPU and a driver for this version of CUDA.
    fn with_nvidia(cuda: &str) -> Self {
        let machine = Self::new();
        let text = format!(
            "#!/bin/bash\nif [ \"$*\" = --list-gpus ]; then echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n\
             else echo '| NVIDIA-SMI 1    Driver Version: 1    CUDA Version: {cuda}     |'; fi\n"
        );
        machine.write_program("bin/nvidia-smi", &text);
        machine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::create_dir_all(self.path(name).parent().unwrap()).unwrap();
        fs::write(self.path(name), text).unwrap();
    }

    fn write_program(&self, name: &str, text: &str) {
        self.write(name, text);
        fs::set_permissions(self.path(name), fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Runs the set-up; `part` is the GPU part of the torch that its package index has.
    fn set_up(&self, part: &str, arguments: &[&str]) -> Finished {
        self.run("scripts/setup-libtorch", part, arguments)
    }

    fn run(&self, script: &str, part: &str, arguments: &[&str]) -> Finished {
        let path = format!("{}:{}", self.path("bin").display(), std::env::var("PATH").unwrap());
        let output = Command::new(self.path("checkout").join(script))
            .args(arguments)
            .env("PATH", path)
            .env("PART", part)
            .env("LOG", self.path("log"))
            .env("AUTORESEARCH_KFD_NODES", self.path("kfd"))
            .env("AUTORESEARCH_CACHE_DIR", self.path("cache"))
            .env_remove("AUTORESEARCH_TORCH_INDEX")
            .env_remove("LIBTORCH")
            .env_remove("NUM_SHARDS")
            .output()
            .unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Finished { success: output.status.success(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    /// Runs the script successfully.
    fn ok(&self, part: &str, arguments: &[&str]) -> Finished {
        let finished = self.set_up(part, arguments);
        assert!(finished.success, "{}", finished.stderr);
        finished
    }

    /// What pip and cargo were called with, one line each.
    fn log(&self) -> Vec<String> {
        let text = fs::read_to_string(self.path("log")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }
}

#[test]
fn each_gpu_gets_the_pytorch_that_is_built_for_it() {
    let halo = "--index-url https://rocm.nightlies.amd.com/v2/gfx1151/ --extra-index-url https://repo.amd.com/rocm/whl/gfx1151/";
    let rocm = "--index-url https://download.pytorch.org/whl/rocm7.2";
    let cases = [
        (Machine::with_amd(&[110501]), "hip", "gfx1151", halo),
        (Machine::with_amd(&[90402]), "hip", "gfx942", rocm),
        (Machine::with_amd(&[90010]), "hip", "gfx90a", rocm),
        (Machine::with_amd(&[110000, 100306]), "hip", "gfx1036 gfx1100", rocm),
        (Machine::with_nvidia("13.0"), "cuda", "NVIDIA", ""),
        (Machine::with_nvidia("12.4"), "cuda", "NVIDIA", "--index-url https://download.pytorch.org/whl/cu126"),
        (Machine::new(), "cuda", "no GPU", ""),
    ];
    for (machine, part, found, index) in cases {
        let finished = machine.ok(part, &[]);
        assert!(finished.stderr.starts_with("found: "), "{}", finished.stderr);
        assert!(finished.stderr.lines().next().unwrap().contains(found), "{found}: {}", finished.stderr);
        let [installed] = &machine.log()[..] else { panic!("{:?}", machine.log()) };
        let options = installed.strip_prefix("-m pip install --disable-pip-version-check --no-input ").unwrap();
        assert_eq!(options.strip_suffix("torch>=2.11.0a0,<2.12").unwrap().trim_end(), index, "{found}");
    }
}

#[test]
fn what_cargo_needs_is_written_and_the_second_call_installs_nothing() {
    let machine = Machine::with_amd(&[110501]);
    machine.ok("hip", &[]);
    let config = machine.path("checkout/.cargo/config.toml");
    let first = fs::read_to_string(&config).unwrap();
    let written: toml::Table = first.parse().unwrap();
    assert_eq!(written["env"]["LIBTORCH"].as_str(), machine.path("cache/libtorch-rocm/torch").to_str());
    assert_eq!(written["env"]["LIBTORCH_BYPASS_VERSION_CHECK"].as_str(), Some("1"));

    let again = machine.ok("hip", &[]);
    assert!(again.stderr.contains("kept: "), "{}", again.stderr);
    assert_eq!(machine.log().len(), 1);
    assert_eq!(fs::read_to_string(&config).unwrap(), first);
}

#[test]
fn an_environment_that_was_not_finished_is_made_again() {
    let machine = Machine::new();
    machine.ok("cuda", &[]);
    fs::write(machine.path("cache/libtorch-cpu/autoresearch-libtorch"), "unfinished\n").unwrap();
    machine.ok("cuda", &[]);
    assert_eq!(machine.log().len(), 2);
}

#[test]
fn a_torch_without_the_gpu_part_that_was_asked_for_is_refused() {
    let finished = Machine::with_amd(&[110501]).set_up("cuda", &[]);
    assert!(!finished.success);
    assert!(
        finished.stderr.contains("expected a libtorch for rocm, found one for: cuda; hint: "),
        "{}",
        finished.stderr
    );
}

#[test]
fn files_and_environments_of_others_are_left_alone() {
    let machine = Machine::new();
    machine.write("checkout/.cargo/config.toml", "[build]\njobs = 1\n");
    let finished = machine.set_up("cuda", &[]);
    assert!(!finished.success);
    assert!(
        finished.stderr.contains("hint: add these lines to it yourself:\n[env]\nLIBTORCH = "),
        "{}",
        finished.stderr
    );
    assert_eq!(fs::read_to_string(machine.path("checkout/.cargo/config.toml")).unwrap(), "[build]\njobs = 1\n");

    machine.write("environment/bin/python", "someone's");
    let finished = machine.set_up("cuda", &["--venv", machine.path("environment").to_str().unwrap()]);
    assert!(!finished.success);
    assert!(finished.stderr.contains("expected a new folder, or one made by this script"), "{}", finished.stderr);
    assert_eq!(fs::read_to_string(machine.path("environment/bin/python")).unwrap(), "someone's");
}

#[test]
fn variables_are_printed_for_a_shell_and_nothing_is_written() {
    let machine = Machine::new();
    machine.ok("cuda", &["--venv", machine.path("with space").to_str().unwrap(), "--print-env"]);
    let torch = machine.path("with space/torch");
    let printed = machine.ok("cuda", &["--torch", torch.to_str().unwrap(), "--print-env"]).stdout;
    let output = Command::new("bash").args(["-c", &format!("{printed}printf %s \"$LIBTORCH\"")]).output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), torch.to_str().unwrap());
    assert!(!machine.path("checkout/.cargo").exists());
}

#[test]
fn what_is_no_libtorch_is_refused_by_name() {
    let machine = Machine::new();
    fs::create_dir(machine.path("empty")).unwrap();
    let finished = machine.set_up("cuda", &["--torch", machine.path("empty").to_str().unwrap()]);
    assert!(!finished.success);
    let expected = "empty: expected libtorch, with lib/ and include/, found no lib/libtorch.so; hint: ";
    assert!(finished.stderr.contains(expected), "{}", finished.stderr);

    let finished = machine.set_up("cuda", &["--python", machine.path("bin/python3").to_str().unwrap()]);
    assert!(!finished.success);
    assert!(finished.stderr.contains("expected a Python with PyTorch, found none; hint: "), "{}", finished.stderr);
}

#[test]
fn the_one_command_sets_up_prepares_and_trains_and_the_next_one_only_trains() {
    let machine = Machine::with_amd(&[110501]);
    let first = machine.run("run.sh", "hip", &[]);
    assert!(first.success, "{}", first.stderr);
    let [install, prepare, train] = &machine.log()[..] else { panic!("{:?}", machine.log()) };
    assert!(install.starts_with("-m pip install "), "{install}");
    let run = "run --release --features tch --";
    assert_eq!(*prepare, format!("{run} prepare --config configs/halo.toml --num-shards 10"));
    assert_eq!(*train, format!("{run} train --config configs/halo.toml --device libtorch"));
    for command in ["+ scripts/setup-libtorch".to_owned(), format!("+ cargo {prepare}"), format!("+ cargo {train}")] {
        assert!(first.stderr.lines().any(|line| line == command), "{command} was not printed: {}", first.stderr);
    }

    assert!(machine.run("run.sh", "hip", &["--steps", "3", "--device", "libtorch:cpu"]).success);
    let log = machine.log();
    let expected = format!("{run} train --config configs/halo.toml --steps 3 --device libtorch:cpu");
    assert_eq!(log[3..], [expected], "{log:?}");
}

#[test]
fn the_one_command_leaves_data_of_ones_own_choice_to_its_user() {
    let machine = Machine::with_amd(&[110501]);
    assert!(machine.run("run.sh", "hip", &["--dataset", "tales"]).success);
    let log = machine.log();
    assert!(log.last().unwrap().ends_with(" --dataset tales"), "{log:?}");
    assert!(!log.iter().any(|line| line.contains(" prepare ")), "{log:?}");
}
