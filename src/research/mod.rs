//! The research loop: one command for an experiment, nothing lost, no false wins.
//!
//! - [`agent_loop`] owns the loop for any agent.
//! - [`compare`] puts results beside each other, if they may be compared.
//! - [`compile`] builds the program; [`worktree`] has the folder for it.
//! - [`crash`] names how a run ended.
//! - [`decision`] says what becomes of an experiment.
//! - [`excerpt`] finds the lines of a log that tell most.
//! - [`experiment`] is one experiment, step by step.
//! - [`git`] asks git.
//! - [`interruption`] hears Ctrl-C.
//! - [`journal`] writes each step down before it is taken.
//! - [`ledger`] keeps all results.
//! - [`lock`] lets one process at a time on a device and in a work tree.
//! - [`noise`] measures how far equal runs differ.
//! - [`overview`] shows where a branch stands.
//! - `run_folders` makes room for runs.
//! - `report` prints an experiment's outcome.
//! - [`source_check`] refuses edits that reach beyond the model.
//! - [`start`] begins a branch of experiments, [`study`] is one, [`undo`] takes the last step back.
//! - `state` reads and writes a branch's small files.
//! - [`training`] trains in a process of its own.

pub mod agent_loop;
pub mod compare;
pub mod compile;
pub mod crash;
pub mod decision;
pub mod excerpt;
pub mod experiment;
pub mod git;
pub mod interruption;
pub mod journal;
pub mod ledger;
pub mod lock;
pub mod noise;
pub mod overview;
mod report;
mod run_folders;
pub mod source_check;
pub mod start;
mod state;
pub mod study;
pub mod training;
pub mod undo;
pub mod worktree;
