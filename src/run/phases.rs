//! `phase.json`: what a run is doing, and when it began to.

use super::folder::read_json;
use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Name of the file in a run's folder.
pub(super) const FILE: &str = "phase.json";

/// What a run is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Everything before the first step.
    #[default]
    StartUp,
    /// Optimizer steps.
    Training,
    /// Writing the weights, then validation.
    Evaluation,
    /// The summary is written.
    Done,
}

/// How far a run has come, as `phase.json` keeps it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Phases {
    /// What it is doing.
    pub phase: Phase,
    /// When each phase so far began, in seconds since the command did.
    pub began: BTreeMap<Phase, f64>,
}

impl Phases {
    /// Reads those of the run in `run`; none if it has not written them.
    ///
    /// # Errors
    /// If the file cannot be read or holds something else.
    pub fn read(run: &Path) -> Result<Option<Self>> {
        read_json(&run.join(FILE))
    }
}
