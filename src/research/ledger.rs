//! The ledger: `results.tsv` in the familiar five columns, and `results.jsonl` beside it with everything. Only ever appended to.
//!
//! What decisions go by is a copy of `results.jsonl` in git's folder, where nobody cleans or edits.

use crate::atomic_file::write_atomically;
use crate::research::crash::Crash;
use crate::research::decision::{Status, Verdict};
use crate::run::protocol::Protocol;
use anyhow::{Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// File with a row for each experiment.
pub const TABLE: &str = "results.tsv";
/// File with an object for each experiment.
pub const RECORDS: &str = "results.jsonl";

const HEADER: &str = "commit\tval_bpb\tmemory_gb\tstatus\tdescription\n";

/// Where an experiment's time went, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Seconds {
    pub build: f64,
    /// From the training's start to its first step.
    pub start_up: f64,
    /// What the budget counts, or all of a training that had no end.
    pub training: f64,
    pub evaluation: f64,
    /// Confirmation runs.
    pub confirmation: f64,
    /// From the command's start to the record, all of the above included.
    pub total: f64,
}

/// All that is known of one experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Of the branch `autoresearch/<tag>`.
    pub tag: String,
    /// From 0, the baseline.
    pub number: u32,
    pub commit: String,
    /// The kept commit that this one was to beat.
    pub parent: String,
    pub description: String,
    pub status: Status,
    pub verdict: Verdict,
    /// Validation bits per byte; none after a crash.
    pub val_bpb: Option<f64>,
    /// That of `parent`, if it was measured.
    pub best_before: Option<f64>,
    /// Largest difference to it that chance explains, if that was measured.
    pub noise: Option<f64>,
    /// Most memory taken, in MiB.
    pub peak_vram_mb: Option<f64>,
    pub crash: Option<Crash>,
    /// Validation bits per byte of this commit and of its parent on the same new seeds.
    pub confirmations: Vec<Confirmation>,
    pub seconds: Seconds,
    pub tokens_per_second: Option<f64>,
    pub mfu_percent: Option<f64>,
    pub num_steps: Option<usize>,
    #[serde(rename = "num_params_M")]
    pub num_params_m: Option<f64>,
    pub seed: u64,
    /// Name of the configuration.
    pub config: String,
    /// SHA-256 of the configuration with all flags applied, and of the number of steps, if that is the limit.
    pub config_sha256: String,
    /// The device that was found, or as it was asked for after a crash.
    pub device: String,
    /// What must be the same for two numbers to compare; none after a crash before the evaluation.
    pub protocol: Option<Protocol>,
    /// The run's folder.
    pub run_dir: PathBuf,
    /// The edit, as `git apply` takes it.
    pub patch: PathBuf,
    /// When it was recorded, RFC 3339.
    pub time: String,
}

/// Two runs with the same new seed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Confirmation {
    pub seed: u64,
    pub val_bpb: f64,
    /// Of the commit that was to beat.
    pub best: f64,
}

impl Record {
    /// `<tag>-<number>`, also the name of its folder.
    pub fn id(&self) -> String {
        id(&self.tag, self.number)
    }

    /// Memory in GiB, as the familiar column has it; 0 after a crash.
    pub fn memory_gb(&self) -> f64 {
        self.val_bpb.and(self.peak_vram_mb).unwrap_or_default() / 1024.0
    }

    fn row(&self) -> String {
        let commit = &self.commit[..self.commit.len().min(7)];
        format!(
            "{commit}\t{:.6}\t{:.1}\t{}\t{}\n",
            self.val_bpb.unwrap_or_default(),
            self.memory_gb(),
            self.status,
            one_line(&self.description)
        )
    }
}

/// What an experiment is called.
pub fn id(tag: &str, number: u32) -> String {
    format!("{tag}-{number:03}")
}

/// Longest description.
const LONGEST_LINE: usize = 500;

/// `text` without tabs, line ends and other characters that a table or a terminal would obey, and not too long.
pub fn one_line(text: &str) -> String {
    // Line and paragraph separators, and what turns the direction of writing.
    let is_obeyed = |letter: char| {
        letter.is_control()
            || matches!(letter, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    let spaced: String = text.chars().map(|letter| if is_obeyed(letter) { ' ' } else { letter }).collect();
    spaced.trim().chars().take(LONGEST_LINE).collect()
}

/// A line of `results.jsonl`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
enum Entry {
    Experiment(Box<Record>),
    /// A kept experiment was taken back.
    Undo {
        tag: String,
        number: u32,
        time: String,
    },
}

/// The ledger's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Part {
    /// What decisions go by.
    Own,
    /// The same in the work tree, for readers.
    Records,
    /// The familiar columns.
    Table,
}

/// Text to append to a file of a known length, exactly once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Append {
    part: Part,
    length: u64,
    text: String,
}

/// What is to be appended to the ledger: kept where a crash cannot reach it until it is done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entries(Vec<Append>);

/// The ledger of a repository, with readers' files in one of its work trees.
#[derive(Clone, Debug)]
pub struct Ledger {
    root: PathBuf,
    own: PathBuf,
}

impl Ledger {
    /// The ledger in `own`, a folder of git's, and the work tree `root`, whether or not it is there yet.
    pub fn new(own: &Path, root: &Path) -> Self {
        Self { root: root.to_path_buf(), own: own.to_path_buf() }
    }

    fn path(&self, part: Part) -> PathBuf {
        match part {
            Part::Own => self.own.join(RECORDS),
            Part::Records => self.root.join(RECORDS),
            Part::Table => self.root.join(TABLE),
        }
    }

    /// Writes the header of `results.tsv` if the file is not there or empty.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write_header(&self) -> Result<()> {
        let entry = self.entry(Part::Table, String::new())?;
        if entry.text.is_empty() { Ok(()) } else { self.append(&Entries(vec![entry])) }
    }

    /// What `record` adds.
    ///
    /// # Errors
    /// If the files cannot be read.
    pub fn entries(&self, record: &Record) -> Result<Entries> {
        let line = serde_json::to_string(&Entry::Experiment(Box::new(record.clone())))?;
        self.lines(&format!("{line}\n"), Some(record.row()))
    }

    fn lines(&self, line: &str, row: Option<String>) -> Result<Entries> {
        let mut entries = Vec::new();
        for part in [Part::Own, Part::Records] {
            entries.push(self.entry(part, line.to_owned())?);
        }
        if let Some(row) = row {
            entries.push(self.entry(Part::Table, row)?);
        }
        Ok(Entries(entries))
    }

    /// Appends `entries`. Called again after a crash, it adds what is missing and nothing twice.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn append(&self, entries: &Entries) -> Result<()> {
        for entry in &entries.0 {
            let path = self.path(entry.part);
            append_once(&path, entry.length, &entry.text).map_err(|error| {
                anyhow!(
                    "{}: cannot write the ledger ({error}); hint: check that it may be written and that there is free space",
                    path.display()
                )
            })?;
        }
        Ok(())
    }

    /// Experiments of the branch `tag` in time, those that were taken back with the status [`Status::Undone`].
    ///
    /// # Errors
    /// If the file is there and cannot be read.
    pub fn records(&self, tag: &str) -> Result<Vec<Record>> {
        let mut records = self.all_records()?;
        records.retain(|record| record.tag == tag);
        Ok(records)
    }

    /// [`Ledger::records`] of every branch.
    ///
    /// # Errors
    /// As [`Ledger::records`].
    pub fn all_records(&self) -> Result<Vec<Record>> {
        let path = self.path(Part::Own);
        let mut records: Vec<Record> = Vec::new();
        for (number, line) in self.read(Part::Own)?.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            match serde_json::from_str(line) {
                Ok(Entry::Experiment(record)) => records.push(*record),
                Ok(Entry::Undo { tag, number, .. }) => {
                    let of_it = |record: &&mut Record| record.tag == tag && record.number == number;
                    if let Some(record) = records.iter_mut().rev().find(of_it) {
                        record.status = Status::Undone;
                    }
                }
                // Going on without it might keep what is worse.
                Err(error) => bail!(
                    "{} line {}: expected an experiment, found: {error}; hint: {RECORDS} in the work tree has the same lines",
                    path.display(),
                    number + 1
                ),
            }
        }
        Ok(records)
    }

    /// Says that the kept experiment `record` was taken back: a line in `results.jsonl`, another status in `results.tsv`.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn undo(&self, record: &Record, time: String) -> Result<()> {
        let entry = Entry::Undo { tag: record.tag.clone(), number: record.number, time };
        let line = format!("{}\n", serde_json::to_string(&entry)?);
        self.append(&self.lines(&line, None)?)?;
        let (old, new) = (record.row(), Record { status: Status::Undone, ..record.clone() }.row());
        let table = self.read(Part::Table)?;
        match table.rfind(&old) {
            Some(place) => {
                let changed = [&table[..place], &new, &table[place + old.len()..]].concat();
                write_atomically(&self.path(Part::Table), changed.as_bytes())
            }
            None => {
                tracing::warn!("{TABLE}: expected the row of {}, found none; hint: mark it yourself", record.id());
                Ok(())
            }
        }
    }

    /// What appending `text` to `part` means now: after its header, and after the end of a line that has none.
    fn entry(&self, part: Part, text: String) -> Result<Append> {
        let before = self.read_bytes(part)?;
        let text = match before.last() {
            None if part == Part::Table => format!("{HEADER}{text}"),
            None | Some(b'\n') => text,
            Some(_) => format!("\n{text}"),
        };
        Ok(Append { part, length: before.len() as u64, text })
    }

    fn read(&self, part: Part) -> Result<String> {
        Ok(String::from_utf8_lossy(&self.read_bytes(part)?).into_owned())
    }

    fn read_bytes(&self, part: Part) -> Result<Vec<u8>> {
        let path = self.path(part);
        match fs::read(&path) {
            Ok(bytes) => Ok(bytes),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(anyhow!("{}: cannot be read ({error}); hint: check its permissions", path.display())),
        }
    }
}

/// Appends `text` to the file at `path`, which had `length` bytes, unless it is there already; a part of it is completed.
fn append_once(path: &Path, length: u64, text: &str) -> std::io::Result<()> {
    let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
    // Other work trees write to the same one.
    file.lock()?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let since = bytes.get(length as usize..).unwrap_or_default();
    let is_there = since.windows(text.len().max(1)).any(|window| window == text.as_bytes());
    if is_there || text.is_empty() {
        return Ok(());
    }
    let torn = text.as_bytes().starts_with(since);
    let end = if torn { length.min(bytes.len() as u64) } else { bytes.len() as u64 };
    file.seek(SeekFrom::Start(end))?;
    // A full disk leaves what was there.
    if let Err(error) = file.write_all(text.as_bytes()).and_then(|()| file.sync_all()) {
        file.set_len(end).ok();
        return Err(error);
    }
    file.set_len(end + text.len() as u64)?;
    sync_folder(path)
}

fn sync_folder(path: &Path) -> std::io::Result<()> {
    match path.parent() {
        Some(folder) if cfg!(unix) => File::open(folder)?.sync_all(),
        _ => Ok(()),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn record(number: u32, description: &str) -> Record {
        Record {
            tag: "nov30".to_owned(),
            number,
            commit: "0123456789abcdef".to_owned(),
            parent: "fedcba9876543210".to_owned(),
            description: description.to_owned(),
            status: Status::Keep,
            verdict: Verdict::Gain,
            val_bpb: Some(0.9979),
            best_before: Some(1.0),
            noise: None,
            peak_vram_mb: Some(45060.2),
            crash: None,
            confirmations: Vec::new(),
            seconds: Seconds::default(),
            tokens_per_second: None,
            mfu_percent: None,
            num_steps: None,
            num_params_m: None,
            seed: 42,
            config: "configs/ci.toml".to_owned(),
            config_sha256: "0".repeat(64),
            device: "cpu".to_owned(),
            protocol: None,
            run_dir: PathBuf::from("runs/nov30-001"),
            patch: PathBuf::from("runs/nov30-001/edit.patch"),
            time: "2026-11-30T20:00:00Z".to_owned(),
        }
    }

    fn ledger() -> (tempfile::TempDir, Ledger) {
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path().join("own");
        fs::create_dir(&own).unwrap();
        let ledger = Ledger::new(&own, folder.path());
        (folder, ledger)
    }

    #[test]
    fn rows_have_the_familiar_columns_and_no_tabs_in_descriptions() {
        let (_folder, ledger) = ledger();
        ledger.append(&ledger.entries(&record(1, "tabs\tand\nlines")).unwrap()).unwrap();
        let crash = Record { status: Status::Crash, val_bpb: None, ..record(2, "too wide") };
        ledger.append(&ledger.entries(&crash).unwrap()).unwrap();
        assert_eq!(
            ledger.read(Part::Table).unwrap(),
            "commit\tval_bpb\tmemory_gb\tstatus\tdescription\n0123456\t0.997900\t44.0\tkeep\ttabs and lines\n\
             0123456\t0.000000\t0.0\tcrash\ttoo wide\n"
        );
        assert_eq!(ledger.records("nov30").unwrap(), [record(1, "tabs\tand\nlines"), crash]);
        assert!(ledger.records("other").unwrap().is_empty());
    }

    #[test]
    fn a_write_that_was_cut_off_anywhere_is_completed_once() {
        let (_folder, ledger) = ledger();
        let parts = [Part::Own, Part::Records, Part::Table];
        ledger.append(&ledger.entries(&record(1, "first")).unwrap()).unwrap();
        let before = parts.map(|part| ledger.read(part).unwrap());
        let entries = ledger.entries(&record(2, "first")).unwrap();
        ledger.append(&entries).unwrap();
        let after = parts.map(|part| ledger.read(part).unwrap());
        for (part, (before, after)) in parts.into_iter().zip(before.iter().zip(&after)) {
            for cut in before.len()..=after.len() {
                fs::write(ledger.path(part), &after[..cut]).unwrap();
                ledger.append(&entries).unwrap();
                assert_eq!(&ledger.read(part).unwrap(), after, "{part:?} cut at {cut}");
            }
        }
    }

    #[test]
    fn rows_that_somebody_adds_or_removes_by_hand_are_respected() {
        let (folder, ledger) = ledger();
        let table = folder.path().join(TABLE);
        fs::write(&table, format!("{HEADER}abcdefg\t1.0\t0.1\tkeep\tby hand, no line end")).unwrap();
        let entries = ledger.entries(&record(1, "ours")).unwrap();
        ledger.append(&entries).unwrap();
        let with_ours = ledger.read(Part::Table).unwrap();
        assert!(with_ours.contains("no line end\n0123456\t"), "{with_ours}");
        // Another row after ours, then a crash that makes us append again.
        fs::write(&table, format!("{with_ours}more\n")).unwrap();
        ledger.append(&entries).unwrap();
        assert_eq!(ledger.read(Part::Table).unwrap(), format!("{with_ours}more\n"));
        // Rows were removed: ours is still added.
        fs::write(&table, HEADER).unwrap();
        ledger.append(&entries).unwrap();
        assert!(ledger.read(Part::Table).unwrap().ends_with("\tkeep\tours\n"));
    }

    #[test]
    fn an_experiment_that_was_taken_back_is_marked_in_both_files() {
        let (_folder, ledger) = ledger();
        for number in [1, 2] {
            ledger.append(&ledger.entries(&record(number, "same")).unwrap()).unwrap();
        }
        ledger.undo(&record(2, "same"), "now".to_owned()).unwrap();
        let statuses: Vec<Status> = ledger.records("nov30").unwrap().iter().map(|record| record.status).collect();
        assert_eq!(statuses, [Status::Keep, Status::Undone]);
        let table = ledger.read(Part::Table).unwrap();
        let statuses: Vec<&str> = table.lines().skip(1).map(|row| row.split('\t').nth(3).unwrap()).collect();
        assert_eq!(statuses, ["keep", "undone"]);
    }

    #[test]
    fn decisions_go_by_what_nobody_edits_and_not_on_if_that_is_damaged() {
        let (_folder, ledger) = ledger();
        ledger.append(&ledger.entries(&record(1, "good")).unwrap()).unwrap();
        for part in [Part::Records, Part::Table] {
            fs::write(ledger.path(part), b"\xff nonsense").unwrap();
        }
        assert_eq!(ledger.records("nov30").unwrap(), [record(1, "good")]);
        ledger.append(&ledger.entries(&record(2, "also")).unwrap()).unwrap();
        assert!(ledger.read(Part::Table).unwrap().ends_with("\tkeep\talso\n"));
        let text = ledger.read(Part::Own).unwrap();
        fs::write(ledger.path(Part::Own), format!("{{\"event\": \n{text}")).unwrap();
        let message = ledger.records("nov30").unwrap_err().to_string();
        assert!(message.contains("line 1: expected an experiment") && message.contains("; hint: "), "{message}");
    }
}
