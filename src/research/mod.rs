//! Experiments on the edited model: built and trained by child processes, so that nothing they do can end the program that
//! keeps the record.
//!
//! - [`process`] runs a child with everything that it starts, and ends all of it.
//! - [`compile`] builds the edited program, with what is compiled into this one.
//! - [`crash`] says what kind of end a training came to.
//! - [`excerpt`] makes a log's telling lines fit to be shown.

pub mod compile;
pub mod crash;
pub mod excerpt;
pub mod process;
