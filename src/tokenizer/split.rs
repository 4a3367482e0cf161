//! Cutting text into the pieces that byte-pair merges never cross.

use regex::Regex;
use std::sync::LazyLock;

/// The split pattern, as `tiktoken` and the tokenizer's header spell it.
pub const PATTERN: &str = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";

/// [`PATTERN`] as an anchored expression without backtracking, so that it runs in linear time.
///
/// The possessive quantifiers may go: what follows each cannot start with a character of its class,
/// so giving characters back never helps. `\s+(?!\S)|\s+` becomes `\s+`, which [`piece_end`]
/// corrects.
static ANCHORED: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"^(?:'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+)")
        .expect("the split expression is constant")
});

thread_local! {
    // Threads that share one expression contend for its scratch space.
    static EXPRESSION: Regex = ANCHORED.clone();
}

/// Calls `visit` with each piece of `text`, in order; the pieces together are the whole text.
pub fn for_each_piece<'t>(text: &'t str, mut visit: impl FnMut(&'t str)) {
    EXPRESSION.with(|expression| {
        let mut rest = text;
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(piece_end(expression, rest));
            visit(piece);
            rest = after;
        }
    });
}

/// Length in bytes of the piece with which `rest` (not empty) starts.
fn piece_end(expression: &Regex, rest: &str) -> usize {
    let end = expression
        .find(rest)
        .expect("every character starts some alternative")
        .end();
    // White space before a word leaves its last character to that word: this is what `\s+(?!\S)`
    // says. Only the alternative `\s+` ends in white space other than a line break, and it takes
    // the whole run, so that what follows is the end of the text or not white space.
    if end < rest.len()
        && let Some(last) = rest[..end].chars().next_back()
        && last.is_whitespace()
        && !matches!(last, '\r' | '\n')
        && end > last.len_utf8()
    {
        return end - last.len_utf8();
    }
    end
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    fn pieces(text: &str) -> Vec<&str> {
        let mut pieces = Vec::new();
        for_each_piece(text, |piece| pieces.push(piece));
        pieces
    }

    /// The pieces by the regular-expression engine that `tiktoken-rs` uses, from the pattern as it
    /// is written.
    fn reference_pieces<'t>(pattern: &fancy_regex::Regex, text: &'t str) -> Vec<&'t str> {
        pattern
            .find_iter(text)
            .map(|found| found.unwrap().as_str())
            .collect()
    }

    #[test]
    fn pieces_equal_those_of_the_pattern_on_random_text() {
        let pattern = fancy_regex::Regex::new(PATTERN).unwrap();
        let mut random = StdRng::seed_from_u64(1);
        // Characters on which the alternatives turn: cases, white space of every kind, marks,
        // digits of other scripts, the long s (which `(?i:s)` matches).
        let telling: Vec<char> =
            "''sSdDmMtTlLvVeErRſKaé好ש\u{301}\u{200d}١²Ⅷ0179 \u{a0}\u{3000}\u{2028}\u{85}\t\u{b}\u{c}\u{1c}\r\n\r\n   .,<|_🦀"
                .chars()
                .collect();
        for _ in 0..100_000 {
            let length = random.random_range(0..24);
            let text: String = (0..length)
                .map(|_| match random.random_range(0..8) {
                    0 => random.random::<char>(),
                    _ => telling[random.random_range(0..telling.len())],
                })
                .collect();
            assert_eq!(pieces(&text), reference_pieces(&pattern, &text), "{text:?}");
        }
    }

    #[test]
    fn pieces_equal_those_of_the_pattern_around_every_character() {
        let pattern = fancy_regex::Regex::new(PATTERN).unwrap();
        for character in '\0'..=char::MAX {
            let text = format!("a{character}b {character}{character} \n{character}1  '{character}");
            assert_eq!(pieces(&text), reference_pieces(&pattern, &text), "{text:?}");
        }
    }

    #[test]
    fn a_long_run_is_split_in_linear_time() {
        let spaces = " ".repeat(2_000_000);
        let text = format!("{spaces}x{spaces}\n{spaces}");
        let lengths: Vec<usize> = pieces(&text).iter().map(|piece| piece.len()).collect();
        assert_eq!(lengths, [1_999_999, 2, 2_000_001, 2_000_000]);
    }
}
