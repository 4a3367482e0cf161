//! Parses the command line, does what it asks, prints one error.

use autoresearch::cli::Cli;
use clap::Parser;
use std::process::ExitCode;

// Training makes and drops large tensors all the time: the system's allocator gives their pages back each time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Number of mimalloc's option `purge_delay` (mimalloc.h), for which the binding has no name.
const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;

fn main() -> ExitCode {
    // Memory that was used for one step is used again in the next: giving it back to the system in between costs a fifth
    // of a step in clearing pages.
    // SAFETY: sets a number in mimalloc's options, which may be done at any time.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, -1) };
    let cli = Cli::parse();
    let level = if cli.verbose { tracing::Level::DEBUG } else { tracing::Level::WARN };
    let log = tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr).with_target(false);
    log.without_time().init();
    match cli.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let message = format!("{error:#}");
            // A diverged run says FAIL on a line of its own, as its readers expect.
            if message.starts_with("FAIL") {
                println!("{message}");
            } else {
                eprintln!("error: {message}");
            }
            ExitCode::FAILURE
        }
    }
}
