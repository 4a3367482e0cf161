//! `autoresearch`: a small language-model pretraining set-up that a coding agent edits, trains and measures overnight.

pub mod atomic_file;
pub mod checkpoint;
pub mod config;
pub mod data;
pub mod model;
pub mod ops;
pub mod optim;
pub mod parameters;
pub mod tokenizer;
pub mod verify;
