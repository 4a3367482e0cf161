//! A run's conditions: `configs/*.toml` to typed, validated settings.
//!
//! What keeps runs comparable is here (budget, data, vocabulary, context, evaluation, seed, device); what an experiment
//! may turn is in `src/model.rs`.

use crate::device::compute_type::ComputeType;
use anyhow::{Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::Duration;

/// The kind of machine for which `src/model.rs` picks hyperparameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Profile {
    /// AMD Strix Halo, 64 GB of shared memory.
    Halo,
    /// A data-centre GPU.
    H100,
    /// Any CPU: the quick start.
    Cpu,
    /// The smoke test.
    Ci,
}

/// A configuration file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Row of the hyperparameter table in `src/model.rs`.
    pub profile: Profile,
    /// Where to compute: `auto` or a name that `autoresearch train --help` lists.
    pub device: String,
    /// In which type it multiplies matrices: `auto`, `float32`, `bfloat16` or `float16`. Runs from before the choice took what
    /// is now `auto`.
    #[serde(default)]
    pub compute_type: ComputeType,
    /// Name of a data set in `data/`, or a folder.
    pub dataset: String,
    /// Token ids, special tokens included.
    pub vocab_size: usize,
    /// Context in tokens.
    pub sequence_len: usize,
    /// Training time in seconds; compilation, data preparation and evaluation are not part of it.
    pub time_budget_seconds: f64,
    /// Time that the whole run may take, from start to summary and without its first step, in seconds: then it is ended, since something hangs. None: any
    /// time, as in runs from before there was a limit.
    pub kill_limit_seconds: Option<f64>,
    /// First steps, which are not charged to the budget: compilers and caches warm up in them. The first one never is, the
    /// others as long as they take no more than a twentieth of the budget together.
    pub uncharged_steps: usize,
    /// Validation tokens to evaluate.
    pub eval_tokens: usize,
    /// Seed of the initial weights.
    pub seed: u64,
}

impl Config {
    /// Reads and validates the file at `path`.
    ///
    /// # Errors
    /// If it cannot be read, has an unknown, missing or ill-typed key, or a value out of range.
    pub fn read(path: &Path) -> Result<Self> {
        let name = path.display();
        let text = std::fs::read_to_string(path).map_err(|error| {
            anyhow!("{name}: cannot read the configuration ({error}); hint: configs/ holds the ones that come along")
        })?;
        Self::parse(&text, &name.to_string())
    }

    /// Reads `text`; `name` is what messages call it.
    ///
    /// # Errors
    /// As [`Config::read`].
    pub fn parse(text: &str, name: &str) -> Result<Self> {
        let config: Self = toml::from_str(text).map_err(|error| {
            let span = error.span().unwrap_or_default();
            let before = text.get(..span.start).unwrap_or_default();
            let line = before.matches('\n').count() + 1;
            let place = match text.get(span).unwrap_or_default() {
                // A missing key has no place.
                found if found.is_empty() || found.contains('\n') => format!(" line {line}"),
                found => format!(" line {line}, at `{found}`"),
            };
            let message = error.message().replace('\n', " ");
            anyhow!(
                "{name}{place}: {message}; hint: configs/cpu.toml shows every key; hyperparameters are in src/model.rs"
            )
        })?;
        config.validate(name)?;
        Ok(config)
    }

    /// Checks every value's range; `name` is what messages call the configuration.
    ///
    /// # Errors
    /// If one is out of range: its key, what was expected and what was found.
    pub fn validate(&self, name: &str) -> Result<()> {
        let positive =
            [("vocab_size", self.vocab_size), ("sequence_len", self.sequence_len), ("eval_tokens", self.eval_tokens)];
        if let Some((key, _)) = positive.iter().find(|(_, value)| *value == 0) {
            bail!("{name}: {key} must be at least 1, found 0; hint: see configs/cpu.toml for usual values");
        }
        if self.eval_tokens < self.sequence_len {
            bail!(
                "{name}: eval_tokens must be at least sequence_len {}, found {}; hint: one row of the evaluation has that many",
                self.sequence_len,
                self.eval_tokens
            );
        }
        if Duration::try_from_secs_f64(self.time_budget_seconds).unwrap_or_default().is_zero() {
            bail!(
                "{name}: time_budget_seconds must be a positive number of seconds below 1e19, found {}; hint: 60 is the quick start's",
                self.time_budget_seconds
            );
        }
        if let Some(limit) = self.kill_limit_seconds
            && (Duration::try_from_secs_f64(limit).is_err() || limit <= self.time_budget_seconds)
        {
            bail!(
                "{name}: kill_limit_seconds must be a number of seconds above time_budget_seconds {}, found {limit}; hint: one and a half times as much leaves time for the start and the evaluation",
                self.time_budget_seconds
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shipped(name: &str) -> Config {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs").join(name);
        Config::read(&path).unwrap()
    }

    #[test]
    fn every_shipped_configuration_limits_the_whole_run() {
        let limits = ["ci", "cpu", "h100", "halo"].map(|name| {
            let config = shipped(&format!("{name}.toml"));
            (config.time_budget_seconds, config.kill_limit_seconds.unwrap())
        });
        assert_eq!(limits, [(5.0, 120.0), (60.0, 300.0), (300.0, 600.0), (600.0, 900.0)]);
    }

    #[test]
    fn a_kill_limit_is_above_the_budget() {
        let with = |limit| Config { kill_limit_seconds: limit, ..shipped("cpu.toml") }.validate("cpu.toml");
        for wrong in [60.0, 0.0, -1.0, f64::NAN, f64::INFINITY, 1e300] {
            let message = with(Some(wrong)).unwrap_err().to_string();
            let parts =
                ["cpu.toml: kill_limit_seconds", "above time_budget_seconds 60", &format!("found {wrong}"), "; hint: "];
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        }
        assert!(with(Some(60.1)).is_ok() && with(None).is_ok());
    }
}
