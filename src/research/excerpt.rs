//! Excerpts of logs: short, from where they tell most, and harmless to a terminal or to whoever reads them as text.

use std::fmt::Write;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// Lines of an excerpt, at most.
pub const MOST_LINES: usize = 20;
/// Characters of a line, at most.
const LONGEST_LINE: usize = 200;
/// Bytes that are read of a log.
const END: u64 = 1 << 16;

/// The last part of the log at `path`, in whole lines; empty if it cannot be read.
pub fn read_end(path: &Path) -> String {
    let read = || {
        let mut file = File::open(path)?;
        let start = file.metadata()?.len().saturating_sub(END);
        file.seek(SeekFrom::Start(start))?;
        let mut bytes = Vec::new();
        file.take(END).read_to_end(&mut bytes)?;
        std::io::Result::Ok((start, bytes))
    };
    let Ok((start, bytes)) = read() else { return String::new() };
    let text = String::from_utf8_lossy(&bytes);
    match text.split_once('\n') {
        Some((_, whole)) if start > 0 => whole.to_owned(),
        _ => text.into_owned(),
    }
}

/// `log` from the line on in which a program says why it ends; all of it if no line does.
pub fn telling_part(log: &str) -> &str {
    let tells = |line: &str| {
        let starts = ["FAIL:", "error:", "terminate called", "memory allocation of ", "fatal runtime error"];
        starts.iter().any(|start| line.starts_with(start))
            || line.contains("' panicked at ")
            || line.contains(") panicked at ")
    };
    let mut start = 0;
    for line in log.split_inclusive('\n') {
        if tells(line.rsplit('\r').next().unwrap_or(line)) {
            return &log[start..];
        }
        start += line.len();
    }
    log
}

/// The first lines of `text`, fit to be shown.
pub fn first_lines(text: &str) -> String {
    lines(text).take(MOST_LINES).collect::<Vec<_>>().join("\n")
}

/// The last lines of `text`, fit to be shown.
pub fn last_lines(text: &str) -> String {
    let lines: Vec<String> = lines(text).collect();
    lines[lines.len().saturating_sub(MOST_LINES)..].join("\n")
}

/// The lines that are not empty, each as a terminal would leave it, shortened, and without anything that a terminal or a
/// reader would not take for text.
fn lines(text: &str) -> impl Iterator<Item = String> {
    // A line of progress is written over by the next.
    let last_state = |line: &str| line.trim_end().rsplit('\r').next().map(visible);
    text.split('\n').filter_map(last_state).filter(|line| !line.trim().is_empty())
}

fn visible(line: &str) -> String {
    let mut shown = String::new();
    let mut length = 0;
    for letter in line.chars() {
        let before = shown.len();
        match letter {
            '\t' => shown.push(' '),
            // Among them those that hide text or turn its direction.
            letter if is_hidden(letter) => {
                write!(shown, "\\u{{{:x}}}", letter as u32).expect("strings take everything")
            }
            letter if letter.is_control() => {
                write!(shown, "\\x{:02x}", letter as u32).expect("strings take everything")
            }
            letter => shown.push(letter),
        }
        length += shown[before..].chars().count();
        if length > LONGEST_LINE {
            let kept: String = shown.chars().take(LONGEST_LINE - 1).collect();
            return format!("{kept}…");
        }
    }
    shown
}

/// Characters of Unicode's category Cf and line ends that [`char::is_control`] does not know.
fn is_hidden(letter: char) -> bool {
    matches!(letter,
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
        | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_shown_instead() {
        assert_eq!(first_lines("\x1b[31mred\x1b[0m\x07\tbell\u{9b}2J"), "\\x1b[31mred\\x1b[0m\\x07 bell\\x9b2J");
        assert_eq!(first_lines("a\u{202e}b\u{200b}c\u{e0041}"), "a\\u{202e}b\\u{200b}c\\u{e0041}");
        assert_eq!(first_lines("größer → ✓"), "größer → ✓");
    }

    #[test]
    fn of_a_line_of_progress_the_last_state_is_left() {
        assert_eq!(first_lines("step 1\rstep 2\rstep 3\r\nend\r\n\n \nlast"), "step 3\nend\nlast");
    }

    #[test]
    fn an_excerpt_has_a_bounded_size_whatever_the_log() {
        let log: String = (0..1000).map(|number| format!("{number} {}\n", "\x1b".repeat(5000))).collect();
        for (excerpt, first) in [(first_lines(&log), "0 "), (last_lines(&log), "980 ")] {
            assert!(excerpt.starts_with(first), "{excerpt}");
            assert_eq!(excerpt.lines().count(), MOST_LINES);
            assert!(
                excerpt.lines().all(|line| line.chars().count() == LONGEST_LINE && line.ends_with('…')),
                "{excerpt}"
            );
        }
        let whole = "x".repeat(LONGEST_LINE);
        assert_eq!(first_lines(&whole), whole);
    }

    #[test]
    fn the_end_of_a_long_log_is_read_in_whole_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        std::fs::write(&path, "short").unwrap();
        assert_eq!(read_end(&path), "short");
        let line = "ä".repeat(50) + "\n";
        std::fs::write(&path, line.repeat(2000) + "last\n").unwrap();
        let end = read_end(&path);
        assert!(end.len() <= END as usize && end.starts_with(&line) && end.ends_with("\nlast\n"));
        assert_eq!(read_end(&folder.path().join("nosuch")), "");
    }

    #[test]
    fn a_log_tells_most_from_the_line_on_that_names_the_cause() {
        let panic = "thread 'main' (7) panicked at src/model.rs:1:2:\nindex out of bounds\n";
        for telling in [
            panic,
            "thread 'main' panicked at src/model.rs:1:2:\nx\n",
            "FAIL: the loss is NaN\n",
            "error: a.parquet\n",
            "terminate called after throwing\n",
        ] {
            let log = format!("config: x\n WARN an error: no panic\nstep 1\n{telling}more\n");
            assert_eq!(telling_part(&log), format!("{telling}more\n"));
        }
        assert_eq!(telling_part("step 1\rerror: x"), "step 1\rerror: x");
        assert_eq!(telling_part("step 1\nstep 2"), "step 1\nstep 2");
    }
}
