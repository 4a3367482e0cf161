//! The folder in which commits are built: a work tree of its own, so that what is measured is the commit and nothing else, and
//! the user may go on editing meanwhile.

use crate::research::compile::{self, Folders, Outcome};
use crate::research::interruption::Interrupted;
use crate::research::process::{How, Interruption, ProcessId};
use crate::research::study::{Study, short};
use anyhow::{Context, Result, bail};
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
    study.repository.checkout(&folder, commit)?;
    copy_settings(study.repository.root(), &folder)?;
    // The program lies where no other build replaces it while it runs.
    let target = study.work_folder().join("target");
    let folders = Folders::beside(study.repository.root(), folder, target)?;
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

fn copy_settings(from: &Path, to: &Path) -> Result<()> {
    let [from, to]: [PathBuf; 2] = [from, to].map(|root| root.join(CARGO_SETTINGS));
    let Ok(settings) = fs::read(&from) else { return Ok(()) };
    // An unchanged file stays: cargo goes by the time of the change.
    if fs::read(&to).is_ok_and(|there| there == settings) {
        return Ok(());
    }
    let folder = to.parent().context("the path has a folder")?;
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(&to, settings))
        .with_context(|| format!("{}: cannot be written; hint: git's folder must be writable", to.display()))
}
