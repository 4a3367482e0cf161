//! The folder in which commits are built: a work tree of its own, so that what is measured is the commit and nothing else, and
//! the user may go on editing meanwhile.

use crate::output::tell;
use crate::process::{How, Interruption, ProcessId};
use crate::research::compile::{self, Folders, Outcome};
use crate::research::interruption::Interrupted;
use crate::research::study::{Study, short};
use crate::tokenizer::hexadecimal;
use anyhow::{Context, Result, anyhow, bail, ensure};
use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Settings of cargo that git does not track; `scripts/setup-libtorch` writes them.
const CARGO_SETTINGS: &str = ".cargo/config.toml";
/// Longest that a build may take: a first one compiles every dependency.
const LIMIT: Duration = Duration::from_secs(3600);

/// A commit that was built, or does not compile.
#[derive(Clone, Debug)]
pub struct Built {
    /// The program, or the compiler's first error.
    pub program: std::result::Result<PathBuf, String>,
    pub duration: Duration,
}

/// Builds `commit` with the dependencies that the user's own builds have compiled; what cargo says goes to `log`.
///
/// # Errors
/// If git or cargo fail (not if the commit does not compile), or the user interrupts.
pub fn build(
    study: &Study,
    commit: &str,
    log: &Path,
    interruption: &Interruption,
    on_spawn: impl FnOnce(&ProcessId) -> Result<()>,
) -> Result<Built> {
    let folder = study.checkout();
    let settings = Settings::of(study.repository.root())?;
    ensure!(
        settings.sha256() == study.settings.cargo_settings_sha256,
        "{CARGO_SETTINGS}: expected it as it was when the branch was started, found a change, which other numbers may come from; hint: put it back, or `start` a new branch"
    );
    study.repository.checkout(&folder, commit)?;
    settings.copy_to(&folder)?;
    // The program lies where no other build replaces it while it runs.
    let target = study.work_folder().join("target");
    let folders = Folders::beside(study.repository.root(), folder, target)?;
    tell(format_args!("building {}: {}", short(commit), log.display()));
    let build = compile::build(&folders, log, LIMIT, interruption, on_spawn)?;
    let program = match build.outcome {
        Outcome::Built { executable } => Ok(executable),
        Outcome::Failed { first_error } => Err(first_error),
        Outcome::Stopped if build.ended.how == How::Interrupted => bail!(Interrupted),
        Outcome::Stopped => Err(format!("the build took longer than {LIMIT:?}")),
        Outcome::CargoFailed { last_lines } => bail!(
            "commit {}: expected cargo to build it, found: {}; hint: it is no fault of the edit; see {}",
            short(commit),
            last_lines.replace('\n', " / "),
            log.display()
        ),
    };
    Ok(Built { program, duration: build.ended.wall })
}

/// Settings of cargo that git does not track, if there are any.
#[derive(Debug)]
pub struct Settings(Option<Vec<u8>>);

impl Settings {
    /// Those of the work tree `root`.
    ///
    /// # Errors
    /// If they are there and cannot be read.
    pub fn of(root: &Path) -> Result<Self> {
        let path = root.join(CARGO_SETTINGS);
        match fs::read(&path) {
            Ok(settings) => Ok(Self(Some(settings))),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Self(None)),
            Err(error) => Err(anyhow!("{}: cannot be read ({error}); hint: check its permissions", path.display())),
        }
    }

    /// In hexadecimal.
    pub fn sha256(&self) -> Option<String> {
        self.0.as_ref().map(|settings| hexadecimal(&Sha256::digest(settings)))
    }

    fn copy_to(&self, folder: &Path) -> Result<()> {
        let path = folder.join(CARGO_SETTINGS);
        // An unchanged file stays: cargo goes by the time of the change.
        let done = match (&self.0, fs::read(&path)) {
            (Some(settings), Ok(there)) if *settings == there => Ok(()),
            (Some(settings), _) => fs::create_dir_all(folder.join(".cargo")).and_then(|()| fs::write(&path, settings)),
            (None, Ok(_)) => fs::remove_file(&path),
            (None, Err(_)) => Ok(()),
        };
        done.with_context(|| format!("{}: cannot be written; hint: git's folder must be writable", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_follow_the_work_trees_and_are_known_by_their_hash() {
        let [from, to] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let (original, copy) = (from.path().join(CARGO_SETTINGS), to.path().join(CARGO_SETTINGS));
        fs::create_dir(from.path().join(".cargo")).unwrap();
        assert_eq!(Settings::of(from.path()).unwrap().sha256(), None);
        let mut hashes = Vec::new();
        for text in ["[env]", "[build]"] {
            fs::write(&original, text).unwrap();
            let settings = Settings::of(from.path()).unwrap();
            settings.copy_to(to.path()).unwrap();
            assert_eq!(fs::read_to_string(&copy).unwrap(), text);
            hashes.extend(settings.sha256());
        }
        assert_ne!(hashes[0], hashes[1]);
        fs::remove_file(&original).unwrap();
        Settings::of(from.path()).unwrap().copy_to(to.path()).unwrap();
        assert!(!copy.exists());
    }
}
