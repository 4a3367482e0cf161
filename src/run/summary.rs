//! The block at the end of a run: the nine familiar keys first, in the familiar format, then ours.

use super::protocol::Protocol;
use serde::Serialize;
use std::fmt;

/// A run's outcome, as printed and as `summary.json` keeps it.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    pub val_bpb: f64,
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
mod tests {
    use super::*;
    use crate::run::protocol;

    #[test]
    fn the_nine_familiar_keys_come_first_in_the_familiar_format() {
        let summary = Summary {
            val_bpb: 0.9979,
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
        };
        let familiar = "---\nval_bpb:          0.997900\ntraining_seconds: 300.1\ntotal_seconds:    325.9\npeak_vram_mb:     45060.2\n\
                        mfu_percent:      n/a\ntotal_tokens_M:   499.6\nnum_steps:        953\nnum_params_M:     50.3\ndepth:            8\n";
        assert!(summary.to_string().starts_with(familiar), "{summary}");
        assert!(summary.to_string().contains("\ntokens_per_second: 5000\n"), "{summary}");
        assert!(summary.to_string().ends_with("\nuncharged_seconds: 2.0"), "{summary}");
    }
}
