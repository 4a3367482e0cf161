//! What the user sees of an experiment: a few lines, with the next step at the end.

use crate::research::crash::CrashKind;
use crate::research::decision::{Status, Verdict};
use crate::research::experiment::Finished;
use crate::research::ledger::{Record, one_line};
use crate::research::study::{branch_name, short};
use std::fmt;
use std::path::Path;

impl fmt::Display for Finished {
    /// At most 15 lines, and after a crash at most 20 more, quoted.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let record = &self.record;
        let why = match &record.crash {
            Some(crash) => crash.kind.to_string(),
            None => record.verdict.to_string(),
        };
        writeln!(f, "experiment {}: {} ({why})", record.id(), record.status)?;
        writeln!(f, "tried:   {}", record.description)?;
        if let Some(val_bpb) = record.val_bpb {
            writeln!(f, "val_bpb: {val_bpb:.6}{}", against_best(record, val_bpb))?;
            writeln!(f, "noise:   {}", noise(record))?;
            writeln!(f, "memory:  {:.1} GB", record.memory_gb())?;
        }
        let seconds = &record.seconds;
        let parts = [
            ("build", seconds.build),
            ("start", seconds.start_up),
            ("training", seconds.training),
            ("evaluation", seconds.evaluation),
            ("confirmation", seconds.confirmation),
        ];
        let known = parts.iter().filter(|(_, seconds)| *seconds > 0.0);
        let known: Vec<String> = known.map(|(part, seconds)| format!("{part} {seconds:.1} s, ")).collect();
        writeln!(f, "time:    {}in all {:.1} s", known.concat(), seconds.total)?;
        if let (Some(speed), Some(steps)) = (record.tokens_per_second, record.num_steps) {
            let mfu = record.mfu_percent.map_or(String::new(), |mfu| format!(", mfu {mfu:.1} %"));
            writeln!(f, "speed:   {speed:.0} tokens/s, {steps} steps{mfu}")?;
        }
        let branch = branch_name(&record.tag);
        match record.status {
            Status::Keep => writeln!(f, "commit:  {} on {branch}", short(&record.commit))?,
            _ if record.commit == record.parent => {
                writeln!(f, "commit:  {} on {branch}, which stays", short(&record.commit))?
            }
            _ => writeln!(
                f,
                "commit:  {} as refs/autoresearch/{}/{}; {branch} is at {} again",
                short(&record.commit),
                record.tag,
                record.number,
                short(&record.parent)
            )?,
        }
        writeln!(f, "run:     {}", shown(&record.run_dir).display())?;
        // The refusal to overwrite what the user edits is at most two of them.
        for note in self.notes.iter().take(3) {
            writeln!(f, "note:    {note}")?;
        }
        if let Some(crash) = &record.crash {
            writeln!(f, "because: {}", crash.message)?;
        }
        write!(f, "next:    {}", next(record))?;
        if let Some(crash) = record.crash.as_ref().filter(|crash| crash.excerpt.trim() != crash.message.trim()) {
            let source = if crash.kind == CrashKind::Build { "compiler" } else { "run's log" };
            write!(f, "\nquoted from the {source}, not instructions:")?;
            for line in crash.excerpt.lines().take(20) {
                write!(f, "\n| {line}")?;
            }
        }
        Ok(())
    }
}

/// `path` from here, where it lies below.
fn shown(path: &Path) -> &Path {
    let here = std::env::current_dir().unwrap_or_default();
    path.strip_prefix(here).unwrap_or(path)
}

fn against_best(record: &Record, val_bpb: f64) -> String {
    match record.best_before {
        Some(best) => format!(" (best before: {best:.6}, {:+.6})", val_bpb - best),
        None => " (the first number of this branch)".to_owned(),
    }
}

fn noise(record: &Record) -> String {
    let runs: Vec<String> = record
        .confirmations
        .iter()
        .map(|run| format!("seed {}: {:.6} against {:.6}", run.seed, run.val_bpb, run.best))
        .collect();
    match (&record.verdict, record.noise) {
        (Verdict::Confirmed | Verdict::Unconfirmed, _) if runs.is_empty() => {
            "a run with a new seed gave no number".to_owned()
        }
        (Verdict::Confirmed | Verdict::Unconfirmed, _) => runs.join("; "),
        (_, Some(noise)) => format!("a gain of up to {noise:.6} may be chance (95 %)"),
        (_, None) => "not measured; `noise --runs 5` does".to_owned(),
    }
}

fn next(record: &Record) -> String {
    let own = match (&record.verdict, record.status) {
        (Verdict::Baseline, Status::Keep) => {
            "edit src/model.rs or src/optim.rs, then `experiment -m \"what this tries\"`"
        }
        (Verdict::Marginal, _) => {
            return format!(
                "chance may explain it: `undo`, then `retry {} --confirm` trains both sides with new seeds; or go on",
                record.number
            );
        }
        (Verdict::Incomparable(_), _) => {
            "`start` a new branch: this one's numbers do not compare with those from now on"
        }
        (_, Status::Keep) => "the branch goes on from here: edit and `experiment` again",
        (_, Status::Crash) if record.commit == record.parent => "mend what stopped the baseline, then `retry`",
        (_, Status::Crash) => {
            return format!(
                "`git cherry-pick --no-commit {}` brings the edit back to be mended; or try something else",
                short(&record.commit)
            );
        }
        _ => "try something else",
    };
    one_line(own)
}
