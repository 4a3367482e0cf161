//! `runs/<id>/`: everything that one run leaves, written as it goes.

use super::{WEIGHTS, failure, phases, summary};
use crate::atomic_file::write_atomically;
use crate::tokenizer::{HEADER_FILE, RANKS_FILE};
use anyhow::{Result, anyhow, bail};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The model file as this program was built from it.
const MODEL_SOURCE: &str = include_str!("../model.rs");
/// The optimizer file as this program was built from it.
const OPTIM_SOURCE: &str = include_str!("../optim.rs");

/// Name of the file that gets a line for each step.
const METRICS: &str = "metrics.jsonl";

/// What a run writes, besides `phase.json`.
const FILES: [&str; 10] = [
    "config.json",
    "model.rs",
    "optim.rs",
    "commit.txt",
    RANKS_FILE,
    HEADER_FILE,
    METRICS,
    WEIGHTS,
    summary::FILE,
    failure::FILE,
];

/// Where a run's folder is.
#[derive(Clone, Debug)]
pub enum RunPlace {
    /// A new folder in this one, named after the time.
    NewIn(PathBuf),
    /// This folder, which [`clear`] has made.
    At(PathBuf),
}

/// A run's own folder.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    metrics: File,
}

impl RunFolder {
    /// Makes the folder and writes what the run starts from: `config.json` (`config`), `model.rs`, `optim.rs` and
    /// `commit.txt`.
    ///
    /// # Errors
    /// If the folder or a file in it cannot be written.
    pub fn create(place: &RunPlace, config: &impl Serialize) -> Result<Self> {
        let path = match place {
            RunPlace::NewIn(root) => new_folder(root)?,
            RunPlace::At(folder) => folder.clone(),
        };
        let metrics = path.join(METRICS);
        let opened = OpenOptions::new().create(true).append(true).open(&metrics);
        let metrics = opened.map_err(|error| unwritable(&metrics, &error))?;
        let folder = Self { path, metrics };
        folder.write_json("config.json", config)?;
        folder.write("model.rs", MODEL_SOURCE.as_bytes())?;
        folder.write("optim.rs", OPTIM_SOURCE.as_bytes())?;
        folder.write("commit.txt", format!("{}\n", commit()).as_bytes())?;
        Ok(folder)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends one line to `metrics.jsonl`.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn append_metrics(&mut self, metrics: &impl Serialize) -> Result<()> {
        let line = serde_json::to_string(metrics)?;
        writeln!(self.metrics, "{line}").map_err(|error| unwritable(&self.path.join(METRICS), &error))
    }

    /// Writes `value` to the file `name`, whole or not at all.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write_json(&self, name: &str, value: &impl Serialize) -> Result<()> {
        write_json(&self.path.join(name), value)
    }

    fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        write_atomically(&self.path.join(name), bytes)
    }
}

/// Makes the folder at `path` where it is missing, and removes what an earlier run left in it.
///
/// # Errors
/// If that cannot be done, or the folder holds such files that no run wrote.
pub fn clear(path: &Path) -> Result<()> {
    let hint = "hint: name another folder with --run-dir";
    fs::create_dir_all(path)
        .map_err(|error| anyhow!("{}: cannot make the run's folder ({error}); {hint}", path.display()))?;
    let left: Vec<&str> = FILES.into_iter().filter(|name| path.join(name).exists()).collect();
    // A run writes it before all others.
    if let (Some(name), false) = (left.first(), path.join(phases::FILE).exists()) {
        bail!(
            "{}: expected a new folder or a run's, found {name} and no {}, which would be overwritten; {hint}",
            path.display(),
            phases::FILE
        );
    }
    for name in left {
        let file = path.join(name);
        fs::remove_file(&file)
            .map_err(|error| anyhow!("{}: cannot remove an earlier run's file ({error}); {hint}", file.display()))?;
    }
    Ok(())
}

/// Writes `value` to the file at `path`, whole or not at all.
///
/// # Errors
/// If it cannot be written.
pub(super) fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    write_atomically(path, format!("{}\n", serde_json::to_string_pretty(value)?).as_bytes())
}

/// Reads what [`write_json`] wrote; none if there is no such file.
///
/// # Errors
/// If it cannot be read or holds something else.
pub(super) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    let hint = "hint: a run writes this file; make the run again";
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => bail!("{}: cannot read the file ({error}); {hint}", path.display()),
    };
    let value = serde_json::from_str(&text)
        .map_err(|error| anyhow!("{}: expected what a run writes, found: {error}; {hint}", path.display()))?;
    Ok(Some(value))
}

/// Removes the weights of the run in `run`, if there are any.
///
/// # Errors
/// If they cannot be removed.
pub fn remove_weights(run: &Path) -> Result<()> {
    let weights = run.join(WEIGHTS);
    match fs::remove_file(&weights) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(anyhow!("{}: cannot be removed ({error}); hint: check its folder's permissions", weights.display()))
        }
        _ => Ok(()),
    }
}

fn unwritable(path: &Path, error: &std::io::Error) -> anyhow::Error {
    anyhow!("{}: cannot write the file ({error}); hint: check that there is free space", path.display())
}

fn new_folder(root: &Path) -> Result<PathBuf> {
    let hint = "hint: run in a folder that you may write to, or name one with --runs-dir";
    fs::create_dir_all(root)
        .map_err(|error| anyhow!("{}: cannot make the folder for runs ({error}); {hint}", root.display()))?;
    let time = chrono::Local::now().format("%Y%m%d-%H%M%S");
    for attempt in 1..1000 {
        let id = if attempt == 1 { time.to_string() } else { format!("{time}-{attempt}") };
        let path = root.join(id);
        match fs::create_dir(&path) {
            Ok(()) => return Ok(path),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => bail!("{}: cannot make the run's folder ({error}); {hint}", path.display()),
        }
    }
    bail!("{} holds 999 runs of this second, expected fewer; {hint}", root.display())
}

/// The commit of the sources that this program was built from, with `-dirty` where tracked files differ from it or the
/// model or optimizer file from what was built; `unknown` where they are no git repository any more.
fn commit() -> String {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR"));
    let git = |arguments: &[&str]| {
        let output = Command::new("git").current_dir(sources).args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let Some(commit) = git(&["rev-parse", "HEAD"]) else { return "unknown".to_owned() };
    let changed = git(&["status", "--porcelain", "--untracked-files=no"]).is_none_or(|changes| !changes.is_empty());
    let is_built =
        |name: &str, built: &str| fs::read_to_string(sources.join("src").join(name)).is_ok_and(|now| now == built);
    let is_current = is_built("model.rs", MODEL_SOURCE) && is_built("optim.rs", OPTIM_SOURCE);
    if changed || !is_current { format!("{commit}-dirty") } else { commit }
}

/// Whether the run in `run` was made with the model file that this program was built from.
pub fn has_this_model(run: &Path) -> bool {
    fs::read_to_string(run.join("model.rs")).is_ok_and(|then| then == MODEL_SOURCE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_the_same_second_get_folders_of_their_own() {
        let root = tempfile::tempdir().unwrap();
        let folders: Vec<PathBuf> = (0..3).map(|_| new_folder(root.path()).unwrap()).collect();
        assert!(folders.iter().all(|folder| folder.is_dir()));
        assert_ne!(folders[0], folders[1]);
        assert_ne!(folders[1], folders[2]);
    }

    #[test]
    fn a_run_starts_with_its_sources_and_configuration() {
        let root = tempfile::tempdir().unwrap();
        let mut folder =
            RunFolder::create(&RunPlace::NewIn(root.path().to_path_buf()), &serde_json::json!({"seed": 1})).unwrap();
        folder.append_metrics(&serde_json::json!({"step": 0})).unwrap();
        let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
        assert_eq!(read("model.rs"), MODEL_SOURCE);
        assert!(read("config.json").contains("\"seed\": 1"));
        assert_eq!(read("metrics.jsonl"), "{\"step\":0}\n");
        assert!(!read("commit.txt").trim().is_empty());
    }

    #[test]
    fn an_unwritable_root_is_named() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("file");
        fs::write(&file, "").unwrap();
        let error = RunFolder::create(&RunPlace::NewIn(file.join("runs")), &()).unwrap_err();
        assert!(format!("{error:#}").contains("--runs-dir"), "{error:#}");
    }

    #[test]
    fn only_what_a_run_left_is_cleared() {
        let root = tempfile::tempdir().unwrap();
        let run = root.path().join("some/run");
        clear(&run).unwrap();
        let write = |name: &str| fs::write(run.join(name), "text").unwrap();
        ["run.log", "model.rs", "summary.json"].into_iter().for_each(write);
        // As the folder `src` looks.
        let message = clear(&run).unwrap_err().to_string();
        assert!(message.contains("model.rs and no phase.json") && message.contains("--run-dir"), "{message}");
        assert!(run.join("summary.json").exists());
        write("phase.json");
        clear(&run).unwrap();
        let mut left: Vec<_> = fs::read_dir(&run).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["phase.json", "run.log"]);
    }
}
