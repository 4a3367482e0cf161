//! Builds the edited program with cargo, with the features that are compiled into this one.

use super::excerpt::{first_lines, last_lines, read_end};
use crate::process::{Ended, How, Input, Interruption, ProcessId, Streams, Supervision, create_log, output, run_with};
use anyhow::{Context, Result, anyhow, bail};
use rustc_hash::FxHasher;
use serde_json::Value;
use std::env;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::hash::{Hash, Hasher};
use std::io::{BufRead, BufReader, Seek, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Cargo reads a few files for it.
const METADATA_LIMIT: Duration = Duration::from_secs(120);

/// A build.
#[derive(Clone, Debug)]
pub struct Build {
    /// What came of it.
    pub outcome: Outcome,
    /// How cargo ended.
    pub ended: Ended,
}

/// What comes of a build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The program.
    Built {
        /// Its path.
        executable: PathBuf,
    },
    /// The program does not compile.
    Failed {
        /// What the compiler says first, fit to be shown.
        first_error: String,
    },
    /// Cargo did not come to compiling the program, or a disk, the memory or the network failed it.
    CargoFailed {
        /// What it said last, fit to be shown.
        last_lines: String,
    },
    /// It took longer than its limit, or was interrupted.
    Stopped,
}

/// Where cargo puts what it makes of the package in one folder.
#[derive(Clone, Debug)]
pub struct Folders {
    /// The package.
    root: PathBuf,
    /// The program.
    target: PathBuf,
    /// Everything else: the compiled dependencies above all.
    build: PathBuf,
}

impl Folders {
    /// For the package in `root`: the program goes to `target`, everything else to where builds of the package in `original` put
    /// it, so that the dependencies are shared.
    ///
    /// # Errors
    /// If cargo cannot tell.
    pub fn beside(original: &Path, root: PathBuf, target: PathBuf) -> Result<Self> {
        let mut command = Command::new(cargo_path());
        command.current_dir(original).args(["metadata", "--no-deps", "--offline", "--format-version", "1"]);
        let output = output(command, METADATA_LIMIT)?;
        let metadata: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let build = metadata["build_directory"].as_str().or(metadata["target_directory"].as_str());
        let Some(build) = build else {
            bail!(
                "cargo metadata: expected the target folder of {}, found: {}; hint: does `cargo build` work there?",
                original.display(),
                last_lines(&String::from_utf8_lossy(&output.stderr)).replace('\n', " / ")
            );
        };
        Ok(Self { root, target, build: PathBuf::from(build) })
    }

    /// A setting of the release profile that changes nothing but the names of what is compiled of the package itself. Cargo
    /// takes packages of the same name and version in two folders for one, and what was compiled last for both.
    fn own_names(&self) -> String {
        let mut hasher = FxHasher::default();
        self.root.hash(&mut hasher);
        let units = 257 + hasher.finish() % 0x1_0000;
        format!("profile.release.package.{}.codegen-units={units}", env!("CARGO_PKG_NAME"))
    }
}

/// The features that are compiled into this program, as cargo calls them.
pub fn features() -> Vec<&'static str> {
    // `default` stands for itself: cargo builds for each set of names anew, whatever they stand for.
    let features = [
        ("default", cfg!(feature = "default")),
        ("flex", cfg!(feature = "flex")),
        ("wgpu", cfg!(feature = "wgpu")),
        ("vulkan", cfg!(feature = "vulkan")),
        ("autotune", cfg!(feature = "autotune")),
        ("tch", cfg!(feature = "tch")),
    ];
    features.into_iter().filter_map(|(name, compiled_in)| compiled_in.then_some(name)).collect()
}

/// Builds the package that `folders` name; what cargo and the compiler say goes to `log`.
///
/// # Errors
/// If the log cannot be written or read, cargo cannot be started, or `on_spawn` fails.
pub fn build(
    folders: &Folders,
    log: &Path,
    limit: Duration,
    interruption: &Interruption,
    on_spawn: impl FnOnce(&ProcessId) -> Result<()>,
) -> Result<Build> {
    // Nothing that it does is worth waiting for.
    let supervision = Supervision { limit, grace: Duration::ZERO, interruption: interruption.clone() };
    let folder = log.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let unusable = |error: std::io::Error| {
        anyhow!("{}: no file for cargo's messages ({error}); hint: check that there is free space", folder.display())
    };
    let mut messages = tempfile::tempfile_in(folder).map_err(unusable)?;
    let streams =
        Streams { input: Input::Nothing, output: messages.try_clone().map_err(unusable)?, errors: create_log(log)? };
    let ended = run_with(cargo(folders), streams, &supervision, on_spawn)?;
    messages.rewind().map_err(unusable)?;
    let messages = Messages::read(messages).map_err(unusable)?;
    append(log, &messages.rendered)?;
    let outcome = match (ended.how, messages.executable, messages.first_error) {
        (How::TimedOut | How::Interrupted, _, _) => Outcome::Stopped,
        (How::Exited(0), Some(executable), _) => Outcome::Built { executable },
        (_, _, Some(error)) => Outcome::Failed { first_error: first_lines(&error) },
        _ => Outcome::CargoFailed { last_lines: last_lines(&read_end(log)) },
    };
    Ok(Build { outcome, ended })
}

/// As `cargo run` tells where it is itself.
fn cargo_path() -> OsString {
    env::var_os("CARGO").unwrap_or("cargo".into())
}

fn cargo(folders: &Folders) -> Command {
    let mut command = Command::new(cargo_path());
    command.env("CARGO_TARGET_DIR", &folders.target).env("CARGO_BUILD_BUILD_DIR", &folders.build);
    command.current_dir(&folders.root).args(["build", "--release", "--locked", "--bin", env!("CARGO_PKG_NAME")]);
    command.arg("--config").arg(folders.own_names());
    command.args(["--no-default-features", "--features", &features().join(",")]);
    command.args(["--message-format", "json", "--color", "never"]).env("CARGO_TERM_PROGRESS_WHEN", "never");
    // What cargo tells the programs that it runs is none of a build's business: build scripts that ask for it would be run
    // anew each time that it comes or goes.
    for (name, _) in env::vars_os() {
        let is_told = |name: &str| {
            name == "OUT_DIR"
                || ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_"].iter().any(|start| name.starts_with(start))
        };
        if name.to_str().is_some_and(is_told) {
            command.env_remove(name);
        }
    }
    command
}

/// What cargo says in JSON, a line a message.
#[derive(Debug, Default)]
struct Messages {
    executable: Option<PathBuf>,
    /// As the compiler wrote it, unless a disk or the memory is to blame.
    first_error: Option<String>,
    /// All that the compiler wrote.
    rendered: String,
}

impl Messages {
    fn read(file: File) -> std::io::Result<Self> {
        let mut messages = Self::default();
        for line in BufReader::new(file).split(b'\n') {
            // A line is cut off where cargo was killed.
            if let Ok(message) = serde_json::from_slice(&line?) {
                messages.add(&message);
            }
        }
        Ok(messages)
    }

    fn add(&mut self, message: &Value) {
        match message["reason"].as_str() {
            Some("compiler-artifact") if message["target"]["name"] == env!("CARGO_PKG_NAME") => {
                self.executable = message["executable"].as_str().map(PathBuf::from).or(self.executable.take());
            }
            Some("compiler-message") => {
                let message = &message["message"];
                let rendered = message["rendered"].as_str().unwrap_or_default();
                self.rendered.push_str(rendered);
                let is_error = message["level"].as_str().is_some_and(|level| level.starts_with("error"));
                // Such as `failed to write FILE: No space left on device (os error 28)`.
                if is_error && !rendered.contains("(os error ") {
                    self.first_error.get_or_insert_with(|| rendered.to_owned());
                }
            }
            _ => {}
        }
    }
}

fn append(log: &Path, text: &str) -> Result<()> {
    let written = OpenOptions::new().append(true).open(log).and_then(|mut file| file.write_all(text.as_bytes()));
    written.with_context(|| format!("{}: cannot write the log; hint: check that there is free space", log.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use tempfile::TempDir;

    const ROOT: &str = env!("CARGO_MANIFEST_DIR");

    /// A package of our name and features, without dependencies, that builds in a second.
    fn package(source: &str) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        let name = env!("CARGO_PKG_NAME");
        write(
            "Cargo.toml",
            &format!(
                "[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n[[bin]]\nname = \"{name}\"\npath = \"main.rs\"\n\
                 [features]\ndefault = [\"flex\"]\nflex = []\nwgpu = []\nvulkan = [\"wgpu\"]\ntch = []\n[workspace]\n"
            ),
        );
        write("Cargo.lock", &format!("version = 4\n\n[[package]]\nname = \"{name}\"\nversion = \"0.1.0\"\n"));
        write("main.rs", source);
        fs::create_dir(folder.path().join(".cargo")).unwrap();
        // Not the folder that the tests themselves were built in.
        write(".cargo/config.toml", "[term]\ncolor = \"always\"\n");
        folder
    }

    /// What becomes of it, and the log.
    fn built(package: &TempDir, limit: Duration) -> (Build, String) {
        let log = package.path().join("build.log");
        // Not the folder that this program was built in, which is in use.
        let target = package.path().join("target");
        let folders = Folders { root: package.path().to_owned(), build: target.clone(), target };
        let build = build(&folders, &log, limit, &Interruption::default(), |_| Ok(())).unwrap();
        (build, fs::read_to_string(log).unwrap())
    }

    const LONG: Duration = Duration::from_secs(300);

    #[test]
    fn what_compiles_is_a_program_that_can_be_run() {
        let package = package("fn main() { let unused = 1; println!(\"runs\"); }");
        let (build, log) = built(&package, LONG);
        let Outcome::Built { executable } = &build.outcome else { panic!("{build:?} {log}") };
        assert_eq!(Command::new(executable).output().unwrap().stdout, b"runs\n");
        assert!(log.contains("warning: unused variable: `unused`") && log.contains("Finished `release`"), "{log}");
        assert!(!log.contains('\x1b') && log.lines().all(|line| !line.starts_with('{')), "{log}");
        // With nothing to do, it is found all the same.
        assert_eq!(built(&package, LONG).0.outcome, build.outcome);
    }

    #[test]
    fn what_does_not_compile_gives_the_compilers_first_error() {
        let package = package("fn main() {\n    let first: u32 = \"text\";\n    let second: u32 = 1.5;\n}");
        let (build, log) = built(&package, LONG);
        let Outcome::Failed { first_error } = build.outcome else { panic!("{build:?} {log}") };
        assert!(first_error.starts_with("error[E0308]: mismatched types\n --> main.rs:2:22"), "{first_error}");
        assert!(!first_error.contains("main.rs:3") && !first_error.contains('\x1b'), "{first_error}");
        assert!(log.contains("main.rs:3:23") && log.contains("could not compile"), "{log}");
        assert_eq!(build.ended.how, How::Exited(101));
    }

    #[test]
    fn what_is_no_fault_of_the_program_is_told_in_cargos_words() {
        let package = package("fn main() {}");
        fs::write(package.path().join("Cargo.lock"), "").unwrap();
        let (build, log) = built(&package, LONG);
        let Outcome::CargoFailed { last_lines } = build.outcome else { panic!("{build:?} {log}") };
        assert!(last_lines.contains("Cargo.lock") && last_lines.contains("--locked"), "{last_lines}");
    }

    #[test]
    fn a_build_that_takes_too_long_is_stopped() {
        let package = package("fn main() {}");
        fs::write(package.path().join("build.rs"), "fn main() { loop { std::thread::park(); } }").unwrap();
        let (build, _) = built(&package, Duration::from_secs(3));
        assert_eq!((build.outcome, build.ended.how), (Outcome::Stopped, How::TimedOut));
    }

    #[test]
    fn a_full_disk_is_not_the_programs_fault() {
        let message = |text: &str| serde_json::json!({"reason": "compiler-message", "message": {"level": "error", "rendered": text}});
        let mut messages = Messages::default();
        messages.add(&message("error: failed to write `x.rmeta`: No space left on device (os error 28)\n"));
        assert_eq!(messages.first_error, None);
        messages.add(&message("error[E0425]: cannot find value `x`\n"));
        messages.add(&message("error: aborting due to 1 previous error\n"));
        assert_eq!(messages.first_error.as_deref(), Some("error[E0425]: cannot find value `x`\n"));
    }

    #[test]
    fn every_feature_of_the_package_is_known() {
        let manifest: toml::Table =
            toml::from_str(&fs::read_to_string(Path::new(ROOT).join("Cargo.toml")).unwrap()).unwrap();
        let known = ["default", "flex", "wgpu", "vulkan", "autotune", "tch"];
        for name in manifest["features"].as_table().unwrap().keys() {
            assert!(known.contains(&&**name), "{name}");
        }
        assert!(features().iter().all(|name| known.contains(name)));
        assert_eq!(features().contains(&"tch"), cfg!(feature = "tch"));
    }
}
