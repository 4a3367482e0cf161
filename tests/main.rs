//! The tests that look at the program from outside, in one binary: each one more would link everything again.

mod command_line;
mod goldens;
