//! Best-fit packing: fills rows of a fixed length with documents, cropping one only where none fits.

use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What the rows depend on besides the documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Packing {
    /// Tokens per row: a sequence and the target of its last token.
    pub row_length: usize,
    /// The buffer is refilled while it holds fewer documents than this.
    pub buffer_documents: usize,
    /// Documents per refill, at most.
    pub refill_documents: usize,
}

impl Packing {
    /// The packing that the metric is defined with, for sequences of `sequence_length` tokens.
    pub fn new(sequence_length: usize) -> Self {
        Self { row_length: sequence_length + 1, buffer_documents: 1000, refill_documents: 128 }
    }
}

/// A document's number and its tokens, which start with BOS.
#[derive(Clone, Debug)]
pub struct TokenizedDocument {
    /// Its number in the split.
    pub index: usize,
    /// At least one token.
    pub tokens: Vec<u32>,
}

/// Consecutive documents that enter the buffer together.
#[derive(Clone, Debug)]
pub struct Refill {
    /// The pass over the documents, from 1.
    pub epoch: usize,
    /// The number that follows the last document's.
    pub next_document: usize,
    /// The documents, in order.
    pub documents: Vec<TokenizedDocument>,
}

/// How often the documents are gone through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passes {
    /// Over and over, in the same order: rows without end. For training.
    Endless,
    /// Once, each document standing in the rows once: as many whole rows as that gives, but no more than asked for. For
    /// validation.
    OnePass {
        /// The first so many rows are all that there are to be; they equal those of the endless stream.
        at_most_rows: usize,
    },
}

/// Where packing has got to between two rows: what it takes to go on exactly from there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PackerState {
    /// The pass of the last refill, from 1.
    pub epoch: usize,
    /// The first document of the next refill.
    pub next_document: usize,
    /// The numbers of the documents in the buffer, in the order in which they came in.
    pub buffered: Vec<usize>,
    /// Tokens that stand in rows.
    pub packed_tokens: u64,
    /// Tokens that were cut off and stand in no row.
    pub dropped_tokens: u64,
}

impl PackerState {
    /// Before the first row.
    pub fn start() -> Self {
        Self { epoch: 1, next_document: 0, buffered: Vec::new(), packed_tokens: 0, dropped_tokens: 0 }
    }
}

/// Where packing has got to, before it is put in order as a [`PackerState`].
#[derive(Clone, Debug)]
pub struct PackerPosition {
    /// Without what is buffered.
    state: PackerState,
    /// When each buffered document came in, and its number, in any order.
    arrivals: Vec<(u64, usize)>,
}

impl PackerPosition {
    /// The pass of the last refill, from 1.
    pub fn epoch(&self) -> usize {
        self.state.epoch
    }

    /// The share of the tokens taken so far that stand in no row, in percent.
    pub fn dropped_percent(&self) -> f64 {
        let PackerState { packed_tokens, dropped_tokens, .. } = self.state;
        let taken = packed_tokens + dropped_tokens;
        if taken == 0 { 0.0 } else { 100.0 * dropped_tokens as f64 / taken as f64 }
    }

    /// What it takes to go on from here.
    pub fn state(&self) -> PackerState {
        let mut arrivals = self.arrivals.clone();
        arrivals.sort_unstable();
        PackerState { buffered: arrivals.into_iter().map(|(_, index)| index).collect(), ..self.state.clone() }
    }
}

/// Packs documents into rows, one row at a time.
///
/// A row takes the largest buffered document that fits into what is left of it, the earliest of equally long ones; where
/// none fits, it takes as much as there is room for of the shortest, the earliest of equals, and the tail is dropped.
#[derive(Clone, Debug)]
pub struct Packer {
    packing: Packing,
    passes: Passes,
    buffer: Buffer<TokenizedDocument>,
    arrivals: u64,
    /// Whether the buffer is no longer refilled, which ends a single pass.
    draining: bool,
    /// With nothing buffered: that is in `buffer`.
    state: PackerState,
}

/// What is buffered, by length in tokens and, among equals, by order of arrival.
type Buffer<T> = BTreeMap<(usize, u64), T>;

impl Packer {
    /// Goes on from `state`, with the tokens of the documents that it names as buffered, in the same order.
    pub fn resume(packing: Packing, passes: Passes, state: PackerState, buffered: Vec<TokenizedDocument>) -> Self {
        let state = PackerState { buffered: Vec::new(), ..state };
        let mut packer = Self { packing, passes, buffer: Buffer::new(), arrivals: 0, draining: false, state };
        packer.buffer(buffered);
        packer
    }

    /// Appends one row to `rows`, drawing on `refills`, which repeat without end.
    ///
    /// Returns false, with `rows` as before, when there are as many rows as there are to be.
    ///
    /// # Errors
    /// Those of `refills`; the packer is then between two states and not to be used any more.
    pub fn pack_row(&mut self, refills: &mut impl FnMut() -> Result<Refill>, rows: &mut Vec<u32>) -> Result<bool> {
        if matches!(self.passes, Passes::OnePass { at_most_rows } if self.rows_so_far() >= at_most_rows) {
            return Ok(false);
        }
        let start = rows.len();
        let end = start + self.packing.row_length;
        while rows.len() < end {
            while self.buffer.len() < self.packing.buffer_documents && !self.draining {
                let refill = refills()?;
                if self.ends_before(&refill, rows.len() - start) {
                    self.draining = true;
                } else {
                    self.state.epoch = refill.epoch;
                    self.state.next_document = refill.next_document;
                    self.buffer(refill.documents);
                }
            }
            let room = end - rows.len();
            let Some((length, document)) = take(&mut self.buffer, room) else {
                self.state.dropped_tokens += (rows.len() - start) as u64;
                rows.truncate(start);
                return Ok(false);
            };
            let kept = length.min(room);
            rows.extend_from_slice(&document.tokens[..kept]);
            self.state.dropped_tokens += (length - kept) as u64;
        }
        self.state.packed_tokens += self.packing.row_length as u64;
        Ok(true)
    }

    /// Where packing has got to; cheap enough for every batch.
    pub fn position(&self) -> PackerPosition {
        let arrivals = self.buffer.iter().map(|((_, arrival), document)| (*arrival, document.index)).collect();
        PackerPosition { state: self.state.clone(), arrivals }
    }

    fn buffer(&mut self, documents: Vec<TokenizedDocument>) {
        for mut document in documents {
            let length = document.tokens.len();
            // No row takes more of a document: without the rest, memory stays bounded whatever the documents' lengths.
            document.tokens.truncate(self.packing.row_length);
            document.tokens.shrink_to_fit();
            self.buffer.insert((length, self.arrivals), document);
            self.arrivals += 1;
        }
    }

    fn rows_so_far(&self) -> usize {
        (self.state.packed_tokens / self.packing.row_length as u64) as usize
    }

    /// Whether packing stays with the first pass, whose documents are all in when `refill` opens the second: with the row
    /// that is filled with `filled` tokens, what is buffered gives fewer rows than there are to be.
    fn ends_before(&self, refill: &Refill, filled: usize) -> bool {
        let Passes::OnePass { at_most_rows } = self.passes else {
            return false;
        };
        self.state.epoch == 1 && refill.epoch > 1 && self.rows_so_far() + self.rows_left(filled) < at_most_rows
    }

    /// Rows that what is buffered gives without a refill, when the first of them is filled with `filled` tokens.
    fn rows_left(&self, mut filled: usize) -> usize {
        let mut lengths: Buffer<()> = self.buffer.keys().map(|&key| (key, ())).collect();
        let mut rows = 0;
        while let Some((length, ())) = take(&mut lengths, self.packing.row_length - filled) {
            filled = (filled + length).min(self.packing.row_length);
            if filled == self.packing.row_length {
                rows += 1;
                filled = 0;
            }
        }
        rows
    }
}

/// Removes what a row with this much room takes next, with its length; none if the buffer is empty.
fn take<T>(buffer: &mut Buffer<T>, room: usize) -> Option<(usize, T)> {
    let key = match buffer.range(..=(room, u64::MAX)).next_back() {
        Some((&(length, _), _)) => *buffer.range((length, 0)..).next()?.0,
        None => *buffer.first_key_value()?.0,
    };
    buffer.remove(&key).map(|value| (key.0, value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    /// Documents of random lengths, many of them equal, each token naming its document.
    fn documents(count: usize, longest: usize, seed: u64) -> Vec<TokenizedDocument> {
        let mut random = StdRng::seed_from_u64(seed);
        (0..count)
            .map(|index| TokenizedDocument { index, tokens: vec![index as u32; random.random_range(1..=longest)] })
            .collect()
    }

    /// Refills of 16, over and over.
    fn refills(documents: &[TokenizedDocument]) -> impl FnMut() -> Result<Refill> {
        let mut refills = Vec::new();
        for (chunk, documents) in documents.chunks(16).enumerate() {
            let next_document = chunk * 16 + documents.len();
            refills.push(Refill { epoch: 1, next_document, documents: documents.to_vec() });
        }
        let mut given = 0;
        move || {
            let epoch = 1 + given / refills.len();
            let refill = refills[given % refills.len()].clone();
            given += 1;
            Ok(Refill { epoch, ..refill })
        }
    }

    fn packer(row_length: usize, buffer_documents: usize, passes: Passes) -> Packer {
        let packing = Packing { row_length, buffer_documents, refill_documents: 16 };
        Packer::resume(packing, passes, PackerState::start(), Vec::new())
    }

    /// All rows of a validation that wants `most`.
    fn at_most(documents: &[TokenizedDocument], most: usize) -> (Vec<u32>, PackerState) {
        let mut packer = packer(65, 100, Passes::OnePass { at_most_rows: most });
        let mut refills = refills(documents);
        let mut rows = Vec::new();
        while packer.pack_row(&mut refills, &mut rows).unwrap() {}
        (rows, packer.position().state())
    }

    /// The rule as the reference states it, by linear scans.
    fn reference_row(
        row_length: usize,
        buffer_documents: usize,
        buffer: &mut Vec<Vec<u32>>,
        refills: &mut impl FnMut() -> Result<Refill>,
    ) -> Vec<u32> {
        let mut row = Vec::new();
        while row.len() < row_length {
            while buffer.len() < buffer_documents {
                buffer.extend(refills().unwrap().documents.into_iter().map(|document| document.tokens));
            }
            let room = row_length - row.len();
            let (mut best, mut best_length) = (None, 0);
            for (position, tokens) in buffer.iter().enumerate() {
                if best_length < tokens.len() && tokens.len() <= room {
                    (best, best_length) = (Some(position), tokens.len());
                }
            }
            let best =
                best.unwrap_or_else(|| (0..buffer.len()).min_by_key(|&position| buffer[position].len()).unwrap());
            let tokens = buffer.remove(best);
            row.extend_from_slice(&tokens[..tokens.len().min(room)]);
        }
        row
    }

    #[test]
    fn rows_equal_those_of_the_linear_scan() {
        for (seed, longest, row_length, buffer_documents) in
            [(1, 30, 65, 50), (2, 200, 65, 50), (3, 65, 65, 1), (4, 9, 300, 200)]
        {
            let documents = documents(777, longest, seed);
            let (mut ours, mut theirs) = (refills(&documents), refills(&documents));
            let mut packer = packer(row_length, buffer_documents, Passes::Endless);
            let mut buffer = Vec::new();
            for number in 0..600 {
                let mut row = Vec::new();
                assert!(packer.pack_row(&mut ours, &mut row).unwrap());
                assert_eq!(row, reference_row(row_length, buffer_documents, &mut buffer, &mut theirs), "row {number}");
            }
        }
    }

    #[test]
    fn of_equally_long_documents_the_first_is_taken() {
        let given = [3, 2, 3, 2].iter().enumerate();
        let documents: Vec<_> =
            given.map(|(index, &length)| TokenizedDocument { index, tokens: vec![index as u32; length] }).collect();
        let mut row = Vec::new();
        packer(6, 4, Passes::OnePass { at_most_rows: 1 }).pack_row(&mut refills(&documents), &mut row).unwrap();
        assert_eq!(row, [0, 0, 0, 2, 2, 2]);
    }

    #[test]
    fn where_nothing_fits_the_first_of_the_shortest_is_cropped() {
        let given = [9, 7, 7].iter().enumerate();
        let documents: Vec<_> =
            given.map(|(index, &length)| TokenizedDocument { index, tokens: vec![index as u32; length] }).collect();
        let mut packer = packer(4, 3, Passes::OnePass { at_most_rows: 1 });
        let mut row = Vec::new();
        packer.pack_row(&mut refills(&documents), &mut row).unwrap();
        assert_eq!(row, [1, 1, 1, 1]);
        assert_eq!(packer.position().state().dropped_tokens, 3);
        assert_eq!(packer.position().state().buffered, [0, 2]);
    }

    #[test]
    fn a_single_pass_uses_every_document_and_accounts_for_every_token() {
        for (count, longest) in [(500, 40), (30, 40), (3, 200), (80, 5)] {
            let documents = documents(count, longest, 5);
            let (rows, state) = at_most(&documents, usize::MAX);
            let tokens: usize = documents.iter().map(|document| document.tokens.len()).sum();
            assert!(!rows.is_empty() && rows.len() % 65 == 0);
            assert_eq!(state.packed_tokens, rows.len() as u64);
            assert_eq!(state.packed_tokens + state.dropped_tokens, tokens as u64);
            assert_eq!((state.epoch, state.next_document), (1, count));
            assert!(state.buffered.is_empty());
        }
    }

    #[test]
    fn as_many_rows_as_one_pass_gives_are_those_of_the_endless_stream() {
        for (count, longest) in [(500, 40), (30, 40), (3, 200)] {
            let documents = documents(count, longest, 7);
            let whole = at_most(&documents, usize::MAX).0.len() / 65;
            for most in [0, 1, whole / 2, whole - 1, whole] {
                let (mut endless, mut refills) = (packer(65, 100, Passes::Endless), refills(&documents));
                let mut expected = Vec::new();
                for _ in 0..most {
                    endless.pack_row(&mut refills, &mut expected).unwrap();
                }
                assert!(at_most(&documents, most).0 == expected, "{most} of {whole} rows, {count} documents");
            }
            assert_eq!(at_most(&documents, whole + 1).0.len() / 65, whole);
        }
    }

    #[test]
    fn packing_goes_on_exactly_from_any_row() {
        let documents = documents(200, 90, 6);
        let mut whole = refills(&documents);
        let mut packer = packer(65, 40, Passes::Endless);
        let mut used = 0;
        for _ in 0..120 {
            let mut counted = || {
                used += 1;
                whole()
            };
            let mut row = Vec::new();
            packer.pack_row(&mut counted, &mut row).unwrap();
            let state = packer.position().state();
            let buffered = state.buffered.iter().map(|&index| documents[index].clone()).collect();
            let mut resumed = Packer::resume(packer.packing, Passes::Endless, state, buffered);
            let mut rest = refills(&documents);
            for _ in 0..used {
                rest().unwrap();
            }
            let mut again = refills(&documents);
            for _ in 0..used {
                again().unwrap();
            }
            let mut twin = packer.clone();
            let (mut expected, mut found) = (Vec::new(), Vec::new());
            for _ in 0..5 {
                twin.pack_row(&mut again, &mut expected).unwrap();
                resumed.pack_row(&mut rest, &mut found).unwrap();
            }
            assert_eq!(found, expected);
            assert_eq!(resumed.position().state(), twin.position().state());
        }
    }
}
