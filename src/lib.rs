//! `autoresearch`: a small language-model pretraining set-up that a coding agent edits, trains and measures overnight.
//!
//! What an experiment edits: [`model`] (hyperparameters, layers, initialisation, parameter groups, schedules) and [`optim`]
//! (update rules). What it does not:
//!
//! - [`atomic_file`] writes files whole or not at all.
//! - [`checkpoint`] reads and writes tensors in safetensors files.
//! - [`cli`] has the commands and flags.
//! - [`config`] reads a run's conditions from `configs/*.toml`.
//! - [`data`] turns data sets into rows of tokens.
//! - [`device`] chooses where to compute.
//! - [`eval`] computes the metric, validation bits per byte.
//! - [`honesty`] checks what a model sees before it gets a number.
//! - [`ops`] has the fused operations that the model calls, and their bodies for each backend.
//! - [`output`] prints lines that may go nowhere.
//! - [`parameters`] reads and replaces a module's parameters by name.
//! - [`process`] runs and ends other programs.
//! - [`research`] is the loop of experiments around single runs.
//! - [`run`] trains, evaluates and leaves everything in a folder.
//! - [`sample`] draws text from a model.
//! - [`tokenizer`] trains and applies byte-pair encoding.
//! - [`train`] is the training loop and its clock.
//! - [`verify`] compares this build with golden values.

// burn 0.22 is the last with this backend, which its authors mark as deprecated for that.
#![cfg_attr(feature = "tch", allow(deprecated))]

pub mod atomic_file;
pub mod checkpoint;
pub mod cli;
pub mod config;
pub mod data;
pub mod device;
pub mod eval;
pub mod honesty;
pub mod model;
pub mod ops;
pub mod optim;
pub mod output;
pub mod parameters;
pub mod process;
pub mod research;
pub mod run;
pub mod sample;
pub mod tokenizer;
pub mod train;
pub mod verify;
