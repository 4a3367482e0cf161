//! The tests of the program as a whole, in one binary: each further one would link burn again.

// A copy of the project to edit, commit and build in.
mod checkout;
// The program from outside: what its commands print and leave.
mod commands;
// The shipped edits of the model.
mod edits;
// The metric.
mod evaluation;
// Golden values, by the code behind `autoresearch verify`.
mod goldens;
// How a number could be cheated, and that each way is stopped.
mod honesty;
// Devices of libtorch: refusals, a run from training to text.
#[cfg(feature = "tch")]
mod libtorch;
// How programs are linked with libtorch.
#[cfg(target_os = "linux")]
mod linking;
// The model: what a position sees, sizes, initialisation, schedules.
mod model;
// The optimizer: update rules, groups, types.
mod optimizer;
// A folder to run the program in.
mod place;
// Types: what is kept and computed in bfloat16, what in float32.
mod precision;
// The program from outside: how it refuses what it cannot do.
mod refusals;
// The research loop: experiments, the loop with an agent, kills, refusals.
#[cfg(target_os = "linux")]
mod research_loop;
// The script that sets libtorch up.
#[cfg(target_os = "linux")]
mod setup_libtorch;
// The training loop with a clock of its own.
mod training;
// `autoresearch verify`: what it prints, goldens of a wrong form.
mod verify_command;
// GPUs through wgpu: adapters, refusals, a run from training to text.
#[cfg(feature = "wgpu")]
mod wgpu;
