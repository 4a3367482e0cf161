//! What is being done to a branch, written down before each step: after a crash at any point the experiment can go on.

use crate::process::ProcessId;
use crate::research::experiment::Options;
use crate::research::ledger::{Entries, Record};
use crate::research::state;
use anyhow::{Result, anyhow};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::Path;

/// Name of the file in a branch's folder.
const FILE: &str = "journal.json";

/// An experiment that is not finished.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Journal {
    pub number: u32,
    pub kind: Kind,
    pub description: String,
    /// The kept commit, where the branch goes back to.
    pub parent: String,
    /// Where the branch was before the experiment's own commit: `parent`, or ahead of it if the edit was committed by hand.
    pub head_before: String,
    /// The experiment's commit, once it is known.
    pub commit: Option<String>,
    /// What the user asks of it.
    pub options: Options,
    pub phase: Phase,
    /// The child that is at work now, or was the last.
    pub child: Option<ProcessId>,
}

/// What an experiment measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The branch as it starts.
    Baseline,
    /// The edit in the work tree.
    Edit,
    /// An earlier experiment's commit.
    Retry,
}

/// The step that is being done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Making the commit.
    Commit,
    /// Building, training, evaluating.
    Measure,
    /// Writing the ledger.
    Record(Box<Record>, Entries),
    /// Moving the branch.
    Settle(Box<Record>),
}

impl Journal {
    /// That of the branch whose folder is `folder`, if something is unfinished.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn read(folder: &Path) -> Result<Option<Self>> {
        let hint = "written by another version? remove the file to give the experiment up";
        state::read(&folder.join(FILE), "an unfinished experiment", hint)
    }

    /// Replaces what was written.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(&self, folder: &Path) -> Result<()> {
        state::write(&folder.join(FILE), self)
    }

    /// Nothing is unfinished any more.
    ///
    /// # Errors
    /// If the file cannot be removed.
    pub fn remove(folder: &Path) -> Result<()> {
        let path = folder.join(FILE);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(anyhow!("{}: cannot be removed ({error}); hint: check its folder's permissions", path.display()))
            }
            _ => Ok(()),
        }
    }
}

impl Phase {
    /// Its name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Commit => "commit",
            Self::Measure => "measure",
            Self::Record(..) => "record",
            Self::Settle(_) => "settle",
        }
    }
}
