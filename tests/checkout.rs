//! A copy of the project in a git repository of its own, in which a test may edit, commit, build and train.
//!
//! Builds there take the dependencies that are compiled already: they share cargo's build folder with the build of these tests
//! (`build.build-dir`), but not the folder of finished programs, so that the program that other tests run stays as it is.
//! What cargo compiles of the project itself goes by another name there, for it is compiled under another profile.

use crate::place::please_rocm;
use autoresearch::research::compile::features;
use std::collections::BTreeSet;
use std::env::consts::EXE_SUFFIX;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// A git repository on the branch `main` with one commit: the project's files as they are in the working tree.
pub struct Checkout {
    /// Holds the project, and beside it what is built of it and the cache.
    root: PathBuf,
    /// Removes `root` in the end, unless it is the one that is kept.
    _temporary: Option<TempDir>,
    /// Held while the kept one is in use.
    _lock: Option<File>,
}

impl Checkout {
    /// A checkout in a temporary folder, for what needs no building.
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let checkout = Self { root: folder.path().to_owned(), _temporary: Some(folder), _lock: None };
        checkout.fill();
        checkout
    }

    /// The checkout to build in. There is one, with the same path each time, so that a build goes on from the one before:
    /// whoever asks for it waits until the last who did has dropped it, in this process or another.
    pub fn to_build() -> Self {
        let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("checkout");
        fs::create_dir_all(&root).unwrap();
        let lock = File::create(root.join("lock")).unwrap();
        lock.lock().unwrap();
        let checkout = Self { root, _temporary: None, _lock: Some(lock) };
        checkout.fill();
        checkout
    }

    /// The project's folder.
    pub fn path(&self) -> PathBuf {
        self.root.join("project")
    }

    /// `program` in the project's folder, in an environment in which it, and every cargo and git that it starts, behaves as
    /// [`Checkout::build`] and [`Checkout::git`] do.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.path());
        forget_the_caller(&mut command);
        command.env("CARGO_TARGET_DIR", self.root.join("target")).env("CARGO_BUILD_BUILD_DIR", build_folder());
        command.env("AUTORESEARCH_CACHE_DIR", self.root.join("cache")).env_remove("RUST_BACKTRACE");
        please_rocm(&mut command);
        command
    }

    /// What git says to `arguments`, without the space around it.
    ///
    /// # Panics
    /// If git fails.
    #[track_caller]
    pub fn git(&self, arguments: &[&str]) -> String {
        let bytes = output_of(self.command("git").args(arguments));
        String::from_utf8(bytes).unwrap().trim().to_owned()
    }

    /// Builds the program with the features of these tests.
    ///
    /// # Errors
    /// What cargo says if it does not compile.
    pub fn build(&self) -> Result<PathBuf, String> {
        // The cargo that runs these tests, if one does.
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let output = self.command(cargo).args(["build", "--locked", "--bins"]).args(cargo_flags()).output().unwrap();
        let messages = String::from_utf8_lossy(&output.stderr);
        if output.status.success() { Ok(self.program()) } else { Err(messages.into_owned()) }
    }

    /// Where [`Checkout::build`] leaves the program.
    pub fn program(&self) -> PathBuf {
        let profile = if cfg!(debug_assertions) { "debug" } else { "release" };
        self.root.join("target").join(profile).join(format!("autoresearch{EXE_SUFFIX}"))
    }

    /// Makes the project's folder what it shall be. Files that are right are left alone: cargo goes by their times.
    fn fill(&self) {
        let (source, project) = (Path::new(env!("CARGO_MANIFEST_DIR")), self.path());
        let mut list = Command::new("git");
        forget_the_caller(&mut list);
        // Whoever owns the folder.
        list.args(["-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
        let listed = output_of(list.current_dir(source));
        let listed = String::from_utf8_lossy(&listed);
        let names = listed.split('\0').map(PathBuf::from);
        let mut files: BTreeSet<PathBuf> = names.filter(|name| source.join(name).is_file()).collect();
        assert!(files.contains(Path::new("Cargo.toml")), "expected a git repository with the project's files");
        // What scripts/setup-libtorch wrote, which git ignores.
        let settings = Path::new(".cargo/config.toml");
        files.extend(Some(settings.to_owned()).filter(|name| source.join(name).is_file()));

        fs::create_dir_all(&project).unwrap();
        // Data sets are prepared anew: another version of the program may have made them.
        fs::remove_dir_all(self.root.join("cache")).or_else(absent_is_fine).unwrap();
        remove_others(&project, Path::new(""), &files);
        for name in &files {
            let (original, copy) = (source.join(name), project.join(name));
            if fs::read(&original).unwrap() != fs::read(&copy).unwrap_or_default() || !copy.exists() {
                fs::create_dir_all(copy.parent().unwrap()).unwrap();
                fs::copy(&original, &copy).unwrap();
            }
        }
        // Cargo reads the settings of the folders above, too.
        let another_profile = "[profile.release.package.autoresearch]\ncodegen-units = 255\n\
                               [profile.dev.package.autoresearch]\ncodegen-units = 255\n";
        fs::create_dir_all(self.root.join(".cargo")).unwrap();
        fs::write(self.root.join(".cargo/config.toml"), another_profile).unwrap();

        self.git(&["init", "--quiet", "--initial-branch=main", "--template="]);
        let settings = [
            ("user.name", "Test"),
            ("user.email", "test@example.com"),
            ("commit.gpgsign", "false"),
            ("core.hooksPath", ".git/hooks"),
            ("core.autocrlf", "false"),
            ("core.excludesFile", ""),
        ];
        for (key, value) in settings {
            self.git(&["config", key, value]);
        }
        self.git(&["add", "--all"]);
        self.git(&["commit", "--quiet", "--message", "The project"]);
    }
}

fn absent_is_fine(error: io::Error) -> io::Result<()> {
    if error.kind() == ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

/// Removes from the folder `project/within` what is not in `files`, the repository included.
fn remove_others(project: &Path, within: &Path, files: &BTreeSet<PathBuf>) {
    for entry in fs::read_dir(project.join(within)).unwrap() {
        let entry = entry.unwrap();
        let name = within.join(entry.file_name());
        if !entry.file_type().unwrap().is_dir() {
            if !files.contains(&name) {
                fs::remove_file(entry.path()).unwrap();
            }
        } else if files.iter().any(|file| file.starts_with(&name)) {
            remove_others(project, &name, files);
        } else {
            fs::remove_dir_all(entry.path()).unwrap();
        }
    }
}

/// Keeps from `command` what the cargo that runs these tests says of them, and what a git whose hook runs them says of its
/// repository. Build scripts of dependencies look at the former: with them cargo would compile half of the dependencies anew,
/// and without them again.
fn forget_the_caller(command: &mut Command) {
    let prefixes = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_", "CARGO_PRIMARY_", "OUT_DIR", "GIT_"];
    for (name, _) in std::env::vars_os() {
        if prefixes.iter().any(|prefix| name.as_encoded_bytes().starts_with(prefix.as_bytes())) {
            command.env_remove(name);
        }
    }
}

/// Where cargo keeps what it compiles for these tests.
fn build_folder() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap()
}

/// The profile and the features that these tests were built with.
fn cargo_flags() -> Vec<String> {
    let mut flags = vec!["--no-default-features".to_owned(), format!("--features={}", features().join(","))];
    if !cfg!(debug_assertions) {
        flags.push("--release".to_owned());
    }
    flags
}

/// Standard output of a command that must succeed.
#[track_caller]
fn output_of(command: &mut Command) -> Vec<u8> {
    let Output { status, stdout, stderr } = match command.output() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            panic!("{}: expected a program, found none; hint: install it", command.get_program().display())
        }
        result => result.unwrap(),
    };
    assert!(status.success(), "{command:?}: {status} {}", String::from_utf8_lossy(&stderr));
    stdout
}

#[test]
fn a_checkout_is_a_clean_repository_with_the_files_as_they_are() {
    let checkout = Checkout::new();
    assert_eq!(checkout.git(&["branch", "--show-current"]), "main");
    assert_eq!(checkout.git(&["rev-list", "--count", "HEAD"]), "1");
    assert_eq!(checkout.git(&["status", "--porcelain"]), "");
    let model = fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/model.rs")).unwrap();
    assert_eq!(checkout.git(&["show", "HEAD:src/model.rs"]), String::from_utf8(model).unwrap().trim());
    assert_eq!(checkout.git(&["ls-files", ".cargo", "target", "runs"]), "");
}
