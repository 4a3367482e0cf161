//! Ends the process when something takes too long: a hung GPU driver must not end a night of experiments.

use super::failure::FailureKind;
use super::record::Record;
use crate::output::say;
use std::io::{IsTerminal, stdout};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

/// How long the last words may take: whoever reads them may be hung too.
const LAST_WORDS: Duration = Duration::from_secs(2);

unsafe extern "C" {
    /// Ends the process at once (C standard library): handlers that run at a normal exit wait for the hung driver.
    fn _exit(code: i32) -> !;
}

/// Ends the process if it is not dropped in time.
#[derive(Debug)]
pub struct Watchdog {
    /// Dropping it tells the thread.
    _alive: Sender<()>,
}

impl Watchdog {
    /// Watches from now: after `limit` it writes `line` down in `record`, prints it on standard output and ends the process
    /// with code 1, whatever the other threads do.
    pub fn start(limit: Duration, line: String, record: &Record) -> Self {
        let (alive, ended) = channel();
        let record = record.clone();
        thread::spawn(move || {
            if lasts_longer(&ended, limit) {
                end_process(line, record);
            }
        });
        Self { _alive: alive }
    }
}

/// Whether the other end of `ended` is still there after `limit`; returns at once when it goes.
fn lasts_longer(ended: &Receiver<()>, limit: Duration) -> bool {
    ended.recv_timeout(limit) == Err(RecvTimeoutError::Timeout)
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
        let (alive, ended) = channel();
        assert!(lasts_longer(&ended, Duration::from_millis(1)));
        drop(alive);
        assert!(!lasts_longer(&ended, Duration::MAX));
    }
}
