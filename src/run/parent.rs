//! Ends the process when the one that started it goes: a training must not go on that nobody waits for.

use super::watchdog::end_now;
use std::io::{ErrorKind, Read, stdin};
use std::thread;

/// Ends the process as soon as standard input closes, however its other end goes: also by a kill -9.
pub fn end_with_stdin() {
    thread::spawn(|| {
        let mut input = stdin().lock();
        let mut bytes = [0; 64];
        loop {
            match input.read(&mut bytes) {
                Ok(0) => end_now(),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => end_now(),
            }
        }
    });
}
