//! Parses the command line, does what it asks, prints one error.

use autoresearch::cli::Cli;
#[cfg(feature = "tch")]
use autoresearch::device::environment;
#[cfg(feature = "wgpu")]
use autoresearch::device::wgpu::MemoryWatch;
use autoresearch::honesty::Unmeasurable;
use autoresearch::output::say;
use autoresearch::train::Diverged;
use clap::Parser;
use clap::error::ErrorKind;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
#[cfg(feature = "wgpu")]
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

// Training makes and drops large tensors all the time: the system's allocator gives their pages back each time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Number of mimalloc's option `purge_delay` (mimalloc.h), for which the binding has no name.
const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;

fn main() -> ExitCode {
    // Before anything else is done, since it may be done again.
    #[cfg(feature = "tch")]
    if let Err(error) = environment::correct(environment::is_amd()) {
        print_error(&error.to_string());
        return ExitCode::FAILURE;
    }
    #[cfg(feature = "wgpu")]
    autoresearch::device::wgpu::leave_out_window_systems();
    // Memory that was used for one step is used again in the next: with giving it back to the system in between, a
    // fourteenth of a step went into clearing pages.
    // SAFETY: sets a number in mimalloc's options, which may be done at any time.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, -1) };
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        // Help and version are no errors; without a command there is only help to give.
        Err(error) if !error.use_stderr() || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            error.exit()
        }
        Err(error) => {
            print_error(&usage_error(&error.render().to_string()));
            return ExitCode::from(2);
        }
    };
    let level = if cli.verbose { tracing::Level::DEBUG } else { tracing::Level::WARN };
    let log = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        // It complains about a closed standard error on standard error, which would panic.
        .log_internal_errors(false);
    // Compilers among the dependencies tell of every pass.
    let levels = Targets::new().with_default(tracing::Level::WARN).with_target("autoresearch", level);
    let registry = tracing_subscriber::registry().with(log.with_filter(levels));
    #[cfg(feature = "wgpu")]
    let registry = registry.with(MemoryWatch.with_filter(LevelFilter::WARN));
    registry.init();
    match cli.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let message = format!("{error:#}");
            // A run that comes to nothing says so where its readers look: on standard output.
            if error.is::<Diverged>() || error.is::<Unmeasurable>() {
                say(one_line(&message));
            } else {
                print_error(&message);
            }
            ExitCode::FAILURE
        }
    }
}

/// Prints one line, whoever may read it.
fn print_error(message: &str) {
    writeln!(std::io::stderr(), "error: {}", one_line(message)).ok();
}

/// `message` without the line ends and terminal codes that a file's name may hold.
fn one_line(message: &str) -> String {
    message.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect()
}

/// What clap says about wrong arguments: its paragraphs are the error, maybe tips, and where there is help.
fn usage_error(text: &str) -> String {
    let text = text.trim().trim_start_matches("error: ");
    let mut paragraphs = text.split("\n\n").map(|paragraph| paragraph.split_whitespace().collect::<Vec<_>>().join(" "));
    let message = paragraphs.next().unwrap_or_default();
    let tip = paragraphs.find_map(|paragraph| paragraph.strip_prefix("tip: ").map(str::to_owned));
    format!("{message}; hint: {}", tip.as_deref().unwrap_or("--help lists what is possible"))
}
