//! `failure.json`: why a run has no summary.

use super::folder::read_json;
use super::phases::Phase;
use crate::data::DataError;
use crate::honesty::Unmeasurable;
use crate::train::{Diverged, Divergence};
use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Name of the file in a run's folder.
pub(super) const FILE: &str = "failure.json";

/// What kind of failure ended a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FailureKind {
    /// The loss or the metric is no number.
    Nan,
    /// The loss is too large to be of use.
    Exploding,
    /// The data cannot be used.
    Data,
    /// The model fails the evaluator's checks.
    Dishonest,
    /// It took longer than its kill limit.
    Timeout,
    /// The program panicked.
    Panic,
    /// All else.
    Error,
}

/// How a run failed, as `failure.json` keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// What kind it is.
    pub kind: FailureKind,
    /// What the run was doing.
    pub phase: Phase,
    /// What it said.
    pub message: String,
}

impl Failure {
    /// Reads that of the run in `run`; none if it left none.
    ///
    /// # Errors
    /// If the file cannot be read or holds something else.
    pub fn read(run: &Path) -> Result<Option<Self>> {
        read_json(&run.join(FILE))
    }
}

impl FailureKind {
    /// The kind of `error`, by the types that the library gives to what went wrong.
    pub fn of(error: &anyhow::Error) -> Self {
        if let Some(diverged) = error.downcast_ref::<Diverged>() {
            return match diverged.divergence {
                Divergence::Nan => Self::Nan,
                Divergence::Exploding => Self::Exploding,
            };
        }
        if error.is::<DataError>() {
            return Self::Data;
        }
        if error.is::<Unmeasurable>() {
            return Self::Dishonest;
        }
        Self::Error
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::{Context, anyhow};

    #[test]
    fn errors_are_told_apart_by_their_types() {
        let diverged = |value| anyhow!(Diverged::new(value, "the loss".to_owned()));
        assert_eq!(FailureKind::of(&diverged(f64::NAN)), FailureKind::Nan);
        assert_eq!(FailureKind::of(&diverged(f64::INFINITY)), FailureKind::Exploding);
        assert_eq!(FailureKind::of(&diverged(101.0)), FailureKind::Exploding);
        let data = DataError::from(anyhow!("no column").context("a.parquet"));
        assert_eq!(FailureKind::of(&anyhow!(data).context("while training")), FailureKind::Data);
        assert_eq!(FailureKind::of(&anyhow!(Unmeasurable("it sees ahead".to_owned()))), FailureKind::Dishonest);
        let other: Result<()> = Err(anyhow!("NaN data panic")).context("--steps");
        assert_eq!(FailureKind::of(&other.unwrap_err()), FailureKind::Error);
    }
}
