//! Data sets: where text comes from and how it becomes rows of tokens.
//!
//! A [`manifest`] names a data set, [`download`] fetches its shards, [`documents`] reads them (from [`parquet_shards`],
//! [`text_files`] or the generator of [`tales`]), [`packing`] turns tokenized documents into rows, [`loader`] does so in the
//! background;
//! [`prepare`] ties a data set and its tokenizer to a folder of the cache, which [`prepared`] opens; [`command`] says what to run
//! next.

pub mod command;
pub mod documents;
pub mod download;
pub mod loader;
pub mod manifest;
pub mod packing;
pub mod parquet_shards;
pub mod prepare;
pub mod prepared;
pub mod tales;
pub mod text_files;

/// The data of a run cannot be used, which is no fault of its model.
#[derive(Debug, thiserror::Error)]
#[error("{0:#}")]
pub struct DataError(anyhow::Error);

impl From<anyhow::Error> for DataError {
    fn from(error: anyhow::Error) -> Self {
        Self(error)
    }
}
