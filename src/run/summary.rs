//! The block at the end of a run: the nine familiar keys first, in the familiar format, then ours.

use super::folder::read_json;
use super::protocol::Protocol;
use anyhow::Result;
use serde::{Deserialize, Deserializer, Serialize};
use std::fmt;
use std::path::Path;

/// Name of the file in a run's folder.
pub(super) const FILE: &str = "summary.json";

/// A run's outcome, as printed and as `summary.json` keeps it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    #[serde(deserialize_with = "number_or_nan")]
    pub val_bpb: f64,
    /// From the start of the command to that of the first step; not printed.
    pub startup_seconds: f64,
    pub training_seconds: f64,
    pub total_seconds: f64,
    pub peak_vram_mb: Option<f64>,
    pub mfu_percent: Option<f64>,
    #[serde(rename = "total_tokens_M")]
    pub total_tokens_m: f64,
    pub num_steps: usize,
    #[serde(rename = "num_params_M")]
    pub num_params_m: f64,
    pub depth: usize,
    pub device: String,
    pub tokens_per_second: f64,
    pub eval_seconds: f64,
    pub val_tokens: u64,
    pub val_bytes: u64,
    pub val_bpb_upstream: f64,
    pub bpb_floor: Option<f64>,
    pub dropped_percent: f64,
    pub seed: u64,
    pub config: String,
    pub run_dir: String,
    pub uncharged_seconds: f64,
    /// In the file only.
    pub protocol: Protocol,
}

impl Summary {
    /// Reads that of the run in `run`; none if it left none. Keys that are not known are left out.
    ///
    /// # Errors
    /// If the file cannot be read or holds something else.
    pub fn read(run: &Path) -> Result<Option<Self>> {
        read_json(&run.join(FILE))
    }
}

/// JSON has no NaN, which becomes null.
fn number_or_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known =
            |value: Option<f64>, digits: usize| value.map_or("n/a".to_owned(), |value| format!("{value:.digits$}"));
        let entries = [
            ("val_bpb", format!("{:.6}", self.val_bpb)),
            ("training_seconds", format!("{:.1}", self.training_seconds)),
            ("total_seconds", format!("{:.1}", self.total_seconds)),
            ("peak_vram_mb", known(self.peak_vram_mb, 1)),
            ("mfu_percent", known(self.mfu_percent, 2)),
            ("total_tokens_M", format!("{:.1}", self.total_tokens_m)),
            ("num_steps", self.num_steps.to_string()),
            ("num_params_M", format!("{:.1}", self.num_params_m)),
            ("depth", self.depth.to_string()),
            ("device", self.device.clone()),
            ("tokens_per_second", format!("{:.0}", self.tokens_per_second)),
            ("eval_seconds", format!("{:.1}", self.eval_seconds)),
            ("val_tokens", self.val_tokens.to_string()),
            ("val_bytes", self.val_bytes.to_string()),
            ("val_bpb_upstream", format!("{:.6}", self.val_bpb_upstream)),
            ("bpb_floor", known(self.bpb_floor, 6)),
            ("dropped_percent", format!("{:.2}", self.dropped_percent)),
            ("seed", self.seed.to_string()),
            ("config", self.config.clone()),
            ("run_dir", self.run_dir.clone()),
            ("uncharged_seconds", format!("{:.1}", self.uncharged_seconds)),
        ];
        write!(f, "---")?;
        for (key, value) in entries {
            write!(f, "\n{:<17} {value}", format!("{key}:"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::run::protocol;

    /// Some run's.
    pub(crate) fn summary() -> Summary {
        Summary {
            val_bpb: 0.9979,
            startup_seconds: 1.5,
            training_seconds: 300.06,
            total_seconds: 325.9,
            peak_vram_mb: Some(45060.23),
            mfu_percent: None,
            total_tokens_m: 499.6,
            num_steps: 953,
            num_params_m: 50.33,
            depth: 8,
            device: "cpu".to_owned(),
            tokens_per_second: 5000.4,
            eval_seconds: 10.0,
            val_tokens: 100,
            val_bytes: 300,
            val_bpb_upstream: 0.9978,
            bpb_floor: None,
            dropped_percent: 12.345,
            seed: 42,
            config: "configs/cpu.toml".to_owned(),
            run_dir: "runs/1".to_owned(),
            uncharged_seconds: 2.04,
            protocol: protocol::tests::example(),
        }
    }

    #[test]
    fn the_nine_familiar_keys_come_first_in_the_familiar_format() {
        let summary = summary();
        let familiar = "---\nval_bpb:          0.997900\ntraining_seconds: 300.1\ntotal_seconds:    325.9\npeak_vram_mb:     45060.2\n\
                        mfu_percent:      n/a\ntotal_tokens_M:   499.6\nnum_steps:        953\nnum_params_M:     50.3\ndepth:            8\n";
        assert!(summary.to_string().starts_with(familiar), "{summary}");
        assert!(summary.to_string().contains("\ntokens_per_second: 5000\n"), "{summary}");
        assert!(summary.to_string().ends_with("\nuncharged_seconds: 2.0"), "{summary}");
    }

    #[test]
    fn what_is_written_is_read_again_and_unknown_keys_are_left_out() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Summary::read(folder.path()).unwrap(), None);
        let mut value = serde_json::to_value(summary()).unwrap();
        value["of_a_later_version"] = [1].into();
        let write = |text: &str| std::fs::write(folder.path().join(FILE), text).unwrap();
        write(&value.to_string());
        assert_eq!(Summary::read(folder.path()).unwrap(), Some(summary()));
        value["val_bpb"] = serde_json::Value::Null;
        write(&value.to_string());
        assert!(Summary::read(folder.path()).unwrap().unwrap().val_bpb.is_nan());
        for damaged in ["", "{\"val_bpb\": 1.0}", &value.to_string()[..100]] {
            write(damaged);
            let message = Summary::read(folder.path()).unwrap_err().to_string();
            assert!(message.contains(FILE) && message.contains("; hint: "), "{message}");
        }
    }
}
