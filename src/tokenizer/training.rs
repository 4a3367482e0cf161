//! Learning the merges: count the distinct pieces of the text, then merge the most frequent pair
//! until the vocabulary is full.
//!
//! Counts are kept exact by updating only the pieces that a merge changes (Sennrich et al. 2016,
//! "Neural Machine Translation of Rare Words with Subword Units", algorithm 1 with its suggested
//! index).

use super::split::for_each_piece;
use super::{BYTE_TOKENS, SPECIAL_TOKENS};
use anyhow::{Result, bail, ensure};
use rayon::prelude::*;
use rustc_hash::FxHashMap;
use sha2::{Digest, Sha256};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What training reads of the documents.
#[derive(Clone, Debug)]
pub struct TrainOptions {
    /// Size of the finished vocabulary: 256 bytes, the merges, the special tokens.
    pub vocab_size: usize,
    /// Training stops after the document with which this many characters are reached.
    pub max_chars: usize,
    /// Each document is cut at this many characters.
    pub doc_cap_chars: usize,
}

/// What training finds: the tokens in id order without the special ones, and the hash of the text
/// they came from.
pub(super) struct Trained {
    pub(super) ranks: Vec<Vec<u8>>,
    pub(super) training_text_sha256: String,
}

/// Bytes of text that are held at once while pieces are counted.
const BATCH_BYTES: usize = 8 << 20;

/// Two tokens side by side.
type Pair = (u32, u32);

pub(super) fn train(
    documents: impl Iterator<Item = Result<String>>,
    options: &TrainOptions,
    mut progress: impl FnMut(&str, u64, u64),
) -> Result<Trained> {
    let fixed = BYTE_TOKENS + SPECIAL_TOKENS.len();
    ensure!(
        options.vocab_size > fixed,
        "--vocab-size: expected at least {} ({BYTE_TOKENS} bytes, one merge, {} special tokens), found {}; hint: pass a larger one, such as 8192",
        fixed + 1,
        SPECIAL_TOKENS.len(),
        options.vocab_size,
    );
    let (pieces, training_text_sha256) = count_pieces(documents, options, &mut progress)?;
    let wanted = options.vocab_size - fixed;
    let merges = Merger::new(pieces).run(wanted, |done| progress("learning merges", done as u64, wanted as u64));
    if merges.len() < wanted {
        bail!(
            "--vocab-size {}: expected text with {wanted} merges, found {}; hint: train on more text or pass a smaller one ({} is the most that this text gives)",
            options.vocab_size,
            merges.len(),
            merges.len() + fixed,
        );
    }
    let mut ranks: Vec<Vec<u8>> = (0..=u8::MAX).map(|byte| vec![byte]).collect();
    for (left, right) in merges {
        ranks.push([ranks[left as usize].as_slice(), &ranks[right as usize]].concat());
    }
    Ok(Trained { ranks, training_text_sha256 })
}

/// How often each distinct piece occurs, and the SHA-256 of the documents read: for each its length
/// in bytes (as 8 little-endian bytes) and its text, after the cut.
fn count_pieces(
    documents: impl Iterator<Item = Result<String>>,
    options: &TrainOptions,
    mut progress: impl FnMut(&str, u64, u64),
) -> Result<(FxHashMap<Box<str>, u64>, String)> {
    let mut hash = Sha256::new();
    let mut documents = documents.fuse();
    // One table a thread, kept from batch to batch: merging them after each batch would cost as
    // much as counting.
    let mut tables: Vec<FxHashMap<Box<str>, u64>> = vec![FxHashMap::default(); rayon::current_num_threads()];
    let mut chars = 0;
    let mut more = true;
    while more {
        let mut batch = Vec::new();
        let mut batch_bytes = 0;
        while batch_bytes < BATCH_BYTES {
            let Some(document) = documents.next() else {
                more = false;
                break;
            };
            let mut document = document?;
            chars += cut(&mut document, options.doc_cap_chars);
            hash.update((document.len() as u64).to_le_bytes());
            hash.update(&document);
            batch_bytes += document.len();
            batch.push(document);
            if chars >= options.max_chars {
                more = false;
                break;
            }
        }
        let next = AtomicUsize::new(0);
        tables.par_iter_mut().for_each(|table| {
            while let Some(document) = batch.get(next.fetch_add(1, Ordering::Relaxed)) {
                for_each_piece(document, |piece| match table.get_mut(piece) {
                    Some(count) => *count += 1,
                    None => {
                        table.insert(piece.into(), 1);
                    }
                });
            }
        });
        progress("counting pieces", chars.min(options.max_chars) as u64, options.max_chars as u64);
    }
    let mut tables = tables.into_iter();
    let mut counts = tables.next().unwrap_or_default();
    for (piece, count) in tables.flatten() {
        *counts.entry(piece).or_default() += count;
    }
    let hash = super::hexadecimal(&hash.finalize());
    Ok((counts, hash))
}

/// Cuts `document` at `cap` characters and returns how many it then has.
fn cut(document: &mut String, cap: usize) -> usize {
    // Most documents are shorter, and counting is much faster than finding a character's place.
    let chars = document.chars().count();
    if chars <= cap {
        return chars;
    }
    let end = document.char_indices().nth(cap).map_or(document.len(), |(place, _)| place);
    document.truncate(end);
    // The memory of what was cut off would count against no bound.
    document.shrink_to_fit();
    cap
}

/// A distinct piece: a range of [`Merger::tokens`], which shrinks as its tokens are merged.
struct Word {
    start: usize,
    length: usize,
    count: u64,
}

/// Where a pair stands.
#[derive(Default)]
struct Occurrences {
    /// In the whole text, overlapping ones counted each.
    count: u64,
    /// Indices of the words that hold the pair or held it once, each at most once.
    words: Vec<u32>,
}

/// All words in tokens, and the exact count of every pair of neighbours.
struct Merger {
    tokens: Vec<u32>,
    words: Vec<Word>,
    pairs: FxHashMap<Pair, Occurrences>,
}

impl Merger {
    fn new(pieces: FxHashMap<Box<str>, u64>) -> Self {
        let mut merger = Self { tokens: Vec::new(), words: Vec::new(), pairs: FxHashMap::default() };
        for (piece, count) in pieces {
            let start = merger.tokens.len();
            merger.tokens.extend(piece.bytes().map(u32::from));
            let index = merger.words.len() as u32;
            for neighbours in merger.tokens[start..].windows(2) {
                merger.pairs.entry((neighbours[0], neighbours[1])).or_default().add(index, count);
            }
            merger.words.push(Word { start, length: piece.len(), count });
        }
        merger
    }

    /// The pairs to merge, at most `wanted`; fewer when no pair is left.
    fn run(mut self, wanted: usize, mut progress: impl FnMut(usize)) -> Vec<Pair> {
        // The highest count, and of those the lower pair, comes off first.
        let mut queue: BinaryHeap<(u64, Reverse<Pair>)> =
            self.pairs.iter().map(|(&pair, found)| (found.count, Reverse(pair))).collect();
        let mut merges = Vec::new();
        while merges.len() < wanted
            && let Some((count, Reverse(pair))) = queue.pop()
        {
            // Counts in the queue may be out of date, but only too high: a pair gains occurrences
            // only in the merge that makes its newer token, before it is queued.
            let current = self.pairs[&pair].count;
            if current != count {
                if current > 0 {
                    queue.push((current, Reverse(pair)));
                }
                continue;
            }
            let token = (BYTE_TOKENS + merges.len()) as u32;
            for new in self.merge(pair, token) {
                // Made and lost again within one word ("abab"), a pair may stand nowhere.
                let count = self.pairs[&new].count;
                if count > 0 {
                    queue.push((count, Reverse(new)));
                }
            }
            merges.push(pair);
            progress(merges.len());
        }
        merges
    }

    /// Replaces `pair` by `token` everywhere and returns the pairs that this makes.
    fn merge(&mut self, pair: Pair, token: u32) -> Vec<Pair> {
        let mut new = Vec::new();
        let Some(merged) = self.pairs.get_mut(&pair) else {
            return new;
        };
        merged.count = 0;
        for index in std::mem::take(&mut merged.words) {
            let word = &mut self.words[index as usize];
            let count = word.count;
            let tokens = &mut self.tokens[word.start..word.start + word.length];
            word.length = merge_in_word(tokens, pair, token, |change| match change {
                // Overlapping occurrences of the merged pair itself ("aaa") went with the count
                // above.
                Change::Lost(lost) if lost == pair => {}
                Change::Lost(lost) => {
                    if let Some(found) = self.pairs.get_mut(&lost) {
                        found.count -= count;
                    }
                }
                Change::Made(made) => match self.pairs.entry(made) {
                    Entry::Occupied(mut found) => found.get_mut().add(index, count),
                    Entry::Vacant(place) => {
                        place.insert(Occurrences::default()).add(index, count);
                        new.push(made);
                    }
                },
            });
        }
        new
    }
}

impl Occurrences {
    /// Words come in order, so that a word that is there already is the last one.
    fn add(&mut self, word: u32, count: u64) {
        self.count += count;
        if self.words.last() != Some(&word) {
            self.words.push(word);
        }
    }
}

/// A pair of neighbours that a merge takes from a word or brings to it.
enum Change {
    Lost(Pair),
    Made(Pair),
}

/// Replaces `pair` by `token` in `tokens`, from left to right, and returns the new length; what
/// lies behind it is stale.
fn merge_in_word(tokens: &mut [u32], pair: Pair, token: u32, mut report: impl FnMut(Change)) -> usize {
    let (left, right) = pair;
    let (mut from, mut to) = (0, 0);
    while from < tokens.len() {
        if tokens[from] != left || tokens.get(from + 1) != Some(&right) {
            tokens[to] = tokens[from];
            from += 1;
            to += 1;
            continue;
        }
        if to > 0 {
            let before = tokens[to - 1];
            report(Change::Made((before, token)));
            report(Change::Lost((before, left)));
        }
        if let Some(&after) = tokens.get(from + 2) {
            report(Change::Made((token, after)));
            report(Change::Lost((right, after)));
        }
        tokens[to] = token;
        from += 2;
        to += 1;
    }
    to
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};
    use std::collections::HashMap;

    fn options(vocab_size: usize) -> TrainOptions {
        TrainOptions { vocab_size, max_chars: usize::MAX, doc_cap_chars: usize::MAX }
    }

    fn train_on(texts: &[&str], options: &TrainOptions) -> Result<Trained> {
        train(texts.iter().map(|text| Ok(text.to_string())), options, |_, _, _| {})
    }

    /// Recounts every pair before each merge.
    fn naive_merges(pieces: &[(Vec<u32>, u64)], wanted: usize) -> Vec<Pair> {
        let mut pieces = pieces.to_vec();
        let mut merges = Vec::new();
        while merges.len() < wanted {
            let mut counts: HashMap<Pair, u64> = HashMap::new();
            for (tokens, count) in &pieces {
                for neighbours in tokens.windows(2) {
                    *counts.entry((neighbours[0], neighbours[1])).or_default() += count;
                }
            }
            let Some((&pair, _)) = counts.iter().max_by_key(|&(&pair, &count)| (count, Reverse(pair))) else {
                break;
            };
            for (tokens, _) in &mut pieces {
                let mut place = 0;
                while place + 1 < tokens.len() {
                    if (tokens[place], tokens[place + 1]) == pair {
                        tokens.splice(place..place + 2, [(BYTE_TOKENS + merges.len()) as u32]);
                    }
                    place += 1;
                }
            }
            merges.push(pair);
        }
        merges
    }

    #[test]
    fn merges_equal_those_of_recounting_everything() {
        let mut random = StdRng::seed_from_u64(2);
        for round in 0..300 {
            // Few letters make runs and overlaps; few words make ties.
            let letters = random.random_range(1..5);
            let mut pieces: FxHashMap<Box<str>, u64> = FxHashMap::default();
            for _ in 0..random.random_range(0..30) {
                let length = random.random_range(1..14);
                let piece: String = (0..length).map(|_| (b'a' + random.random_range(0..letters)) as char).collect();
                pieces.insert(piece.into(), random.random_range(1..4));
            }
            let tokens: Vec<(Vec<u32>, u64)> =
                pieces.iter().map(|(piece, &count)| (piece.bytes().map(u32::from).collect(), count)).collect();
            let wanted = random.random_range(1..80);
            assert_eq!(Merger::new(pieces).run(wanted, |_| {}), naive_merges(&tokens, wanted), "round {round}");
        }
    }

    #[test]
    fn ties_go_to_the_lower_pair() {
        let trained = train_on(&["cd", "ab", "ab cd"], &options(262)).unwrap();
        assert_eq!(trained.ranks[256..], [b"ab".to_vec(), b"cd".to_vec()]);
    }

    #[test]
    fn documents_are_cut_by_characters_and_reading_stops_after_the_one_that_reaches_the_limit() {
        let limited = TrainOptions { vocab_size: 261, max_chars: 6, doc_cap_chars: 4 };
        // 4 of 5 characters, then 2, which reaches 6; the rest is not read, or its error would
        // show.
        let documents = ["éééxx", "éé"].map(|text| Ok(text.to_string()));
        let unread = std::iter::once_with(|| bail!("read too far"));
        let got = train(documents.into_iter().chain(unread), &limited, |_, _, _| {}).unwrap();
        let same = train_on(&["éééx", "éé"], &options(261)).unwrap();
        assert_eq!(got.training_text_sha256, same.training_text_sha256);
        assert_eq!(got.ranks[256], "é".as_bytes());
    }

    #[test]
    fn the_hash_tells_documents_apart() {
        let hash = |texts: &[&str]| train_on(texts, &options(261)).unwrap().training_text_sha256;
        assert_ne!(hash(&["aaab"]), hash(&["aaa", "b"]));
        assert_eq!(hash(&["aaa", "b"]), hash(&["aaa", "b"]));
    }

    #[test]
    fn a_vocabulary_without_merges_is_refused() {
        let message = train_on(&["some text"], &options(260)).err().unwrap().to_string();
        assert!(message.contains("at least 261") && message.contains("260") && message.contains("hint"), "{message}");
    }

    #[test]
    fn too_little_text_says_how_many_merges_it_has() {
        let message = train_on(&["abc"], &options(300)).err().unwrap().to_string();
        assert!(message.contains("40 merges, found 2") && message.contains("262 is the most"), "{message}");
        assert!(train_on(&["abc"], &options(262)).is_ok());
        assert!(train_on(&[], &options(300)).err().unwrap().to_string().contains("found 0"));
    }

    #[test]
    fn an_unreadable_document_ends_training_with_its_error() {
        let documents = [Ok("text".to_string()), Err(anyhow::anyhow!("shard is damaged"))];
        let message = train(documents.into_iter(), &options(261), |_, _, _| {}).err().unwrap().to_string();
        assert_eq!(message, "shard is damaged");
    }

    #[test]
    fn progress_ends_at_the_total() {
        let mut last = HashMap::new();
        let limited = TrainOptions { max_chars: 5, ..options(263) };
        let documents = ["abcabc"].map(|text| Ok(text.to_string()));
        train(documents.into_iter(), &limited, |stage, done, total| {
            last.insert(stage.to_string(), (done, total));
        })
        .unwrap();
        assert_eq!(last["counting pieces"], (5, 5));
        assert_eq!(last["learning merges"], (3, 3));
    }
}
