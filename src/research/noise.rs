//! How far val_bpb differs between runs of the same commit: a gain within that may be chance.

use crate::process::Interruption;
use crate::research::ledger::Record;
use crate::research::state;
use crate::research::study::{Study, short};
use crate::research::training::{self, Run};
use crate::research::worktree;
use crate::run;
use crate::run::protocol::Protocol;
use anyhow::{Result, anyhow, bail, ensure};
use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, StudentsT};
use std::fmt;
use std::fs;

/// Name of the file in a branch's folder.
const FILE: &str = "noise.json";
/// Share of the differences between equal models that are below the limit.
const CONFIDENCE: f64 = 0.95;

/// Runs of one commit that differ in their seed alone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Noise {
    pub commit: String,
    pub runs: Vec<NoiseRun>,
    /// That of the runs, the last one's seed in it.
    pub protocol: Protocol,
}

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct NoiseRun {
    pub seed: u64,
    pub val_bpb: f64,
}

impl Noise {
    /// What was measured on the branch of `study`, if anything was.
    ///
    /// # Errors
    /// If the file is there and cannot be read.
    pub fn read(study: &Study) -> Result<Option<Self>> {
        state::read(&study.folder().join(FILE), "what `noise` measured", "remove it and measure again")
    }

    fn values(&self) -> Vec<f64> {
        self.runs.iter().map(|run| run.val_bpb).collect()
    }
}

/// What runs of one commit say together.
#[derive(Clone, Debug, Serialize)]
pub struct Spread {
    pub commit: String,
    pub runs: Vec<NoiseRun>,
    pub mean: f64,
    pub lowest: f64,
    pub highest: f64,
    pub standard_deviation: f64,
    /// The largest gain of one run over another that chance explains.
    pub largest_chance_gain: f64,
}

impl Spread {
    /// Of at least two runs.
    pub fn of(noise: &Noise) -> Option<Self> {
        let values = noise.values();
        Some(Self {
            commit: noise.commit.clone(),
            runs: noise.runs.clone(),
            mean: values.iter().sum::<f64>() / values.len() as f64,
            lowest: values.iter().copied().fold(f64::MAX, f64::min),
            highest: values.iter().copied().fold(f64::MIN, f64::max),
            standard_deviation: standard_deviation(&values)?,
            largest_chance_gain: chance_difference(&values)?,
        })
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "commit {}: {} runs, mean {:.6}, lowest {:.6}, highest {:.6}, standard deviation {:.6}",
            short(&self.commit),
            self.runs.len(),
            self.mean,
            self.lowest,
            self.highest,
            self.standard_deviation
        )?;
        write!(f, "a gain of up to {:.6} of one run over another may be chance (95 %)", self.largest_chance_gain)
    }
}

/// Sample standard deviation; none of fewer than two values.
fn standard_deviation(values: &[f64]) -> Option<f64> {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (values.len() >= 2).then(|| (squares / (count - 1.0)).sqrt())
}

/// The largest gain of one run over another that the spread of `values` explains in 95 of 100 cases where there is none:
/// t · s · √2, with the one-sided quantile t of Student's distribution for as few values.
fn chance_difference(values: &[f64]) -> Option<f64> {
    let deviation = standard_deviation(values)?;
    let t = StudentsT::new(0.0, 1.0, values.len() as f64 - 1.0).ok()?.inverse_cdf(CONFIDENCE);
    Some(t * deviation * std::f64::consts::SQRT_2)
}

/// How much better than `best` an experiment can be by chance; none if that was not measured under the same conditions.
///
/// # Errors
/// If what was measured cannot be read.
pub fn largest_chance_difference(study: &Study, best: Option<&Record>) -> Result<Option<f64>> {
    let Some(noise) = Noise::read(study)? else { return Ok(None) };
    let is_comparable = best
        .and_then(|best| best.protocol.as_ref())
        .is_some_and(|protocol| protocol.differences_but_seed(&noise.protocol).is_empty());
    Ok(if is_comparable { chance_difference(&noise.values()) } else { None })
}

/// Trains the kept commit `runs` times, each with a seed of its own, and keeps the outcome; runs that are there already count.
///
/// # Errors
/// If something is unfinished or edited, a run gives no number, or the user interrupts: what was measured stays.
pub fn measure(
    study: &Study,
    interruption: &Interruption,
    runs: usize,
    mut say: impl FnMut(&NoiseRun),
) -> Result<Noise> {
    ensure!(runs >= 2, "--runs: expected at least 2, found {runs}; hint: 5 give a usable spread");
    study.require_finished()?;
    study.require_within_bounds()?;
    let commit = study.require_no_edit()?;
    // Runs of other conditions are none of these.
    let conditions = &study.settings.config_sha256[..6];
    let root = study.settings.runs_dir.join(format!("{}-noise-{}-{conditions}", study.tag, short(&commit)));
    fs::create_dir_all(&root).map_err(|error| {
        anyhow!("{}: cannot make the folder ({error}); hint: check that it may be written", root.display())
    })?;
    let built = worktree::build(study, &commit, &root.join("build.log"), interruption, |_| Ok(()))?;
    let Ok(program) = &built.program else {
        bail!("commit {}: expected it to build, found that it does not; hint: see {}", short(&commit), root.display());
    };
    let earlier = Noise::read(study)?.filter(|noise| noise.commit == commit);
    let mut measured: Option<Noise> = None;
    // Fewer than are there already would be a step back.
    let runs = earlier.map_or(runs, |earlier| runs.max(earlier.runs.len()));
    for add in 1..=runs as u64 {
        let seed = study.settings.seed + add;
        let folder = root.join(format!("seed-{seed}"));
        let one = Run { program, commit: &commit, folder: &folder, seed: Some(seed) };
        let outcome = training::measure(study, one, interruption, |_| Ok(()))?;
        let summary = outcome.map_err(|crash| {
            anyhow!("{}: expected a number, found a crash ({}); hint: see run.log there", folder.display(), crash.kind)
        })?;
        if !study.settings.keep_weights {
            run::remove_weights(&folder)?;
        }
        let protocol = summary.protocol;
        let run = NoiseRun { seed, val_bpb: summary.val_bpb };
        say(&run);
        let noise = measured.get_or_insert_with(|| Noise {
            commit: commit.clone(),
            runs: Vec::new(),
            protocol: protocol.clone(),
        });
        noise.runs.push(run);
        noise.protocol = protocol;
        // One run alone has no spread: it must not replace an earlier measurement.
        if noise.runs.len() >= 2 {
            state::write(&study.folder().join(FILE), noise)?;
        }
    }
    measured.ok_or_else(|| anyhow!("--runs: expected at least 2, found {runs}; hint: 5 give a usable spread"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_students_t_for_few_runs() {
        // Five values with the standard deviation 1: t(0.95, 4) = 2.1318 from a table.
        let values = [-1.264_911, -0.632_456, 0.0, 0.632_456, 1.264_911];
        assert!((standard_deviation(&values).unwrap() - 1.0).abs() < 1e-5);
        assert!((chance_difference(&values).unwrap() - 2.1318 * std::f64::consts::SQRT_2).abs() < 1e-3);
        assert_eq!(chance_difference(&[1.0]), None);
        assert_eq!(chance_difference(&[1.0, 1.0]), Some(0.0));
    }
}
