//! Documents by number, whatever they are stored in, in groups that a refill of the packer's buffer does not cross.

use super::parquet_shards::ParquetShards;
use super::text_files::TextFiles;
use anyhow::{Result, bail};
use burn_dataset::Dataset;
use std::ops::Range;
use std::sync::Arc;

/// The two sides of a data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// What the model and the tokenizer learn from.
    Train,
    /// What the metric is computed on, never trained on.
    Validation,
}

/// A document that could not be read: file, reason and hint in one line.
#[derive(Debug, thiserror::Error)]
#[error("{0:#}")]
pub struct DocumentError(anyhow::Error);

/// The documents of one split, numbered from 0 in reading order.
///
/// A [`Dataset`] of texts. Reading in ascending order is fast; each jump backwards in a parquet shard decodes a row group
/// again from its start.
pub struct Documents {
    store: Store,
    /// Where each group starts, and last the number of documents.
    bounds: Vec<usize>,
}

enum Store {
    Parquet(Box<ParquetShards>),
    Text(TextFiles),
    Generated(Box<dyn Fn(usize) -> String + Send + Sync>),
}

impl Documents {
    /// Documents of parquet shards; each row group is a group.
    pub fn from_parquet(shards: ParquetShards) -> Self {
        let lengths = shards.group_lengths().collect::<Vec<_>>();
        Self::new(Store::Parquet(Box::new(shards)), lengths)
    }

    /// Documents of text files; all of them are one group.
    pub fn from_text(files: TextFiles) -> Self {
        let length = files.len();
        Self::new(Store::Text(files), [length])
    }

    /// `count` documents that `write` writes on demand, in groups of `group_length`.
    ///
    /// # Panics
    /// If `group_length` is 0.
    pub fn generated(
        count: usize,
        group_length: usize,
        write: impl Fn(usize) -> String + Send + Sync + 'static,
    ) -> Self {
        assert!(group_length > 0, "a group of generated documents holds at least one, got {group_length}");
        let lengths = (0..count).step_by(group_length).map(|start| group_length.min(count - start));
        Self::new(Store::Generated(Box::new(write)), lengths.collect::<Vec<_>>())
    }

    fn new(store: Store, group_lengths: impl IntoIterator<Item = usize>) -> Self {
        let mut bounds = vec![0];
        let mut end = 0;
        for length in group_lengths.into_iter().filter(|&length| length > 0) {
            end += length;
            bounds.push(end);
        }
        Self { store, bounds }
    }

    /// The documents of the refill that starts at `start`: at most `most`, never across the end of a group.
    ///
    /// # Panics
    /// If there is no document `start`.
    pub fn refill(&self, start: usize, most: usize) -> Range<usize> {
        assert!(start < self.len(), "document {start} of {}", self.len());
        let end = self.bounds[self.bounds.partition_point(|&bound| bound <= start)];
        start..end.min(start + most)
    }

    /// Makes sure that there is something to learn from.
    ///
    /// # Errors
    /// If no document holds text, naming `place`; or if one cannot be read.
    pub fn require_text(&self, place: &str) -> Result<()> {
        for index in 0..self.len() {
            if !self.get(index)?.is_empty() {
                return Ok(());
            }
        }
        bail!(
            "{place}: expected text, found no non-empty document among {}; hint: check that the files hold text in the column or field `text`",
            self.len()
        )
    }
}

impl Dataset<Arc<str>, DocumentError> for Documents {
    fn get(&self, index: usize) -> Result<Arc<str>, DocumentError> {
        assert!(index < self.len(), "document {index} of {}", self.len());
        let read = match &self.store {
            Store::Parquet(shards) => {
                let group = self.bounds.partition_point(|&bound| bound <= index) - 1;
                shards.document(group, index - self.bounds[group])
            }
            Store::Text(files) => files.document(index).map(Arc::from),
            Store::Generated(write) => Ok(Arc::from(write(index))),
        };
        read.map_err(DocumentError)
    }

    fn len(&self) -> usize {
        self.bounds.last().copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, group_length: usize) -> Documents {
        Documents::generated(count, group_length, |index| index.to_string())
    }

    #[test]
    fn refills_cover_every_document_once_and_stay_within_a_group() {
        let documents = numbers(1000, 300);
        let mut next = 0;
        while next < documents.len() {
            let refill = documents.refill(next, 128);
            assert_eq!(refill.start, next);
            assert!(refill.len() <= 128 && !refill.is_empty());
            assert_eq!(refill.start / 300, (refill.end - 1) / 300);
            next = refill.end;
        }
        assert_eq!(next, 1000);
        assert_eq!(documents.bounds, [0, 300, 600, 900, 1000]);
    }

    #[test]
    fn it_is_a_data_set_of_texts() {
        let documents = numbers(5, 2);
        let texts: Vec<Arc<str>> = documents.iter().map(|text| text.unwrap()).collect();
        assert_eq!(texts.iter().map(|text| &**text).collect::<Vec<_>>(), ["0", "1", "2", "3", "4"]);
    }

    #[test]
    fn a_corpus_without_text_is_refused() {
        for count in [0, 3] {
            let error = Documents::generated(count, 2, |_| String::new()).require_text("the corpus").unwrap_err();
            let message = error.to_string();
            assert!(message.starts_with("the corpus: ") && message.contains("hint: "), "{message}");
        }
        numbers(3, 2).require_text("the corpus").unwrap();
    }
}
