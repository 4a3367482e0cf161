//! The folders of experiments' runs: room for them, what earlier ones left, and what is not worth keeping.

use crate::research::decision::Status;
use crate::research::ledger::Record;
use crate::research::study::Study;
use crate::run;
use anyhow::{Context, Result, anyhow, ensure};
use std::fs;
use std::path::{Path, PathBuf};

/// Free space that a run needs where none has been made yet: weights, log and metrics of a small model.
const SMALLEST_SPACE: u64 = 32 << 20;
/// Folder in a run's for runs with other seeds.
pub const CONFIRMATIONS: &str = "confirm";

/// Gives another name to a folder that an earlier experiment of the same name, or somebody else, has left.
///
/// # Errors
/// If it cannot be renamed.
pub fn put_aside(run_dir: &Path) -> Result<()> {
    if fs::symlink_metadata(run_dir).is_err() {
        return Ok(());
    }
    let other = |count: usize| run_dir.with_extension(format!("old-{count}"));
    let free = (1..).map(other).find(|path| !path.exists()).context("there is a free name")?;
    fs::rename(run_dir, &free)
        .map_err(|error| anyhow!("{}: cannot be renamed ({error}); hint: move it away", run_dir.display()))
}

/// Removes the weights of what is not kept, and those of confirmations: some hundred megabytes a run.
///
/// # Errors
/// If a file cannot be removed.
pub fn remove_weights(record: &Record) -> Result<()> {
    let mut folders: Vec<PathBuf> = Vec::new();
    if record.status != Status::Keep {
        folders.push(record.run_dir.clone());
    }
    let confirmations = fs::read_dir(record.run_dir.join(CONFIRMATIONS)).into_iter().flatten().flatten();
    folders.extend(confirmations.map(|entry| entry.path()));
    folders.iter().try_for_each(|folder| run::remove_weights(folder))
}

/// Refuses when the runs' folder has less room than a run takes.
///
/// # Errors
/// If it has, cannot be written, or its free space is not known.
pub fn require_space(study: &Study) -> Result<()> {
    let runs = &study.settings.runs_dir;
    fs::create_dir_all(runs).map_err(|error| {
        anyhow!("{}: cannot make the folder for runs ({error}); hint: check that it may be written, or `start` with another --runs-dir", runs.display())
    })?;
    // Says at once what a run would find out after the build.
    tempfile::Builder::new().prefix(".writable").tempfile_in(runs).map_err(|error| {
        anyhow!(
            "{}: expected a folder that may be written, found: {error}; hint: check its permissions and free space",
            runs.display()
        )
    })?;
    let records = study.ledger.records(&study.tag)?;
    let largest = records.iter().map(|record| folder_size(&record.run_dir)).max().unwrap_or_default();
    let needed = (largest + largest / 2).max(SMALLEST_SPACE);
    let free = fs4::available_space(runs).map_err(|error| {
        anyhow!("{}: its free space cannot be read ({error}); hint: does it exist?", runs.display())
    })?;
    ensure!(
        free >= needed,
        "{}: expected {} MiB of free space for a run, found {}; hint: remove old runs' folders",
        runs.display(),
        needed >> 20,
        free >> 20
    );
    Ok(())
}

/// Bytes of the files in `folder`, not of those in folders in it.
fn folder_size(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.metadata().ok()).filter(|metadata| metadata.is_file()).map(|file| file.len()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_earlier_run_left_is_put_aside_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("t1-001");
        for content in ["first", "second"] {
            put_aside(&run).unwrap();
            fs::create_dir(&run).unwrap();
            fs::write(run.join("summary.json"), content).unwrap();
        }
        put_aside(&run).unwrap();
        let read = |name: &str| fs::read_to_string(folder.path().join(name).join("summary.json")).unwrap();
        assert_eq!([read("t1-001.old-1"), read("t1-001.old-2")], ["first", "second"]);
        assert!(!run.exists());
    }
}
