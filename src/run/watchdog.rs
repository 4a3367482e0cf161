//! Ends the process when something takes too long: a hung GPU driver must not end a night of experiments.

use super::failure::FailureKind;
use super::record::Record;
use crate::output::say;
use std::io::{IsTerminal, stdout};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// How long the last words may take: whoever reads them may be hung too.
const LAST_WORDS: Duration = Duration::from_secs(2);

unsafe extern "C" {
    /// Ends the process at once (C standard library): handlers that run at a normal exit wait for the hung driver.
    fn _exit(code: i32) -> !;
}

/// Ends the process if it is not dropped in time.
#[derive(Debug)]
pub struct Watchdog {
    /// Dropping it ends the watch.
    changes: Sender<Change>,
}

/// What becomes of the limit.
#[derive(Debug, Clone, Copy)]
enum Change {
    Longer(Duration),
    Shorter(Duration),
}

impl Watchdog {
    /// Watches from now: after `limit` it writes `line` down in `record`, prints it on standard output and ends the process
    /// with code 1, whatever the other threads do.
    pub fn start(limit: Duration, line: String, record: &Record) -> Self {
        let (changes, received) = channel();
        let record = record.clone();
        thread::spawn(move || {
            if lasts_longer(&received, limit) {
                end_process(line, record);
            }
        });
        Self { changes }
    }

    /// Gives `time` more.
    pub fn lengthen(&self, time: Duration) {
        self.change(Change::Longer(time));
    }

    /// Takes `time` back.
    pub fn shorten(&self, time: Duration) {
        self.change(Change::Shorter(time));
    }

    fn change(&self, change: Change) {
        // The other end is gone when the process is about to end.
        self.changes.send(change).ok();
    }
}

/// Whether the other end of `changes` is still there after `limit`, as it changes it; returns at once when it goes.
fn lasts_longer(changes: &Receiver<Change>, mut limit: Duration) -> bool {
    let start = Instant::now();
    loop {
        match changes.recv_timeout(limit.saturating_sub(start.elapsed())) {
            Ok(Change::Longer(time)) => limit = limit.saturating_add(time),
            Ok(Change::Shorter(time)) => limit = limit.saturating_sub(time),
            Err(error) => return error == RecvTimeoutError::Timeout,
        }
    }
}

fn end_process(line: String, record: Record) -> ! {
    // In a thread of its own: another one may hold standard output for ever, a disk may be hung.
    let (done, said) = channel();
    thread::spawn(move || {
        record.fail(FailureKind::Timeout, line.clone());
        if stdout().is_terminal() {
            // The line that shows progress has no end yet.
            say("");
        }
        say(line);
        done.send(())
    });
    said.recv_timeout(LAST_WORDS).ok();
    end_now()
}

/// Ends the process with code 1, whatever its other threads do.
pub(super) fn end_now() -> ! {
    // SAFETY: takes no memory and never returns.
    unsafe { _exit(1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ends_in_time_is_left_alone_and_what_does_not_is_noticed() {
        let (changes, received) = channel();
        assert!(lasts_longer(&received, Duration::from_millis(1)));
        drop(changes);
        assert!(!lasts_longer(&received, Duration::MAX));
    }

    #[test]
    fn time_that_is_given_is_waited_for_until_it_is_taken_back() {
        let (changes, received) = channel();
        let hour = Duration::from_secs(3600);
        changes.send(Change::Longer(hour)).unwrap();
        changes.send(Change::Shorter(hour)).unwrap();
        // With it the other end would go first.
        assert!(lasts_longer(&received, Duration::ZERO));
        changes.send(Change::Longer(hour)).unwrap();
        drop(changes);
        // Without it the limit would be over before the end is noticed.
        assert!(!lasts_longer(&received, Duration::ZERO));
    }
}
