//! Documents in a folder of `.txt`, `.md` and `.jsonl` files, split by a hash of their text.
//!
//! A line of a `.jsonl` file is a document. A `.txt` or `.md` file, which may be a whole book, is cut into documents: packing
//! keeps at most one row of each, and would drop almost all of a book.

use super::documents::Split;
use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The field of a `.jsonl` line that holds the text.
const TEXT_FIELD: &str = "text";
/// One document in this many is validation, by its hash.
const VALIDATION_EVERY: u64 = 20;

/// A document from a `.txt` or `.md` file has at most this many characters.
///
/// A few documents fill a row of 2048 tokens then, and little is cropped: of web text run together packing drops 2 %, with
/// pieces of 10,000 characters 22 %.
pub const LONGEST_PIECE: usize = 2_000;

/// How a folder of text is split, for people.
pub const SPLIT_RULE: &str = "a document is validation if the first 8 bytes of the SHA-256 of its text, as a big-endian number, divide by 20 \
     (where that leaves one side without text: the non-empty document with the lowest hash)";

/// The documents of one split; the text stays in the files.
pub struct TextFiles {
    files: Arc<Vec<PathBuf>>,
    places: Vec<Place>,
}

/// Where a document lies: a piece of a file, or a line of a `.jsonl` file.
#[derive(Clone, Copy)]
struct Place {
    file: usize,
    offset: u64,
    bytes: usize,
    hash: u64,
    empty: bool,
}

impl TextFiles {
    /// The documents of `split` in `files`, in the given order and within a file by line.
    ///
    /// # Errors
    /// If a file is unreadable or no UTF-8, if a line is no JSON object with the text field, or if there are not two
    /// non-empty documents, one for each side.
    pub fn open(files: Vec<PathBuf>, split: Split) -> Result<Self> {
        let mut places = Vec::new();
        for (file, path) in files.iter().enumerate() {
            if is_lines(path) {
                scan_lines(file, path, &mut places)?;
            } else {
                let text = std::fs::read_to_string(path).map_err(|error| unreadable(path, &error))?;
                let places_of_pieces = pieces(&text).into_iter().map(|piece| {
                    let piece_text = &text[piece.clone()];
                    Place::new(file, piece.start as u64, piece.len(), piece_text)
                });
                places.extend(places_of_pieces);
            }
        }
        let is_validation = validation_rule(&places).with_context(|| {
            let folder = files.first().and_then(|file| file.parent()).unwrap_or(Path::new("."));
            format!(
                "{}: expected at least two non-empty documents, one to train on and one for validation, found {} in {} files; \
                 hint: add text, or cut it into several .txt files or .jsonl lines",
                folder.display(),
                places.iter().filter(|place| !place.empty).count(),
                files.len()
            )
        })?;
        places.retain(|place| is_validation(place) == (split == Split::Validation));
        Ok(Self { files: Arc::new(files), places })
    }

    /// Number of documents.
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// The text of document `index`.
    ///
    /// # Errors
    /// If the file has changed since it was opened so that the document is no longer there.
    pub fn document(&self, index: usize) -> Result<String> {
        let place = self.places[index];
        let path = &self.files[place.file];
        let mut bytes = vec![0; place.bytes];
        let mut file = File::open(path).map_err(|error| unreadable(path, &error))?;
        file.seek(SeekFrom::Start(place.offset))
            .and_then(|_| file.read_exact(&mut bytes))
            .map_err(|error| unreadable(path, &error))?;
        if is_lines(path) {
            text_of_line(path, &format!("byte {}", place.offset), &bytes)
        } else {
            String::from_utf8(bytes).map_err(|error| unreadable(path, &error))
        }
    }
}

impl Place {
    fn new(file: usize, offset: u64, bytes: usize, text: &str) -> Self {
        let digest = Sha256::digest(text.as_bytes());
        let head: [u8; 8] = std::array::from_fn(|byte| digest[byte]);
        Self { file, offset, bytes, hash: u64::from_be_bytes(head), empty: text.is_empty() }
    }
}

/// Which documents are validation, see [`SPLIT_RULE`]; none if there are not two different non-empty documents.
fn validation_rule(places: &[Place]) -> Option<impl Fn(&Place) -> bool + use<>> {
    let hashes = || places.iter().filter(|place| !place.empty).map(|place| place.hash);
    let by_rule = hashes().filter(|hash| hash.is_multiple_of(VALIDATION_EVERY)).count();
    let lowest = hashes().min()?;
    let both_sides = by_rule > 0 && by_rule < hashes().count();
    if !both_sides && hashes().all(|hash| hash == lowest) {
        return None;
    }
    Some(
        move |place: &Place| {
            if both_sides { place.hash.is_multiple_of(VALIDATION_EVERY) } else { place.hash == lowest && !place.empty }
        },
    )
}

/// Cuts a file's text into documents, as byte ranges that follow on each other.
///
/// Each takes as much as [`LONGEST_PIECE`] allows and ends after the last blank line in that, or else the last line, or else
/// the last space, or else where it must.
fn pieces(text: &str) -> Vec<Range<usize>> {
    let mut pieces = Vec::new();
    let mut start = 0;
    while let Some((most, _)) = text[start..].char_indices().nth(LONGEST_PIECE) {
        let window = &text[start..start + most];
        let first_letter = most - window.trim_start().len();
        let last_end = |end: &&str| window.rfind(*end).map(|at| at + end.len()).filter(|&cut| cut > first_letter);
        let length = ["\n\n", "\n\r\n", "\n", " "].iter().find_map(last_end).unwrap_or(most);
        pieces.push(start..start + length);
        start += length;
    }
    pieces.push(start..text.len());
    pieces
}

fn is_lines(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("jsonl"))
}

fn scan_lines(file: usize, path: &Path, places: &mut Vec<Place>) -> Result<()> {
    let mut lines = BufReader::new(File::open(path).map_err(|error| unreadable(path, &error))?);
    let mut line = Vec::new();
    let mut offset = 0;
    for number in 1.. {
        line.clear();
        let bytes = lines.read_until(b'\n', &mut line).map_err(|error| unreadable(path, &error))?;
        if bytes == 0 {
            break;
        }
        if !line.iter().all(u8::is_ascii_whitespace) {
            let text = text_of_line(path, &format!("line {number}"), &line)?;
            places.push(Place::new(file, offset, bytes, &text));
        }
        offset += bytes as u64;
    }
    Ok(())
}

fn text_of_line(path: &Path, place: &str, line: &[u8]) -> Result<String> {
    let hint = "hint: write one JSON object per line, {\"text\": \"…\"}";
    let mut object: Map<String, Value> = serde_json::from_slice(line)
        .map_err(|error| anyhow!("{}, {place}: expected a JSON object, found: {error}; {hint}", path.display()))?;
    match object.remove(TEXT_FIELD) {
        Some(Value::String(text)) => Ok(text),
        Some(Value::Null) => Ok(String::new()),
        Some(other) => {
            bail!("{}, {place}: expected a string in the field `{TEXT_FIELD}`, found {other}; {hint}", path.display())
        }
        None => {
            let found = object.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            bail!("{}, {place}: expected a field `{TEXT_FIELD}`, found the fields: {found}; {hint}", path.display())
        }
    }
}

fn unreadable(path: &Path, error: &dyn std::error::Error) -> anyhow::Error {
    anyhow!("{}: expected readable UTF-8 text, found: {error}; hint: convert the file or move it away", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn texts(files: &[PathBuf], split: Split) -> Vec<String> {
        let files = TextFiles::open(files.to_vec(), split).unwrap();
        (0..files.len()).map(|index| files.document(index).unwrap()).collect()
    }

    fn lines(folder: &Path, texts: &[String]) -> PathBuf {
        let path = folder.join("corpus.jsonl");
        let lines = texts.iter().map(|text| serde_json::json!({ "id": 1, "text": text }).to_string());
        fs::write(&path, lines.collect::<Vec<_>>().join("\n")).unwrap();
        path
    }

    fn refusal(name: &str, content: &[u8]) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        fs::write(&path, content).unwrap();
        let message = TextFiles::open(vec![path], Split::Train).err().expect("refused").to_string();
        assert!(message.contains("hint: ") && !message.contains('\n'), "{message}");
        message
    }

    #[test]
    fn every_document_is_on_exactly_one_side() {
        let folder = tempfile::tempdir().unwrap();
        let all: Vec<String> = (0..400).map(|number| format!("tale \"{number}\"\n<|reserved_0|> ä")).collect();
        let file = lines(folder.path(), &all);
        let train = texts(std::slice::from_ref(&file), Split::Train);
        let validation = texts(&[file], Split::Validation);
        assert!((5..40).contains(&validation.len()), "{}", validation.len());
        let mut union = [train, validation].concat();
        union.sort();
        let mut expected = all;
        expected.sort();
        assert_eq!(union, expected);
    }

    #[test]
    fn a_document_keeps_its_side_when_others_go() {
        let folder = tempfile::tempdir().unwrap();
        let all: Vec<String> = (0..400).map(|number| format!("tale {number}")).collect();
        let before = texts(&[lines(folder.path(), &all)], Split::Validation);
        let after = texts(&[lines(folder.path(), &all[100..])], Split::Validation);
        let kept: Vec<_> = before.iter().filter(|text| all[100..].contains(text)).cloned().collect();
        assert_eq!(after, kept);
    }

    #[test]
    fn two_files_suffice_for_both_sides() {
        let folder = tempfile::tempdir().unwrap();
        let files = ["a.txt", "b.md"].map(|name| folder.path().join(name));
        for file in &files {
            fs::write(file, format!("text of {}", file.display())).unwrap();
        }
        assert_eq!(texts(&files, Split::Train).len(), 1);
        assert_eq!(texts(&files, Split::Validation).len(), 1);
    }

    fn cut(text: &str) -> Vec<&str> {
        let pieces: Vec<&str> = pieces(text).into_iter().map(|piece| &text[piece]).collect();
        assert_eq!(pieces.concat(), text);
        assert!(pieces.iter().all(|piece| piece.chars().count() <= LONGEST_PIECE));
        pieces
    }

    #[test]
    fn a_book_is_cut_at_blank_lines() {
        for blank in ["\n\n", "\r\n\r\n"] {
            let paragraph = format!("{}\n{}.{blank}", "word ".repeat(40), "ä".repeat(99));
            let book = paragraph.repeat(60);
            let pieces = cut(&book);
            let whole = LONGEST_PIECE / paragraph.chars().count();
            assert!(whole > 1 && pieces.len() == 60usize.div_ceil(whole), "{}", pieces.len());
            assert!(pieces.iter().all(|piece| piece.starts_with("word ") && piece.ends_with(blank)));
        }
    }

    #[test]
    fn without_blank_lines_a_book_is_cut_at_lines_or_spaces_or_anywhere() {
        assert!(cut(&format!("{}\n", "a line ".repeat(20)).repeat(100)).iter().all(|piece| piece.ends_with(" \n")));
        assert!(cut(&"word ".repeat(9999)).iter().all(|piece| piece.starts_with('w') && piece.ends_with(' ')));
        let letters = "ä".repeat(2 * LONGEST_PIECE + 1);
        assert_eq!(
            cut(&letters).iter().map(|piece| piece.len()).collect::<Vec<_>>(),
            [2 * LONGEST_PIECE, 2 * LONGEST_PIECE, 2]
        );
        // A blank line before any text is no end of a document.
        assert_eq!(cut(&format!("\n\n{letters}"))[0].chars().count(), LONGEST_PIECE);
    }

    #[test]
    fn a_short_file_is_one_document_and_a_long_one_has_both_sides() {
        assert_eq!(cut(&"x\n\n".repeat(600)).len(), 1);
        assert_eq!(cut(""), [""]);
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("book.txt");
        let book: String = (0..5000).map(|number| format!("Paragraph {number}.\n\n")).collect();
        fs::write(&file, &book).unwrap();
        let train = texts(std::slice::from_ref(&file), Split::Train);
        let validation = texts(&[file], Split::Validation);
        assert!(!validation.is_empty() && train.len() > 5 * validation.len());
        assert_eq!([train, validation].concat().iter().map(String::len).sum::<usize>(), book.len());
    }

    #[test]
    fn one_document_is_too_few() {
        assert!(refusal("a.txt", b"all of it").contains("at least two non-empty documents"));
        assert!(refusal("a.jsonl", b"{\"text\": \"a\"}\n\n{\"text\": null}\n").contains("found 1 in 1 files"));
    }

    #[test]
    fn bad_lines_are_named_by_number() {
        assert!(
            refusal("a.jsonl", b"{\"text\": \"a\"}\n\nnot json\n").contains("a.jsonl, line 3: expected a JSON object")
        );
        let missing = refusal("a.jsonl", b"{\"body\": \"a\", \"id\": 1}\n");
        assert!(missing.contains("line 1: expected a field `text`, found the fields: body, id"), "{missing}");
        assert!(refusal("a.jsonl", b"{\"text\": 7}\n").contains("expected a string in the field `text`, found 7"));
    }

    #[test]
    fn text_that_is_not_utf8_is_refused() {
        assert!(refusal("a.txt", b"caf\xe9").contains("a.txt: expected readable UTF-8"));
    }
}
