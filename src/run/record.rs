//! What a run tells whoever started it: `phase.json` as it goes, `failure.json` if it fails.

use super::failure::{self, Failure, FailureKind};
use super::folder::write_json;
use super::phases::{self, Phase, Phases};
use super::watchdog::end_now;
use anyhow::Result;
use std::fs;
use std::io::Write;
use std::panic;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The record of the run that this process makes, for threads that nobody gave it to.
static CURRENT: OnceLock<Record> = OnceLock::new();

/// A run's record; clones write to the same one.
#[derive(Clone, Debug)]
pub struct Record {
    started: Instant,
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    /// Where to write, once there is a place.
    folder: Option<PathBuf>,
    phases: Phases,
    /// A thread has panicked; the run may go on.
    has_panicked: bool,
}

impl Record {
    /// Begins a record: the run is starting up from now on.
    pub fn start() -> Self {
        let phases = Phases { phase: Phase::StartUp, began: [(Phase::StartUp, 0.0)].into() };
        let state = State { folder: None, phases, has_panicked: false };
        Self { started: Instant::now(), state: Arc::new(Mutex::new(state)) }
    }

    /// Time since the start.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Writes to `folder` from now on.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn lie_in(&self, folder: &Path) -> Result<()> {
        let phases = {
            let mut state = self.lock();
            state.folder = Some(folder.to_path_buf());
            state.phases.clone()
        };
        write_json(&folder.join(phases::FILE), &phases)
    }

    /// The run comes to `phase`; gives the time since the start.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn enter(&self, phase: Phase) -> Result<Duration> {
        let elapsed = self.elapsed();
        let (folder, phases) = {
            let mut state = self.lock();
            state.phases.phase = phase;
            state.phases.began.insert(phase, elapsed.as_secs_f64());
            (state.folder.clone(), state.phases.clone())
        };
        if let Some(folder) = folder {
            if phase == Phase::Done {
                // Of a thread whose panic did the run no harm.
                fs::remove_file(folder.join(failure::FILE)).ok();
            }
            write_json(&folder.join(phases::FILE), &phases)?;
        }
        Ok(elapsed)
    }

    /// The run ends with `error`.
    pub fn fail_with(&self, error: &anyhow::Error) {
        let kind = FailureKind::of(error);
        // What comes after a panic in another thread is mostly its consequence.
        if kind != FailureKind::Error || !self.lock().has_panicked {
            self.fail(kind, format!("{error:#}"));
        }
    }

    /// The run ends, which `message` explains; a folder that cannot be written only gets a warning.
    pub fn fail(&self, kind: FailureKind, message: String) {
        // Not locked while writing: a panic may come here, too.
        let (folder, phase) = {
            let mut state = self.lock();
            state.has_panicked |= kind == FailureKind::Panic;
            (state.folder.clone(), state.phases.phase)
        };
        let Some(folder) = folder else { return };
        if let Err(error) = write_json(&folder.join(failure::FILE), &Failure { kind, phase, message }) {
            tracing::warn!("{error}");
        }
    }

    /// From now on, panics of any thread are written down, after what is usually said about them, and so is what
    /// [`give_up`] says.
    pub fn note_panics(&self) {
        CURRENT.set(self.clone()).ok();
        let usual = panic::take_hook();
        let record = self.clone();
        panic::set_hook(Box::new(move |panic| {
            usual(panic);
            let message = panic.payload_as_str().unwrap_or("no message");
            let place = panic.location().map_or(String::new(), |location| format!(" at {location}"));
            record.fail(FailureKind::Panic, format!("panicked{place}: {message}"));
        }));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends the process with `message` as its error, whatever its other threads do.
pub fn give_up(message: &str) -> ! {
    if let Some(record) = CURRENT.get() {
        record.fail(FailureKind::Error, message.to_owned());
    }
    writeln!(std::io::stderr(), "error: {message}").ok();
    end_now()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::DataError;
    use anyhow::anyhow;
    use tempfile::TempDir;

    fn recorded() -> (TempDir, Record) {
        let folder = tempfile::tempdir().unwrap();
        let record = Record::start();
        record.lie_in(folder.path()).unwrap();
        (folder, record)
    }

    fn failure_of(folder: &TempDir) -> Option<(FailureKind, Phase)> {
        Failure::read(folder.path()).unwrap().map(|failure| (failure.kind, failure.phase))
    }

    #[test]
    fn each_phase_is_written_when_it_begins_and_the_ones_before_it_stay() {
        let (folder, record) = recorded();
        let read = || Phases::read(folder.path()).unwrap().unwrap();
        assert_eq!(read(), Phases { phase: Phase::StartUp, began: [(Phase::StartUp, 0.0)].into() });
        let training = record.enter(Phase::Training).unwrap().as_secs_f64();
        let evaluation = record.enter(Phase::Evaluation).unwrap().as_secs_f64();
        let began = [(Phase::StartUp, 0.0), (Phase::Training, training), (Phase::Evaluation, evaluation)];
        assert_eq!(read(), Phases { phase: Phase::Evaluation, began: began.into() });
        assert!(0.0 < training && training < evaluation);
        let text = fs::read_to_string(folder.path().join("phase.json")).unwrap();
        assert!(text.contains("\"phase\": \"evaluation\"") && text.contains("\"start_up\": 0.0"), "{text}");
    }

    #[test]
    fn a_failure_is_written_with_its_kind_phase_and_message() {
        let (folder, record) = recorded();
        record.enter(Phase::Training).unwrap();
        record.fail_with(&anyhow!(DataError::from(anyhow!("cut").context("a.parquet"))));
        let failure = Failure::read(folder.path()).unwrap().unwrap();
        let message = "a.parquet: cut".to_owned();
        assert_eq!(failure, Failure { kind: FailureKind::Data, phase: Phase::Training, message });
    }

    #[test]
    fn a_panic_is_the_cause_of_errors_after_it_unless_they_say_more_or_the_run_gets_through() {
        let (folder, record) = recorded();
        record.fail(FailureKind::Panic, "panicked".to_owned());
        record.fail_with(&anyhow!("a thread is gone"));
        assert_eq!(failure_of(&folder), Some((FailureKind::Panic, Phase::StartUp)));
        record.fail_with(&anyhow!(DataError::from(anyhow!("a loader thread panicked"))));
        assert_eq!(failure_of(&folder), Some((FailureKind::Data, Phase::StartUp)));
        record.enter(Phase::Done).unwrap();
        assert_eq!(failure_of(&folder), None);
    }

    #[test]
    fn a_panic_of_any_thread_is_written_down_with_its_place_after_the_usual_words() {
        // In a process of its own, since what is done at a panic is one for all threads: this test again.
        const FOLDER: &str = "AUTORESEARCH_TEST_PANIC_FOLDER";
        if let Some(folder) = std::env::var_os(FOLDER) {
            let record = Record::start();
            record.lie_in(Path::new(&folder)).unwrap();
            record.enter(Phase::Evaluation).unwrap();
            record.note_panics();
            let panicked = std::thread::spawn(|| panic!("out of {}", "bounds")).join();
            assert!(panicked.is_err());
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let name = "run::record::tests::a_panic_of_any_thread_is_written_down_with_its_place_after_the_usual_words";
        let mut this_test = std::process::Command::new(std::env::current_exe().unwrap());
        this_test.args([name, "--exact", "--nocapture"]).env(FOLDER, folder.path());
        let output = this_test.output().unwrap();
        let usual = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && usual.contains("panicked at src/run/record.rs:"), "{usual}");
        let Failure { kind, phase, message } = Failure::read(folder.path()).unwrap().unwrap();
        assert_eq!((kind, phase), (FailureKind::Panic, Phase::Evaluation));
        assert!(
            message.starts_with("panicked at src/run/record.rs:") && message.ends_with(": out of bounds"),
            "{message}"
        );
    }

    #[test]
    fn without_a_folder_nothing_is_written_and_nothing_fails() {
        let record = Record::start();
        record.enter(Phase::Training).unwrap();
        record.fail(FailureKind::Timeout, "slow".to_owned());
    }
}
