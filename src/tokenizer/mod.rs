//! Byte-pair encoding: training, encoding and the byte length of every token.
//!
//! Ids are the 256 bytes, then the merges in the order in which they were learned, then the special
//! tokens.

mod encoding;
mod format;
mod split;
mod training;

pub(crate) use format::hexadecimal;
pub use format::parse_tiktoken;
pub(crate) use format::{HEADER_FILE, RANKS_FILE};
pub use split::{PATTERN, for_each_piece};
pub use training::TrainOptions;

use anyhow::Result;
use std::fmt;
use std::path::Path;

/// The special tokens in id order; the first starts every document.
pub const SPECIAL_TOKENS: [&str; 4] = ["<|reserved_0|>", "<|reserved_1|>", "<|reserved_2|>", "<|reserved_3|>"];

/// Number of tokens that are single bytes.
const BYTE_TOKENS: usize = 256;

/// A trained byte-pair encoder.
pub struct Tokenizer {
    ranks: Vec<Vec<u8>>,
    training_text_sha256: String,
    encoder: encoding::Encoder,
}

impl Tokenizer {
    /// Trains on `documents`, in order; `progress` is told (stage, done, total).
    ///
    /// The stages are `counting pieces` (in characters, of `max_chars`) and `learning merges`.
    /// Splitting runs on rayon's threads; the text is held a few megabytes at a time.
    ///
    /// # Errors
    /// The first error among the documents; a vocabulary without room for a merge; too little text
    /// for the vocabulary.
    pub fn train(
        documents: impl Iterator<Item = Result<String>>,
        options: &TrainOptions,
        progress: impl FnMut(&str, u64, u64),
    ) -> Result<Self> {
        let trained = training::train(documents, options, progress)?;
        Ok(Self::from_ranks(trained.ranks, trained.training_text_sha256))
    }

    /// Writes `tokenizer.tiktoken` and `tokenizer.json` into `dir`.
    ///
    /// # Errors
    /// When the folder or a file cannot be written.
    pub fn save(&self, dir: &Path) -> Result<()> {
        format::save(dir, &self.ranks, &self.training_text_sha256)
    }

    /// Reads what [`Tokenizer::save`] wrote.
    ///
    /// # Errors
    /// When a file is missing, damaged, of another format version, pattern or set of special
    /// tokens, or when the two do not belong together; the message names the file and the reason.
    pub fn load(dir: &Path) -> Result<Self> {
        let (ranks, training_text_sha256) = format::load(dir)?;
        Ok(Self::from_ranks(ranks, training_text_sha256))
    }

    /// SHA-256 of the files that [`Tokenizer::save`] wrote to `dir`, in hexadecimal.
    ///
    /// # Errors
    /// When one cannot be read.
    pub fn files_sha256(dir: &Path) -> Result<String> {
        format::files_sha256(dir)
    }

    /// A tokenizer with the tokens `ranks`, as [`parse_tiktoken`] gives them, and the hash of the
    /// text from which they come.
    pub fn from_ranks(ranks: Vec<Vec<u8>>, training_text_sha256: String) -> Self {
        let encoder = encoding::Encoder::new(&ranks);
        Self { ranks, training_text_sha256, encoder }
    }

    /// Token ids of `text`; special tokens in the text are plain text.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        self.encoder.encode(text)
    }

    /// The text of `ids`, invalid UTF-8 replaced.
    ///
    /// # Panics
    /// When an id is not below [`Tokenizer::vocab_size`].
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut bytes = Vec::new();
        for &id in ids {
            let index = id as usize;
            match self.ranks.get(index) {
                Some(token) => bytes.extend_from_slice(token),
                None => match SPECIAL_TOKENS.get(index - self.ranks.len()) {
                    Some(special) => bytes.extend_from_slice(special.as_bytes()),
                    None => panic!("token id {id} is outside the vocabulary of {}", self.vocab_size()),
                },
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The token that starts every document.
    pub fn bos_id(&self) -> u32 {
        self.ranks.len() as u32
    }

    /// Number of token ids, special tokens included.
    pub fn vocab_size(&self) -> usize {
        self.ranks.len() + SPECIAL_TOKENS.len()
    }

    /// Bytes of each token, in id order, without the special tokens.
    pub fn ranks(&self) -> &[Vec<u8>] {
        &self.ranks
    }

    /// SHA-256 of the text this was trained on, in hexadecimal: over each document's length in
    /// bytes (8 little-endian bytes) and its text as it was cut.
    pub fn training_text_sha256(&self) -> &str {
        &self.training_text_sha256
    }

    /// Bytes each token stands for; 0 for special tokens.
    pub fn byte_lengths(&self) -> Vec<u32> {
        self.lengths(<[u8]>::len)
    }

    /// As the Python original counts: bytes of the token decoded alone with replacement characters.
    pub fn upstream_byte_lengths(&self) -> Vec<u32> {
        self.lengths(|token| String::from_utf8_lossy(token).len())
    }

    /// `length` of every token, then 0 for the special ones.
    fn lengths(&self, length: impl Fn(&[u8]) -> usize) -> Vec<u32> {
        let special = SPECIAL_TOKENS.iter().map(|_| 0);
        self.ranks.iter().map(|token| length(token) as u32).chain(special).collect()
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("training_text_sha256", &self.training_text_sha256)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::documents::Split;
    use crate::data::prepared::folder_documents;
    use burn_dataset::Dataset;
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};
    use std::io::Write;
    use std::path::PathBuf;
    use tiktoken_rs::CoreBPE;

    /// The folders of goldens and corpus, or a line that says what was left out.
    fn golden_folders(test: &str) -> Option<(PathBuf, PathBuf)> {
        let [golden, corpus] = ["AUTORESEARCH_GOLDEN", "AUTORESEARCH_CORPUS"].map(std::env::var_os);
        if golden.is_none() || corpus.is_none() {
            // Written past the test runner, which keeps what tests print to itself.
            let note = format!("left out: {test} (AUTORESEARCH_GOLDEN and AUTORESEARCH_CORPUS are not both set)\n");
            std::io::stderr().write_all(note.as_bytes()).unwrap();
        }
        Some((golden?.into(), corpus?.into()))
    }

    fn sample() -> Tokenizer {
        let text = "the cat sat on the mat, the cat's hat is on the mat ééé ".repeat(3);
        let options = TrainOptions { vocab_size: 280, max_chars: usize::MAX, doc_cap_chars: usize::MAX };
        Tokenizer::train(std::iter::once(Ok(text)), &options, |_, _, _| {}).unwrap()
    }

    /// tiktoken's encoder as its users build it: the pattern is split by its own expression engine.
    fn plain_tiktoken(tokenizer: &Tokenizer) -> CoreBPE {
        let ids = tokenizer.ranks().iter().cloned().zip(0..).collect();
        CoreBPE::new(ids, Default::default(), PATTERN).unwrap()
    }

    #[test]
    fn ids_equal_those_of_plain_tiktoken_on_the_corpus() {
        let Some((golden, corpus)) = golden_folders("plain tiktoken on the corpus") else {
            return;
        };
        let text = std::fs::read_to_string(golden.join("tokenizer-8192.tiktoken")).unwrap();
        let tokenizer = Tokenizer::from_ranks(parse_tiktoken(&text).unwrap(), String::new());
        let reference = plain_tiktoken(&tokenizer);
        let documents = folder_documents(&corpus, Split::Train).unwrap();
        assert!(documents.len() > 4);
        // Every fourth keeps this short.
        for index in (0..documents.len()).step_by(4) {
            let document = documents.get(index).unwrap();
            assert_eq!(tokenizer.encode(&document), reference.encode_ordinary(&document));
        }
    }

    #[test]
    fn ids_equal_those_of_plain_tiktoken_on_random_text() {
        let tokenizer = sample();
        let reference = plain_tiktoken(&tokenizer);
        let mut random = StdRng::seed_from_u64(3);
        let letters: Vec<char> = "the catsmon,'é \n1\u{a0}🦀".chars().collect();
        for _ in 0..5_000 {
            // Pieces of a hundred bytes and more take another way through tiktoken.
            let length = random.random_range(0..300);
            let kinds = random.random_range(1..=letters.len());
            let text: String = (0..length).map(|_| letters[random.random_range(0..kinds)]).collect();
            let ids = tokenizer.encode(&text);
            assert_eq!(ids, reference.encode_ordinary(&text), "{text:?}");
            assert_eq!(tokenizer.decode(&ids), text);
        }
    }

    #[test]
    fn special_tokens_in_the_text_are_plain_text() {
        let tokenizer = sample();
        for special in SPECIAL_TOKENS {
            let ids = tokenizer.encode(special);
            assert!(ids.iter().all(|&id| id < tokenizer.bos_id()), "{ids:?}");
            assert_eq!(tokenizer.decode(&ids), special);
        }
        assert_eq!(tokenizer.decode(&[tokenizer.bos_id()]), SPECIAL_TOKENS[0]);
    }

    #[test]
    fn a_lone_byte_counts_once_in_the_metric_and_three_times_upstream() {
        let tokenizer = sample();
        let [own, upstream] = [tokenizer.byte_lengths(), tokenizer.upstream_byte_lengths()];
        assert_eq!((own[0x80], upstream[0x80]), (1, 3));
        assert_eq!((own[b'a' as usize], upstream[b'a' as usize]), (1, 1));
        assert_eq!(own.len(), tokenizer.vocab_size());
        assert!(own[..tokenizer.ranks().len()].iter().all(|&bytes| bytes > 0));
        assert_eq!(own[tokenizer.ranks().len()..], [0; SPECIAL_TOKENS.len()]);
        assert_eq!(upstream[tokenizer.ranks().len()..], [0; SPECIAL_TOKENS.len()]);
    }

    #[test]
    fn a_loaded_tokenizer_is_the_saved_one() {
        let dir = tempfile::tempdir().unwrap();
        let saved = sample();
        saved.save(dir.path()).unwrap();
        let loaded = Tokenizer::load(dir.path()).unwrap();
        assert_eq!(loaded.ranks(), saved.ranks());
        assert_eq!(loaded.training_text_sha256(), saved.training_text_sha256());
        assert_eq!(loaded.encode("the cat's mat"), saved.encode("the cat's mat"));
    }

    #[test]
    fn a_long_run_is_encoded() {
        let tokenizer = sample();
        for run in [" ", "a", "\n", "é"] {
            let text = run.repeat(1_000_000);
            assert_eq!(tokenizer.decode(&tokenizer.encode(&text)), text);
        }
    }

    #[test]
    fn one_tokenizer_serves_many_threads() {
        fn shared<T: Send + Sync>(_: &T) {}
        shared(&sample());
    }
}
