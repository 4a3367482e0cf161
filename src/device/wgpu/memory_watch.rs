//! Ends the program when a GPU's memory is used up: CubeCL says so in its log alone, and goes on for minutes with tensors that
//! hold nothing.

use crate::run;
use std::fmt::{Debug, Write};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

/// What CubeCL's log says, before the number of bytes.
const WORDS: &str = "can't allocate buffer of size: ";

/// Looks through the log for it.
#[derive(Debug)]
pub struct MemoryWatch;

impl<S: Subscriber> Layer<S> for MemoryWatch {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        if let Some(bytes) = missing_bytes(&text.0) {
            run::give_up(&format!(
                "out of memory on the GPU: {:.0} MiB more could not be had; hint: a smaller device_batch_size in src/model.rs takes less (total_batch_size may stay), and so does a smaller model",
                bytes as f64 / f64::from(1 << 20)
            ));
        }
    }
}

/// The bytes that could not be had, if `text` says so.
fn missing_bytes(text: &str) -> Option<u64> {
    let (_, rest) = text.split_once(WORDS)?;
    rest.split(|letter: char| !letter.is_ascii_digit()).next()?.parse().ok()
}

/// All that an event says.
struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, _: &Field, value: &dyn Debug) {
        write!(self.0, "{value:?} ").ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_allocation_that_failed_is_told_from_the_rest_of_the_log() {
        let log =
            "An IO error happened\nCaused by:\n  can't allocate buffer of size: 536870912\nstack backtrace: 0: main";
        assert_eq!(missing_bytes(log), Some(1 << 29));
        assert_eq!(missing_bytes("Autotune measured no candidate for key 536870912"), None);
        assert_eq!(missing_bytes("can't allocate buffer of size: many"), None);
    }
}
