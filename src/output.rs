//! Standard output: whoever reads it may go away (`| head -1`) without ending what is being done.

use std::fmt::Display;
use std::io::{ErrorKind, IsTerminal, Write, stderr, stdout};
use std::sync::Once;

/// Prints a line.
pub fn say(line: impl Display) {
    write(format_args!("{line}\n"));
}

/// Tells whoever sits before a terminal what is being done; others get the outcome alone.
pub fn tell(line: impl Display) {
    if stderr().is_terminal() {
        writeln!(stderr(), "{line}").ok();
    }
}

/// Says on standard error why it takes a while.
pub fn note(line: impl Display) {
    writeln!(stderr(), "note: {line}").ok();
}

/// Prints `text` at once, without an end of line.
pub fn show(text: impl Display) {
    write(text);
}

fn write(text: impl Display) {
    static WARNING: Once = Once::new();
    let mut output = stdout().lock();
    if let Err(error) = write!(output, "{text}").and_then(|()| output.flush())
        && error.kind() != ErrorKind::BrokenPipe
    {
        WARNING.call_once(|| tracing::warn!("standard output cannot be written: {error}"));
    }
}
