//! Data sets: where text comes from and how it becomes rows of tokens.

pub mod tales;
