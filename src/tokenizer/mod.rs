//! Byte-pair encoding: training, encoding and the byte length of every token.

use anyhow::Result;
use std::path::Path;

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

/// A trained byte-pair encoder.
#[derive(Debug)]
pub struct Tokenizer {}

impl Tokenizer {
    /// Trains on `documents`, in order; `progress` is told (stage, done, total).
    pub fn train(
        _documents: impl Iterator<Item = Result<String>>,
        _options: &TrainOptions,
        _progress: impl FnMut(&str, u64, u64),
    ) -> Result<Self> {
        todo!()
    }
    /// Writes `tokenizer.tiktoken` and `tokenizer.json` into `dir`.
    pub fn save(&self, _dir: &Path) -> Result<()> {
        todo!()
    }
    /// Reads what [`Tokenizer::save`] wrote.
    pub fn load(_dir: &Path) -> Result<Self> {
        todo!()
    }
    /// Token ids of `text`; special tokens in the text are plain text.
    pub fn encode(&self, _text: &str) -> Vec<u32> {
        todo!()
    }
    /// The text of `ids`, invalid UTF-8 replaced.
    pub fn decode(&self, _ids: &[u32]) -> String {
        todo!()
    }
    /// The token that starts every document.
    pub fn bos_id(&self) -> u32 {
        todo!()
    }
    /// Number of token ids, special tokens included.
    pub fn vocab_size(&self) -> usize {
        todo!()
    }
    /// Bytes each token stands for; 0 for special tokens.
    pub fn byte_lengths(&self) -> Vec<u32> {
        todo!()
    }
    /// As the Python original counts: bytes of the token decoded alone with replacement characters.
    pub fn upstream_byte_lengths(&self) -> Vec<u32> {
        todo!()
    }
}
