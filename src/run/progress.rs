//! The line that tells how training goes: rewritten on a terminal, printed every few seconds elsewhere.

use crate::output;
use crate::train::StepReport;
use std::io::{IsTerminal, stdout};
use std::time::Duration;

/// Time between two lines where they cannot be rewritten.
const INTERVAL: Duration = Duration::from_secs(5);

/// Shows steps.
pub struct ProgressLine {
    flops_per_token: f64,
    peak_flops: Option<f64>,
    is_terminal: bool,
    /// Training time since the last printed line; none before the first.
    since_printed: Option<Duration>,
    /// The latest step's line, where it has not been printed.
    pending: Option<String>,
}

impl ProgressLine {
    pub fn new(flops_per_token: f64, peak_flops: Option<f64>) -> Self {
        Self { flops_per_token, peak_flops, is_terminal: stdout().is_terminal(), since_printed: None, pending: None }
    }

    pub fn show(&mut self, step: &StepReport) {
        tracing::debug!("step {:05} data_wait: {:.2}ms", step.step, step.data_wait.as_secs_f64() * 1e3);
        if self.is_terminal {
            output::show(format_args!("\r{}\x1b[K", self.line(step)));
        } else if let Some(line) = self.due(step) {
            output::say(line);
        }
    }

    /// The step's line if it is time to print one; else it is kept in case it is the last.
    fn due(&mut self, step: &StepReport) -> Option<String> {
        let since = self.since_printed.map(|since| since + step.duration);
        let is_due = since.is_none_or(|since| since >= INTERVAL);
        self.since_printed = if is_due { Some(Duration::ZERO) } else { since };
        let line = self.line(step);
        if is_due {
            self.pending = None;
            return Some(line);
        }
        self.pending = Some(line);
        None
    }

    /// Leaves the last step's line standing.
    pub fn finish(&mut self) {
        if self.is_terminal {
            output::say("");
        } else if let Some(line) = self.pending.take() {
            output::say(line);
        }
    }

    fn line(&self, step: &StepReport) -> String {
        let mfu = match self.peak_flops {
            Some(peak) => format!("{:.1}%", 100.0 * self.flops_per_token * step.tokens_per_second / peak),
            None => "n/a".to_owned(),
        };
        let remaining = match step.remaining {
            Some(remaining) => format!("{:.0}s", remaining.as_secs_f64()),
            None => "n/a".to_owned(),
        };
        format!(
            "step {:05} ({:.1}%) | loss: {:.6} | lrm: {:.2} | dt: {:.0}ms | tok/sec: {} | mfu: {mfu} | epoch: {} | remaining: {remaining}",
            step.step,
            100.0 * step.progress,
            step.smoothed_loss,
            step.lr_multiplier,
            step.duration.as_secs_f64() * 1e3,
            with_thousands(step.tokens_per_second as u64),
            step.epoch,
        )
    }
}

/// 1234567 as 1,234,567.
fn with_thousands(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().filter_map(|group| std::str::from_utf8(group).ok()).collect();
    groups.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step() -> StepReport {
        StepReport {
            step: 10,
            progress: 0.0123,
            loss: 3.0,
            smoothed_loss: 3.25,
            lr_multiplier: 1.0,
            duration: Duration::from_millis(450),
            data_wait: Duration::ZERO,
            tokens_per_second: 4551.2,
            epoch: 1,
            remaining: Some(Duration::from_secs(59)),
        }
    }

    #[test]
    fn the_line_has_the_familiar_form() {
        let step = step();
        let known = ProgressLine::new(1e6, Some(1e10)).line(&step);
        let expected = "step 00010 (1.2%) | loss: 3.250000 | lrm: 1.00 | dt: 450ms | tok/sec: 4,551 | mfu: 45.5% | epoch: 1 | remaining: 59s";
        assert_eq!(known, expected);
        let unknown = ProgressLine::new(1e6, None).line(&StepReport { remaining: None, ..step });
        assert!(unknown.contains("mfu: n/a") && unknown.ends_with("remaining: n/a"), "{unknown}");
    }

    #[test]
    fn where_lines_stay_one_is_printed_every_few_seconds_and_the_last_is_kept() {
        let mut progress = ProgressLine::new(1e6, None);
        let steps = (0..25).map(|number| StepReport { step: number, duration: Duration::from_millis(625), ..step() });
        let printed: Vec<String> = steps.filter_map(|step| progress.due(&step)).collect();
        let numbers: Vec<&str> = printed.iter().map(|line| &line[..10]).collect();
        assert_eq!(numbers, ["step 00000", "step 00008", "step 00016", "step 00024"]);
        assert!(progress.pending.is_none());
        assert!(progress.due(&StepReport { step: 25, ..step() }).is_none());
        assert!(progress.pending.is_some_and(|line| line.starts_with("step 00025")));
    }

    #[test]
    fn thousands_are_grouped() {
        let grouped = [0, 12, 999, 1000, 1_234_567].map(with_thousands);
        assert_eq!(grouped, ["0", "12", "999", "1,000", "1,234,567"]);
    }
}
