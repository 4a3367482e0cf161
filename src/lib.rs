//! `autoresearch`: a small language-model pretraining set-up that a coding agent edits, trains and measures overnight.

pub mod atomic_file;
pub mod checkpoint;
pub mod cli;
pub mod config;
pub mod data;
pub mod device;
pub mod eval;
pub mod model;
pub mod ops;
pub mod optim;
pub mod output;
pub mod parameters;
pub mod run;
pub mod sample;
pub mod tokenizer;
pub mod train;
pub mod verify;
