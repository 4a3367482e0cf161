//! What must be the same for two numbers to compare.

use crate::config::{Config, Profile};
use crate::data::prepared::Prepared;
use crate::device::ComputeDevice;
use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::fmt::{self, Display};

/// SHA-256 of the code that makes a number what it is; `build/protocol.rs` lists the files.
pub const CODE_SHA256: &str = env!("AUTORESEARCH_PROTOCOL_SHA256");
/// Digits of a hash that messages show.
const SHOWN_DIGITS: usize = 12;

/// Everything that must be the same for the `val_bpb` of two runs to compare.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Protocol {
    /// SHA-256 of the code of evaluator, data, tokenizer, configuration and training loop, and of the versions of all libraries.
    pub code_sha256: String,
    /// SHA-256 of the tokenizer's ranks and header.
    pub tokenizer_sha256: String,
    /// Documents to train on.
    pub training_documents: usize,
    /// SHA-256 of the validation text.
    pub validation_sha256: String,
    /// Documents in it.
    pub validation_documents: usize,
    /// Its bytes.
    pub validation_bytes: u64,
    /// What was evaluated of it; none until that is done.
    pub evaluated: Option<Evaluated>,
    /// See [`Config::profile`].
    pub profile: Profile,
    /// The data set's name.
    pub dataset: String,
    /// See [`Config::vocab_size`].
    pub vocab_size: usize,
    /// See [`Config::sequence_len`].
    pub sequence_len: usize,
    /// See [`Config::eval_tokens`].
    pub eval_tokens: usize,
    /// See [`Config::uncharged_steps`].
    pub uncharged_steps: usize,
    /// How long training lasts.
    pub budget: Budget,
    /// See [`Config::seed`].
    pub seed: u64,
    /// The device that was found.
    pub device: String,
    /// The types that it computes in, such as `float32` or `float32, products in bfloat16`.
    pub compute_type: String,
}

/// What an evaluation looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Evaluated {
    /// Targets.
    pub val_tokens: u64,
    /// Bytes that they stand for.
    pub val_bytes: u64,
}

/// How long training lasts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Budget {
    /// Seconds of training.
    Seconds(f64),
    /// Optimizer steps.
    Steps(usize),
}

impl Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Seconds(seconds) => write!(f, "{seconds} s"),
            Self::Steps(steps) => write!(f, "{steps} steps"),
        }
    }
}

impl Protocol {
    /// The protocol of a run that has not been evaluated.
    ///
    /// # Errors
    /// If the tokenizer's files cannot be read.
    pub(super) fn of(
        config: &Config,
        steps: Option<usize>,
        prepared: &Prepared,
        training_documents: usize,
        compute: &ComputeDevice,
    ) -> Result<Self> {
        Ok(Self {
            code_sha256: CODE_SHA256.to_owned(),
            tokenizer_sha256: prepared.tokenizer_sha256()?,
            training_documents,
            validation_sha256: prepared.validation_sha256().to_owned(),
            validation_documents: prepared.validation_documents(),
            validation_bytes: prepared.validation_bytes(),
            evaluated: None,
            profile: config.profile,
            dataset: prepared.name().to_owned(),
            vocab_size: config.vocab_size,
            sequence_len: config.sequence_len,
            eval_tokens: config.eval_tokens,
            uncharged_steps: config.uncharged_steps,
            budget: steps.map_or(Budget::Seconds(config.time_budget_seconds), Budget::Steps),
            seed: config.seed,
            device: compute.name.clone(),
            compute_type: compute.types(),
        })
    }

    /// A short sentence for each thing that differs from `other`, `self` first: `budget: 60 s against 300 s`. What was evaluated
    /// counts where both runs came to that.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        self.compare(other, true)
    }

    /// [`Protocol::differences`] of two runs that may have different seeds.
    pub fn differences_but_seed(&self, other: &Self) -> Vec<String> {
        self.compare(other, false)
    }

    fn compare(&self, other: &Self, with_seed: bool) -> Vec<String> {
        // By name, so that a new field is not forgotten.
        let Self {
            code_sha256,
            tokenizer_sha256,
            training_documents,
            validation_sha256,
            validation_documents,
            validation_bytes,
            evaluated,
            profile,
            dataset,
            vocab_size,
            sequence_len,
            eval_tokens,
            uncharged_steps,
            budget,
            seed,
            device,
            compute_type,
        } = self;
        let mut found = Vec::new();
        let mut field = |name: &str, ours: &dyn Display, theirs: &dyn Display| {
            let (ours, theirs) = (ours.to_string(), theirs.to_string());
            if ours != theirs {
                let shown = |value: &str| match name.ends_with("(SHA-256)") {
                    true => value.chars().take(SHOWN_DIGITS).collect(),
                    false => value.to_owned(),
                };
                found.push(format!("{name}: {} against {}", shown(&ours), shown(&theirs)));
            }
        };
        let code = "code of evaluator, data, tokenizer and training loop (SHA-256)";
        field(code, code_sha256, &other.code_sha256);
        field("tokenizer (SHA-256)", tokenizer_sha256, &other.tokenizer_sha256);
        field("training documents", training_documents, &other.training_documents);
        field("validation text (SHA-256)", validation_sha256, &other.validation_sha256);
        field("validation documents", validation_documents, &other.validation_documents);
        field("validation bytes", validation_bytes, &other.validation_bytes);
        if let (Some(ours), Some(theirs)) = (evaluated, &other.evaluated) {
            field("evaluated tokens", &ours.val_tokens, &theirs.val_tokens);
            field("evaluated bytes", &ours.val_bytes, &theirs.val_bytes);
        }
        field("profile", &lower_case(profile), &lower_case(&other.profile));
        field("data set", dataset, &other.dataset);
        field("vocab_size", vocab_size, &other.vocab_size);
        field("sequence_len", sequence_len, &other.sequence_len);
        field("eval_tokens", eval_tokens, &other.eval_tokens);
        field("uncharged_steps", uncharged_steps, &other.uncharged_steps);
        field("budget", budget, &other.budget);
        if with_seed {
            field("seed", seed, &other.seed);
        }
        field("device", device, &other.device);
        field("compute type", compute_type, &other.compute_type);
        found
    }
}

/// As a configuration writes it.
fn lower_case(profile: &Profile) -> String {
    format!("{profile:?}").to_lowercase()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use serde_json::{Value, json};

    pub fn example() -> Protocol {
        Protocol {
            code_sha256: "0123456789abcdef".repeat(4),
            tokenizer_sha256: "f".repeat(64),
            training_documents: 1000,
            validation_sha256: "e".repeat(64),
            validation_documents: 10,
            validation_bytes: 12345,
            evaluated: Some(Evaluated { val_tokens: 100, val_bytes: 300 }),
            profile: Profile::Cpu,
            dataset: "tales".to_owned(),
            vocab_size: 1024,
            sequence_len: 256,
            eval_tokens: 131_072,
            uncharged_steps: 11,
            budget: Budget::Seconds(60.0),
            seed: 42,
            device: "cpu".to_owned(),
            compute_type: "float32".to_owned(),
        }
    }

    #[test]
    fn equal_protocols_do_not_differ_and_survive_the_file() {
        let protocol = example();
        assert_eq!(protocol.differences(&protocol.clone()), Vec::<String>::new());
        let text = serde_json::to_string(&protocol).unwrap();
        assert_eq!(serde_json::from_str::<Protocol>(&text).unwrap(), protocol);
    }

    #[test]
    fn every_field_that_differs_is_named_with_both_values() {
        let Value::Object(fields) = serde_json::to_value(example()).unwrap() else { panic!("an object") };
        for (name, value) in &fields {
            let other = match (name.as_str(), value) {
                ("budget", _) => json!({"steps": 60}),
                ("evaluated", _) => json!({"val_tokens": 100, "val_bytes": 299}),
                ("profile", _) => json!("halo"),
                (_, Value::Number(number)) => json!(number.as_u64().unwrap() + 1),
                (_, Value::String(text)) => json!(format!("b{text}")),
                (_, value) => panic!("a kind of value that this test does not know: {value}"),
            };
            let mut changed = fields.clone();
            changed.insert(name.clone(), other);
            let changed: Protocol = serde_json::from_value(Value::Object(changed)).unwrap();
            let found = example().differences(&changed);
            assert!(found.len() == 1 && found[0].contains(": ") && found[0].contains(" against "), "{name}: {found:?}");
            let but_seed = if name == "seed" { Vec::new() } else { found };
            assert_eq!(example().differences_but_seed(&changed), but_seed);
        }
    }

    #[test]
    fn sentences_are_short() {
        let other = Protocol {
            code_sha256: "f".repeat(64),
            budget: Budget::Seconds(300.0),
            profile: Profile::H100,
            ..example()
        };
        let code = "code of evaluator, data, tokenizer and training loop (SHA-256): 0123456789ab against ffffffffffff";
        assert_eq!(example().differences(&other), [code, "profile: cpu against h100", "budget: 60 s against 300 s"]);
        let steps = Protocol { budget: Budget::Steps(60), ..example() };
        assert_eq!(example().differences(&steps), ["budget: 60 s against 60 steps"]);
    }

    #[test]
    fn a_run_that_was_not_evaluated_differs_in_nothing_for_that() {
        let crashed = Protocol { evaluated: None, ..example() };
        assert!(example().differences(&crashed).is_empty() && crashed.differences(&example()).is_empty());
    }
}
