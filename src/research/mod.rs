//! The research loop around single runs.
//!
//! - [`source_check`] refuses edits that would give an experiment more than tensors to work with.

pub mod source_check;
