//! Where a branch of experiments stands, and its ledger as a table.

use crate::research::agent_loop;
use crate::research::decision::{Status, Verdict};
use crate::research::journal::Journal;
use crate::research::ledger::{Record, id};
use crate::research::noise::{self, Noise};
use crate::research::study::{Study, short};
use anyhow::Result;
use serde::Serialize;
use std::cmp::Ordering;
use std::fmt;

/// Where a branch stands.
#[derive(Clone, Debug, Serialize)]
pub struct Overview {
    pub branch: String,
    pub experiments: usize,
    pub kept: usize,
    pub discarded: usize,
    pub crashed: usize,
    pub undone: usize,
    /// Name of the configuration, and the device as it was asked for.
    pub config: String,
    pub device: String,
    pub baseline: Option<f64>,
    /// The experiment that the branch is at.
    pub best: Option<Record>,
    /// Largest difference that chance explains, if it was measured.
    pub noise: Option<f64>,
    /// Runs that it was measured with.
    pub noise_runs: usize,
    /// Name and step of the experiment that is not finished.
    pub unfinished: Option<(String, String)>,
    /// The process that is at work here.
    pub running: Option<String>,
    /// Whether a loop was stopped before its end.
    pub has_stopped_loop: bool,
    /// Editable files that differ from the kept commit.
    pub edited: Vec<String>,
    /// What stands against an experiment now.
    pub problem: Option<String>,
}

impl Overview {
    /// Of the branch of `study`.
    ///
    /// # Errors
    /// If the ledger or git's references cannot be read.
    pub fn of(study: &Study) -> Result<Self> {
        let records = study.ledger.records(&study.tag)?;
        let count = |status| records.iter().filter(|record| record.status == status).count();
        let best = study.best()?;
        let journal = Journal::read(&study.folder())?;
        Ok(Self {
            branch: study.branch(),
            experiments: records.len(),
            kept: count(Status::Keep),
            discarded: count(Status::Discard),
            crashed: count(Status::Crash),
            undone: count(Status::Undone),
            config: study.settings.config.clone(),
            device: study.settings.device.clone(),
            noise_runs: Noise::read(study)?.map_or(0, |noise| noise.runs.len()),
            running: study.holder(),
            has_stopped_loop: agent_loop::has_plan(study),
            baseline: records.iter().find_map(|record| record.val_bpb),
            noise: noise::largest_chance_difference(study, best.as_ref())?,
            best,
            unfinished: journal.map(|journal| (id(&study.tag, journal.number), journal.phase.name().to_owned())),
            edited: study.edited_since(&study.kept()?)?.into_iter().map(str::to_owned).collect(),
            problem: study.require_within_bounds().err().map(|error| format!("{error:#}")),
        })
    }
}

impl Overview {
    /// What is known of the branch, without what to do next.
    pub fn state(&self) -> String {
        let best = match (&self.best, self.baseline) {
            (Some(best), Some(baseline)) => {
                let val_bpb = best.val_bpb.unwrap_or_default();
                format!(
                    "{val_bpb:.6}, {} ({})\nbaseline:    {baseline:.6} ({:+.6} since)",
                    best.id(),
                    best.description,
                    val_bpb - baseline
                )
            }
            _ => "none yet".to_owned(),
        };
        let noise = match self.noise {
            Some(noise) => format!("a gain of up to {noise:.6} may be chance (95 %, {} runs)", self.noise_runs),
            None => "not measured".to_owned(),
        };
        format!(
            "branch:      {}, {} on {}\nexperiments: {} ({} kept, {} discarded, {} crashed, {} undone)\nbest:        {best}\nnoise:       {noise}",
            self.branch,
            self.config,
            self.device,
            self.experiments,
            self.kept,
            self.discarded,
            self.crashed,
            self.undone
        )
    }

    fn next(&self) -> String {
        let resume = if self.has_stopped_loop { "loop --resume" } else { "experiment --resume" };
        match (&self.running, &self.unfinished, &self.problem) {
            (Some(running), Some((experiment, step)), _) => {
                format!("running:     {experiment} (step: {step}) by {running}")
            }
            (Some(running), None, _) => format!("running:     {running}"),
            (None, Some((experiment, step)), _) => {
                format!(
                    "interrupted: {experiment} (step: {step}); `{resume}` goes on, `undo` takes it back and leaves the edit"
                )
            }
            (None, None, Some(problem)) => format!("problem:     {problem}"),
            (None, None, None) if self.has_stopped_loop => {
                "loop:        stopped before its end; `loop --resume` goes on".to_owned()
            }
            (None, None, None) if self.edited.is_empty() => {
                "edit:        none; edit src/model.rs or src/optim.rs, then `experiment -m \"…\"`".to_owned()
            }
            (None, None, None) => format!("edit:        {}; `experiment -m \"…\"` measures it", self.edited.join(", ")),
        }
    }
}

impl fmt::Display for Overview {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n{}", self.state(), self.next())
    }
}

/// The order of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As they were made.
    Time,
    /// Lowest val_bpb first, crashes last.
    Best,
}

/// `records` in `order`, the last or first `at_most` of them.
pub fn sorted(mut records: Vec<Record>, order: Order, at_most: Option<usize>) -> Vec<Record> {
    if order == Order::Best {
        // What was taken back was so for a reason.
        let counts = |record: &Record| record.status != Status::Undone;
        let value = |record: &Record| record.val_bpb.filter(|_| counts(record)).unwrap_or(f64::INFINITY);
        records.sort_by(|left, right| value(left).partial_cmp(&value(right)).unwrap_or(Ordering::Equal));
    }
    let at_most = at_most.unwrap_or(records.len()).min(records.len());
    match order {
        Order::Time => records.split_off(records.len() - at_most),
        Order::Best => {
            records.truncate(at_most);
            records
        }
    }
}

/// A ledger as a table for people.
#[derive(Debug)]
pub struct Table<'a>(pub &'a [Record]);

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:<14} {:<7} {:>9} {:>9} {:>6} {:>8}  {:<16} description",
            "experiment", "commit", "val_bpb", "gain", "GB", "tok/s", "status"
        )?;
        for record in self.0 {
            let number =
                |value: Option<f64>, digits: usize| value.map_or("-".to_owned(), |value| format!("{value:.digits$}"));
            let gain = record
                .best_before
                .zip(record.val_bpb)
                .map_or("-".to_owned(), |(best, own)| format!("{:+.6}", own - best));
            let status = match &record.crash {
                Some(crash) => format!("crash: {}", crash.kind),
                None if record.verdict == Verdict::Marginal => format!("{}: marginal", record.status),
                None => record.status.to_string(),
            };
            write!(
                f,
                "\n{:<14} {:<7} {:>9} {gain:>9} {:>6.1} {:>8}  {status:<16} {}",
                record.id(),
                short(&record.commit),
                number(record.val_bpb, 6),
                record.memory_gb(),
                number(record.tokens_per_second, 0),
                record.description
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::research::ledger::tests::record;

    #[test]
    fn the_best_come_first_and_crashes_last_or_the_latest_last() {
        let records: Vec<Record> = [(1, Some(1.2)), (2, None), (3, Some(1.1))]
            .map(|(number, val_bpb)| Record { val_bpb, ..record(number, "") })
            .into();
        let numbers = |order, at_most| {
            sorted(records.clone(), order, at_most).iter().map(|record| record.number).collect::<Vec<_>>()
        };
        assert_eq!(numbers(Order::Best, None), [3, 1, 2]);
        assert_eq!(numbers(Order::Best, Some(1)), [3]);
        assert_eq!(numbers(Order::Time, Some(2)), [2, 3]);
        assert_eq!(numbers(Order::Time, Some(9)), [1, 2, 3]);
    }
}
