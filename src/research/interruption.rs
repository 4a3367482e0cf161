//! Ctrl-C and the signals that ask a program to end.

use crate::process::Interruption;
use anyhow::{Context, Result, bail};
use std::thread;
use std::time::{Duration, Instant};

/// The user wants an end: what was begun is unfinished, not failed.
#[derive(Debug, thiserror::Error)]
#[error(
    "interrupted; hint: `experiment --resume` goes on with what is unfinished, `undo` takes it back and leaves the edit"
)]
pub struct Interrupted;

#[cfg(unix)]
unsafe extern "C" {
    /// Sets what a signal does (C standard library).
    fn signal(number: i32, action: usize) -> usize;
}

/// SIGHUP and the action of ignoring it, on every Unix.
#[cfg(unix)]
const HANG_UP: (i32, usize) = (1, 1);

/// Code with which a program ends that Ctrl-C has ended twice.
const IMPATIENT: i32 = 130;

/// An interruption that Ctrl-C, SIGTERM and SIGHUP set. A second signal ends this process at once; a training ends with it.
///
/// # Errors
/// If the system does not let us listen.
pub fn on_signals() -> Result<Interruption> {
    let interruption = Interruption::default();
    let of_handler = interruption.clone();
    // SAFETY: no handler is set that could be called; what was set is seen, and set again below.
    #[cfg(unix)]
    let hang_up_was_ignored = unsafe { signal(HANG_UP.0, HANG_UP.1) } == HANG_UP.1;
    ctrlc::set_handler(move || {
        if of_handler.is_set() {
            std::process::exit(IMPATIENT);
        }
        of_handler.interrupt();
    })
    .context("signals cannot be listened to; hint: is it called twice?")?;
    // As `nohup` asks.
    #[cfg(unix)]
    if hang_up_was_ignored {
        // SAFETY: ignoring a signal calls nothing.
        unsafe { signal(HANG_UP.0, HANG_UP.1) };
    }
    Ok(interruption)
}

/// Waits, but not on after an interruption.
///
/// # Errors
/// [`Interrupted`].
pub fn pause(interruption: &Interruption, duration: Duration) -> Result<()> {
    let begun = Instant::now();
    while !interruption.is_set() {
        let Some(left) = duration.checked_sub(begun.elapsed()).filter(|left| !left.is_zero()) else { return Ok(()) };
        thread::sleep(left.min(Duration::from_millis(50)));
    }
    bail!(Interrupted)
}
