//! What becomes of an experiment: kept, discarded or crashed, and how sure that is.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The ledger's fourth column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// The branch goes on from it.
    Keep,
    /// The branch went back to what it was; the commit stays reachable.
    Discard,
    /// It gave no number.
    Crash,
    /// It was kept, and taken back later.
    Undone,
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Keep => "keep",
            Self::Discard => "discard",
            Self::Crash => "crash",
            Self::Undone => "undone",
        })
    }
}

/// Why an experiment has the status that it has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// There was nothing to beat.
    Baseline,
    /// Better than the best by more than chance explains, as far as that was measured.
    Gain,
    /// Better than the best by no more than identical runs differ.
    Marginal,
    /// Better than the best also on new seeds.
    Confirmed,
    /// Better at first, not on new seeds.
    Unconfirmed,
    /// Not better than the best, but no worse than chance explains, and simpler.
    Simpler,
    /// Not better than the best.
    Worse,
    /// Measured otherwise than the best; what differs.
    Incomparable(Vec<String>),
    /// It gave no number.
    Crash,
}

impl Verdict {
    /// Of a run with `val_bpb` against `best`, where runs of the same commit differ by up to `noise`; smaller is better.
    pub fn of(val_bpb: f64, best: Option<f64>, noise: Option<f64>) -> Self {
        match (best, noise) {
            (None, _) => Self::Baseline,
            (Some(best), _) if val_bpb >= best => Self::Worse,
            (Some(best), Some(noise)) if best - val_bpb <= noise => Self::Marginal,
            (Some(_), _) => Self::Gain,
        }
    }

    /// What it leads to.
    pub fn status(&self) -> Status {
        match self {
            Self::Baseline | Self::Gain | Self::Marginal | Self::Confirmed | Self::Simpler => Status::Keep,
            Self::Unconfirmed | Self::Worse | Self::Incomparable(_) => Status::Discard,
            Self::Crash => Status::Crash,
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Baseline => f.write_str("baseline"),
            Self::Gain => f.write_str("gain"),
            Self::Marginal => f.write_str("marginal gain"),
            Self::Confirmed => f.write_str("gain, confirmed on new seeds"),
            Self::Unconfirmed => f.write_str("not better on new seeds"),
            Self::Simpler => f.write_str("simpler, and no worse than chance explains"),
            Self::Worse => f.write_str("not better"),
            Self::Incomparable(differences) => {
                write!(f, "measured otherwise than the best: {}", differences.join(", "))
            }
            Self::Crash => f.write_str("crash"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_lower_than_the_best_is_kept_and_within_noise_it_is_marginal() {
        let cases = [
            (1.0, None, None, Verdict::Baseline, Status::Keep),
            (0.9, Some(1.0), None, Verdict::Gain, Status::Keep),
            (0.9, Some(1.0), Some(0.05), Verdict::Gain, Status::Keep),
            (0.96, Some(1.0), Some(0.05), Verdict::Marginal, Status::Keep),
            (1.0, Some(1.0), None, Verdict::Worse, Status::Discard),
            (1.1, Some(1.0), Some(0.5), Verdict::Worse, Status::Discard),
        ];
        for (val_bpb, best, noise, verdict, status) in cases {
            let found = Verdict::of(val_bpb, best, noise);
            assert_eq!((found.clone(), found.status()), (verdict, status), "{val_bpb} {best:?} {noise:?}");
        }
        assert_eq!(Verdict::Unconfirmed.status(), Status::Discard);
        assert_eq!(Verdict::Incomparable(Vec::new()).status(), Status::Discard);
    }
}
