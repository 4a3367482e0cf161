//! `autoresearch`: a small language-model pretraining set-up that a coding agent edits, trains and measures overnight.

pub mod atomic_file;
pub mod data;
pub mod tokenizer;
