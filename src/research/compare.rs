//! Experiments beside each other, if they may be compared at all.

use crate::research::decision::Verdict;
use crate::research::ledger::Record;
use crate::research::noise;
use crate::research::study::Study;
use crate::run::Summary;
use crate::run::protocol::Protocol;
use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::Serialize;
use std::fmt;
use std::path::Path;

/// One side of a comparison.
#[derive(Clone, Debug, Serialize)]
pub struct Side {
    /// As the user called it.
    pub name: String,
    pub val_bpb: f64,
    /// Against the first one; below 0 is better.
    pub difference: f64,
    /// Against the first one.
    pub verdict: Verdict,
    pub tokens_per_second: Option<f64>,
    pub peak_vram_mb: Option<f64>,
    pub num_steps: Option<usize>,
    pub description: String,
    #[serde(skip)]
    protocol: Protocol,
}

/// Results of the same conditions.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    pub sides: Vec<Side>,
    /// Largest difference that chance explains, if it was measured.
    pub noise: Option<f64>,
}

/// Compares the experiments that `names` name: numbers, names such as `nov30-007`, commits, or folders of runs.
///
/// # Errors
/// If one is not there or gave no number, or they were not measured in the same way: it says what differs.
pub fn compare(study: &Study, names: &[String]) -> Result<Comparison> {
    ensure!(
        names.len() >= 2,
        "compare: expected at least two experiments, found {}; hint: `log` lists them",
        names.len()
    );
    let records = study.ledger.all_records()?;
    let mut sides: Vec<Side> = Vec::new();
    let noise = noise::largest_chance_difference(study, study.best()?.as_ref())?;
    for name in names {
        let mut side = find(study, &records, name)?;
        if let Some(first) = sides.first() {
            let differences = first.protocol.differences(&side.protocol);
            ensure!(
                differences.is_empty(),
                "{} and {name}: expected the same conditions, found others: {}; hint: numbers that were measured otherwise do not compare",
                first.name,
                differences.join(", ")
            );
            side.difference = side.val_bpb - first.val_bpb;
            side.verdict = Verdict::of(side.val_bpb, Some(first.val_bpb), noise);
        }
        sides.push(side);
    }
    Ok(Comparison { sides, noise })
}

fn find(study: &Study, records: &[Record], name: &str) -> Result<Side> {
    let folder = Path::new(name);
    if folder.join("summary.json").is_file() {
        let summary =
            Summary::read(folder)?.with_context(|| format!("{name}: expected a run's summary; hint: did it end?"))?;
        return side(name, summary.val_bpb, Some(summary.protocol), String::new()).map(|side| Side {
            tokens_per_second: Some(summary.tokens_per_second),
            peak_vram_mb: summary.peak_vram_mb,
            num_steps: Some(summary.num_steps),
            ..side
        });
    }
    let is_named = |record: &&Record| {
        record.id() == name
            || (record.tag == study.tag && name.parse() == Ok(record.number))
            || (name.len() >= 6 && record.commit.starts_with(name))
    };
    let record = records.iter().rev().find(is_named).ok_or_else(|| {
        anyhow!("compare: expected an experiment's number, name or commit, or a run's folder, found {name}; hint: `log` lists the experiments")
    })?;
    let val_bpb = record.val_bpb.ok_or_else(|| {
        anyhow!(
            "{}: expected an experiment with a number, found a crash; hint: `log` shows which have one",
            record.id()
        )
    })?;
    side(&record.id(), val_bpb, record.protocol.clone(), record.description.clone()).map(|side| Side {
        tokens_per_second: record.tokens_per_second,
        peak_vram_mb: record.peak_vram_mb,
        num_steps: record.num_steps,
        ..side
    })
}

fn side(name: &str, val_bpb: f64, protocol: Option<Protocol>, description: String) -> Result<Side> {
    let Some(protocol) = protocol else {
        bail!(
            "{name}: expected a result that says how it was measured, found one that does not; hint: measure it again"
        );
    };
    let verdict = Verdict::Baseline;
    let (tokens_per_second, peak_vram_mb, num_steps) = (None, None, None);
    let name = name.to_owned();
    Ok(Side {
        name,
        val_bpb,
        difference: 0.0,
        verdict,
        tokens_per_second,
        peak_vram_mb,
        num_steps,
        description,
        protocol,
    })
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<16} {:>9} {:>10} {:>8} {:>9} {:>6}  against the first",
            "", "val_bpb", "difference", "tok/s", "memory", "steps"
        )?;
        for (place, side) in self.sides.iter().enumerate() {
            let verdict = if place == 0 { String::new() } else { side.verdict.to_string() };
            let known = |value: Option<f64>| value.map_or("n/a".to_owned(), |value| format!("{value:.0}"));
            writeln!(
                f,
                "{:<16} {:>9.6} {:>+10.6} {:>8} {:>5} MiB {:>6}  {verdict}",
                side.name,
                side.val_bpb,
                side.difference,
                known(side.tokens_per_second),
                known(side.peak_vram_mb),
                side.num_steps.map_or("n/a".to_owned(), |steps| steps.to_string()),
            )?;
        }
        match self.noise {
            Some(noise) => write!(f, "a difference of up to {noise:.6} may be chance"),
            None => write!(f, "how far equal runs differ is not known here: `noise --runs 5` measures it"),
        }
    }
}
