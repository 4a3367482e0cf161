//! A tokenizer on disk: the merge ranks in tiktoken's text format, and a JSON header that says what
//! they belong to.

use super::{BYTE_TOKENS, PATTERN, SPECIAL_TOKENS};
use crate::atomic_file::write_atomically;
use anyhow::{Context, Result, anyhow, bail, ensure};
use base64::prelude::{BASE64_STANDARD, Engine};
use rustc_hash::FxHashSet;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fmt::Write;
use std::path::Path;

pub(crate) const RANKS_FILE: &str = "tokenizer.tiktoken";
pub(crate) const HEADER_FILE: &str = "tokenizer.json";
const FORMAT_VERSION: u64 = 1;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    format_version: u64,
    pattern: String,
    special_tokens: Vec<String>,
    vocab_size: usize,
    training_text_sha256: String,
    ranks_sha256: String,
}

/// What a header of any version holds.
#[derive(Deserialize)]
struct AnyHeader {
    format_version: u64,
}

/// Writes both files into `dir`, which is made if it is not there.
pub(super) fn save(dir: &Path, ranks: &[Vec<u8>], training_text_sha256: &str) -> Result<()> {
    std::fs::create_dir_all(dir).map_err(|error| {
        anyhow!("{}: cannot make the folder ({error}); hint: choose another with --cache-dir", dir.display())
    })?;
    let text = format_tiktoken(ranks);
    let header = Header {
        format_version: FORMAT_VERSION,
        pattern: PATTERN.into(),
        special_tokens: SPECIAL_TOKENS.map(String::from).to_vec(),
        vocab_size: ranks.len() + SPECIAL_TOKENS.len(),
        training_text_sha256: training_text_sha256.into(),
        ranks_sha256: sha256(&text),
    };
    let mut header = serde_json::to_string_pretty(&header)?;
    header.push('\n');
    // The header comes last: between the two writes an old header refuses the new ranks by their
    // hash.
    write_atomically(&dir.join(RANKS_FILE), text.as_bytes())?;
    write_atomically(&dir.join(HEADER_FILE), header.as_bytes())
}

/// Reads what [`save`] wrote: the ranks, and the hash of the training text.
pub(super) fn load(dir: &Path) -> Result<(Vec<Vec<u8>>, String)> {
    let header = read(&dir.join(HEADER_FILE), parse_header)?;
    let ranks = read(&dir.join(RANKS_FILE), |text| {
        let ranks = parse_tiktoken(text)?;
        let expected = header.vocab_size.saturating_sub(SPECIAL_TOKENS.len());
        ensure!(
            ranks.len() == expected,
            "expected {expected} ranks (the vocabulary of {} in {HEADER_FILE} less {} special tokens), found {}",
            header.vocab_size,
            SPECIAL_TOKENS.len(),
            ranks.len(),
        );
        let found = sha256(text);
        ensure!(
            found == header.ranks_sha256,
            "expected the ranks with the SHA-256 {} that {HEADER_FILE} names, found {found}",
            header.ranks_sha256,
        );
        Ok(ranks)
    })?;
    Ok((ranks, header.training_text_sha256))
}

/// SHA-256 of both files in `dir`.
pub(super) fn files_sha256(dir: &Path) -> Result<String> {
    let mut both = String::new();
    for name in [RANKS_FILE, HEADER_FILE] {
        both += &read(&dir.join(name), |text| Ok(format!("{} {name}\n", sha256(text))))?;
    }
    Ok(sha256(&both))
}

/// Parses the file at `path`; an error names the file, the reason and the way out.
fn read<T>(path: &Path, parse: impl FnOnce(&str) -> Result<T>) -> Result<T> {
    std::fs::read(path)
        .map_err(|error| anyhow!("expected a tokenizer file, cannot read it ({error})"))
        .and_then(|bytes| parse(std::str::from_utf8(&bytes).context("expected UTF-8 text, found other bytes")?))
        .map_err(|reason| {
            anyhow!("{}: {reason}; hint: prepare the data set again, which trains the tokenizer", path.display())
        })
}

fn parse_header(text: &str) -> Result<Header> {
    // The version alone first: another version may have other fields.
    let AnyHeader { format_version } = parse_json(text)?;
    ensure!(format_version == FORMAT_VERSION, "expected format version {FORMAT_VERSION}, found {format_version}");
    let header: Header = parse_json(text)?;
    ensure!(header.pattern == PATTERN, "expected the split pattern {PATTERN:?}, found {:?}", header.pattern);
    ensure!(
        header.special_tokens == SPECIAL_TOKENS,
        "expected the special tokens {SPECIAL_TOKENS:?}, found {:?}",
        header.special_tokens
    );
    Ok(header)
}

fn parse_json<'t, T: Deserialize<'t>>(text: &'t str) -> Result<T> {
    serde_json::from_str(text).map_err(|error| anyhow!("expected a tokenizer header in JSON, found an error: {error}"))
}

/// Tokens in id order as tiktoken's text format: a line each, the token's bytes in base64, a space,
/// the rank.
fn format_tiktoken(ranks: &[Vec<u8>]) -> String {
    let mut text = String::new();
    for (rank, token) in ranks.iter().enumerate() {
        BASE64_STANDARD.encode_string(token, &mut text);
        text.push(' ');
        text.push_str(&rank.to_string());
        text.push('\n');
    }
    text
}

/// Tokens in id order (without the special ones) from tiktoken's text format: a line each, the
/// token's bytes in base64, a space, the rank.
///
/// # Errors
/// Names the line that is not of that form, or whose rank is not the next one, or whose token was
/// there before; the first 256 tokens must be the single bytes in order. The caller adds the file's
/// name and a hint.
pub fn parse_tiktoken(text: &str) -> Result<Vec<Vec<u8>>> {
    let mut ranks: Vec<Vec<u8>> = Vec::new();
    let mut seen = FxHashSet::default();
    for (line, number) in text.lines().zip(1..) {
        let (token, rank) = line
            .split_once(' ')
            .ok_or_else(|| anyhow!("line {number}: expected base64, a space and a rank, found {line:?}"))?;
        let token = BASE64_STANDARD
            .decode(token)
            .map_err(|error| anyhow!("line {number}: expected a token in base64, found {token:?} ({error})"))?;
        let next = ranks.len();
        ensure!(rank.parse() == Ok(next), "line {number}: expected rank {next}, found {rank:?}");
        match u8::try_from(next) {
            Ok(byte) => ensure!(
                token == [byte],
                "line {number}: expected the single byte {byte} as rank {byte}, found the bytes {token:?}"
            ),
            Err(_) => ensure!(
                token.len() > 1,
                "line {number}: expected a merged token of at least two bytes, found the bytes {token:?}"
            ),
        }
        if !seen.insert(token.clone()) {
            bail!("line {number}: expected a new token, found the bytes {token:?} again");
        }
        ranks.push(token);
    }
    ensure!(
        ranks.len() >= BYTE_TOKENS,
        "expected at least the {BYTE_TOKENS} single bytes, found {} ranks (is the file cut short?)",
        ranks.len()
    );
    Ok(ranks)
}

fn sha256(text: &str) -> String {
    hexadecimal(&Sha256::digest(text))
}

/// Two lower-case digits a byte.
pub fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut digits, byte| {
        write!(digits, "{byte:02x}").expect("a String takes everything");
        digits
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks() -> Vec<Vec<u8>> {
        let mut ranks: Vec<Vec<u8>> = (0..=u8::MAX).map(|byte| vec![byte]).collect();
        ranks.push(b"ab".to_vec());
        ranks.push(b"abc".to_vec());
        ranks
    }

    /// Saves a tokenizer, changes one of its files, and returns the message with which it is
    /// refused.
    fn refusal(file: &str, change: impl Fn(String) -> String) -> String {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), &ranks(), "0123").unwrap();
        let path = dir.path().join(file);
        let before = std::fs::read_to_string(&path).unwrap();
        let after = change(before.clone());
        assert_ne!(before, after);
        std::fs::write(&path, after).unwrap();
        let message = format!("{:#}", load(dir.path()).unwrap_err());
        assert!(message.contains(path.to_str().unwrap()), "{message}");
        assert!(message.contains("; hint: ") && !message.contains('\n'), "{message}");
        message
    }

    fn assert_refused(file: &str, reason: &str, change: impl Fn(String) -> String) {
        let message = refusal(file, change);
        assert!(message.contains(reason), "expected {reason:?} in {message}");
    }

    #[test]
    fn what_was_saved_is_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let inside = dir.path().join("made/on the way");
        save(&inside, &ranks(), "0123").unwrap();
        assert_eq!(load(&inside).unwrap(), (ranks(), "0123".to_string()));
    }

    #[test]
    fn damaged_ranks_are_refused_with_the_reason() {
        let file = RANKS_FILE;
        assert_refused(file, "expected 258 ranks", |text| text.lines().take(257).map(|l| format!("{l}\n")).collect());
        assert_refused(file, "cut short", |text| text.lines().take(9).map(|l| format!("{l}\n")).collect());
        assert_refused(file, "cut short", |_| String::new());
        assert_refused(file, "line 258: expected base64, a space", |text| text[..text.len() - 5].into());
        assert_refused(file, "line 258: expected rank 257, found \"25\"", |text| text[..text.len() - 2].into());
        assert_refused(file, "line 1: expected a token in base64", |text| text.replacen('A', "*", 1));
        assert_refused(file, "line 257: expected rank 256, found \"300\"", |text| text.replace(" 256\n", " 300\n"));
        assert_refused(file, "line 66: expected the single byte 65", |text| text.replace("QQ== 65", "YWI= 65"));
        assert_refused(file, "line 258: expected a new token", |text| text.replace("YWJj 257", "YWI= 257"));
        assert_refused(file, "line 258: expected a merged token", |text| text.replace("YWJj 257", "QQ== 257"));
        assert_refused(file, "SHA-256", |text| text.replace("YWJj 257", "YWJk 257"));
    }

    #[test]
    fn a_mismatched_header_is_refused_with_the_reason() {
        let file = HEADER_FILE;
        assert_refused(file, "expected format version 1, found 2", |text| {
            text.replace("\"format_version\": 1", "\"format_version\": 2, \"later_field\": true")
        });
        assert_refused(file, "split pattern", |text| text.replace("{1,2}", "{1,3}"));
        assert_refused(file, "special tokens", |text| text.replace("reserved_3", "reserved_4"));
        assert_refused(file, "JSON", |text| text[..40].into());
        assert_refused(file, "unknown field", |text| text.replacen('{', "{\"extra\": 1,", 1));
        let other_size = |text: String| text.replace("\"vocab_size\": 262", "\"vocab_size\": 8192");
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), &ranks(), "0123").unwrap();
        let header = dir.path().join(file);
        std::fs::write(&header, other_size(std::fs::read_to_string(&header).unwrap())).unwrap();
        let message = load(dir.path()).unwrap_err().to_string();
        assert!(message.contains(RANKS_FILE) && message.contains("8192 in tokenizer.json"), "{message}");
    }

    #[test]
    fn a_missing_or_binary_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let message = load(dir.path()).unwrap_err().to_string();
        assert!(message.contains(HEADER_FILE) && message.contains("hint"), "{message}");
        save(dir.path(), &ranks(), "0123").unwrap();
        std::fs::write(dir.path().join(RANKS_FILE), [0xff, 0xfe]).unwrap();
        let message = load(dir.path()).unwrap_err().to_string();
        assert!(message.contains(RANKS_FILE) && message.contains("UTF-8"), "{message}");
    }
}
