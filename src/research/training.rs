//! One training of a built commit in a process of its own.

use crate::output::tell;
use crate::process::{self, How, Input, Interruption, ProcessId, Supervision};
use crate::research::crash::{self, Crash};
use crate::research::interruption::Interrupted;
use crate::research::study::Study;
use crate::run::{self, Summary};
use anyhow::{Result, anyhow, bail};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Which run: the same folder holds the same run again after a crash of this process.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    pub program: &'a Path,
    pub commit: &'a str,
    pub folder: &'a Path,
    /// Instead of the study's.
    pub seed: Option<u64>,
}

/// Trains and evaluates; a run that came to its end before this process was started counts as well.
///
/// # Errors
/// If the folder cannot be written, the program not started, or the user interrupts. A training that fails is a [`Crash`].
pub fn measure(
    study: &Study,
    run: Run,
    interruption: &Interruption,
    on_spawn: impl FnOnce(&ProcessId) -> Result<()>,
) -> Result<std::result::Result<Summary, Crash>> {
    let Run { program, commit, folder, seed } = run;
    if let Some(summary) = finished(folder, commit) {
        return Ok(Ok(summary));
    }
    fs::create_dir_all(folder).map_err(|error| {
        anyhow!("{}: cannot be made ({error}); hint: check that it may be written", folder.display())
    })?;
    run::clear(folder)?;
    let mut command = Command::new(program);
    command.arg("train").args(&study.settings.train_arguments).arg("--run-dir").arg(folder).arg("--end-with-stdin");
    if let Some(seed) = seed {
        command.args(["--seed", &seed.to_string()]);
    }
    command.current_dir(study.repository.root());
    let supervision = Supervision {
        limit: Duration::from_secs_f64(study.settings.limit_seconds),
        // It has nothing to put in order, and a hung driver ignores all else.
        grace: Duration::ZERO,
        interruption: interruption.clone(),
    };
    let log = folder.join("run.log");
    tell(format_args!("training, {:.0} s at most: {}", study.settings.limit_seconds, log.display()));
    let ended = process::run(command, Input::HeldOpen, &log, &supervision, on_spawn)?;
    if ended.how == How::Interrupted {
        bail!(Interrupted);
    }
    Ok(crash::classify(folder, &ended, &log))
}

/// The whole result of an earlier run of `commit` in `folder`.
fn finished(folder: &Path, commit: &str) -> Option<Summary> {
    let is_of_commit = fs::read_to_string(folder.join("commit.txt")).is_ok_and(|text| text.trim() == commit);
    let summary = Summary::read(folder).ok().flatten()?;
    (is_of_commit && summary.val_bpb.is_finite()).then_some(summary)
}
