//! The embedded corpus `tales`: short stories that a probabilistic grammar makes, so that the least number of bits per
//! byte with which any model can predict them is known exactly.

mod grammar;
mod scoring;

use rayon::prelude::*;
use std::sync::LazyLock;

use chacha20::ChaCha8Rng;
use rand::SeedableRng;

use grammar::Grammar;
use scoring::{Goal, derivations};

pub use grammar::Story;

/// Stories to train on; a longer run repeats them.
pub const TRAIN_DOCUMENTS: usize = 1_000_000;

/// Stories to measure with.
pub const VALIDATION_DOCUMENTS: usize = 2_000;

/// Training stories have their index as seed, validation stories this and their index: no seed is in both.
const VALIDATION_SEED: u64 = 1 << 63;

static GRAMMAR: LazyLock<Grammar> = LazyLock::new(|| {
    Grammar::parse(include_str!("tales.grammar"), "story")
        .expect("the embedded grammar is read and checked by this module's tests")
});

/// How much there is to know in a text.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Information {
    /// −ln of the probability of the text.
    pub nats: f64,
    /// Length of the text.
    pub bytes: usize,
}

impl Information {
    /// Bits of information per byte of text.
    pub fn bits_per_byte(self) -> f64 {
        self.nats / (std::f64::consts::LN_2 * self.bytes as f64)
    }
}

/// The training story at `index`, in constant time: stories are made on demand.
///
/// # Panics
/// Where `index` is not below [`TRAIN_DOCUMENTS`].
pub fn train_document(index: usize) -> String {
    assert!(index < TRAIN_DOCUMENTS, "training story {index} of {TRAIN_DOCUMENTS}");
    generate(index as u64).text
}

/// The validation story at `index`, in constant time.
///
/// # Panics
/// Where `index` is not below [`VALIDATION_DOCUMENTS`].
pub fn validation_document(index: usize) -> String {
    validation_story(index).text
}

fn validation_story(index: usize) -> Story {
    assert!(index < VALIDATION_DOCUMENTS, "validation story {index} of {VALIDATION_DOCUMENTS}");
    generate(VALIDATION_SEED + index as u64)
}

/// The story of a seed, the same on every machine and in every version of the crates.
pub fn generate(seed: u64) -> Story {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    GRAMMAR.generate(ChaCha8Rng::from_seed(key))
}

/// −ln of the probability that the grammar makes `text`, summed over all derivations; `None` where it cannot.
///
/// The text is parsed: nothing that the generator knows is used.
pub fn score(text: &str) -> Option<f64> {
    finite(derivations(&GRAMMAR, text, Goal::Whole).nats)
}

/// −ln of the probability that a story begins with `text`; `None` where none does.
///
/// This is what a text that was cut off holds, so that the floor of cropped documents can be told as exactly.
pub fn score_beginning(text: &str) -> Option<f64> {
    finite(derivations(&GRAMMAR, text, Goal::Beginning).nats)
}

fn finite(nats: f64) -> Option<f64> {
    nats.is_finite().then_some(nats)
}

/// Bits per byte of texts that are stories or beginnings of stories, the number that no model can beat in expectation;
/// `None` where one is neither.
///
/// Why: let P be the grammar and Q what a model makes of a text.
/// - Tokens do not matter. A model's nats for the tokens of a text are those of one way to make its bytes, so the bytes
///   are at most that much more likely: the sum is never below −ln Q(bytes).
/// - Ends do not matter, although nobody pays for them: what is scored is that a story begins so, and no story begins
///   another one (each ends with its only "The end.").
/// - The mean of −ln Q over texts drawn from P is therefore at least the mean of −ln P (Gibbs), and stories are
///   independent, so that earlier text in a row tells nothing.
///
/// The floor is −ln P of these very texts, not a mean: as the mean of Q/P is at most 1, a model that has not seen them is
/// more than k nats below the floor, summed over all, with a probability of at most exp(−k) (Markov).
pub fn bpb_floor(texts: &[String]) -> Option<f64> {
    let nats: Vec<f64> = texts.par_iter().map(|text| score_beginning(text)).collect::<Option<_>>()?;
    let bytes = texts.iter().map(String::len).sum();
    Some(Information { nats: nats.into_iter().sum(), bytes }.bits_per_byte())
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    /// What the whole validation text holds.
    fn validation_information() -> Information {
        let mut total = Information { nats: 0.0, bytes: 0 };
        for index in 0..VALIDATION_DOCUMENTS {
            let story = validation_story(index);
            total.nats += story.nats;
            total.bytes += story.text.len();
        }
        total
    }

    const CLOSING: &str = "The end.";

    #[test]
    fn parsing_a_story_gives_the_generators_information() {
        for index in 0..VALIDATION_DOCUMENTS {
            let story = validation_story(index);
            let parsed = score(&story.text).expect("the grammar made it");
            assert!(
                (parsed / story.nats - 1.0).abs() < 1e-9,
                "story {index}: {parsed} by parsing, {} by making\n{}",
                story.nats,
                story.text
            );
        }
    }

    #[test]
    fn every_story_has_one_derivation() {
        for seed in 0..1_000 {
            let text = generate(seed).text;
            let found = derivations(&GRAMMAR, &text, Goal::Whole);
            assert_eq!(found.count, 1, "seed {seed}\n{text}");
        }
    }

    #[test]
    fn a_changed_story_has_another_score() {
        for seed in 0..200 {
            let story = generate(seed);
            let middle = story.text.len() / 2;
            let shorter = story.text[..middle].to_owned() + &story.text[middle + 1..];
            assert_eq!(score(&shorter), None, "seed {seed}\n{shorter}");
            let longer = story.text.clone() + " ";
            assert_eq!(score(&longer), None, "seed {seed}");
            // "near" and "not far from" are alternatives wherever one stands, but not equally likely ones.
            if story.text.contains(" not far from ") {
                let changed = story.text.replacen(" not far from ", " near ", 1);
                let nats = score(&changed).expect("still a story");
                assert!(story.nats - nats > 0.01, "seed {seed}\n{changed}");
            }
        }
    }

    #[test]
    fn no_beginning_of_a_story_is_a_story() {
        for index in 0..VALIDATION_DOCUMENTS {
            let text = validation_document(index);
            assert_eq!(text.find(CLOSING), Some(text.len() - CLOSING.len()), "story {index}\n{text}");
        }
        for seed in 0..20 {
            let text = generate(seed).text;
            for (end, _) in text.match_indices(['.', '"', '!', '\n']) {
                assert_eq!(score(&text[..end]), None, "seed {seed}, {end} bytes");
            }
        }
    }

    #[test]
    fn information_grows_along_a_story_up_to_its_score() {
        for seed in 0..3 {
            let story = generate(seed);
            let mut before = 0.0;
            for end in 0..=story.text.len() {
                let nats = score_beginning(&story.text[..end]).expect("a story begins so");
                assert!(nats > before - 1e-9, "seed {seed}, {end} bytes");
                before = nats;
            }
            assert!((before - story.nats).abs() < 1e-9, "seed {seed}");
        }
    }

    #[test]
    fn stories_are_plain_text_of_moderate_length() {
        for index in 0..VALIDATION_DOCUMENTS {
            let text = validation_document(index);
            assert!((400..=1500).contains(&text.len()), "story {index}\n{text}");
            let odd = [" .", " ,", "  ", "{", "[", "(", "|", "*"];
            assert!(text.is_ascii() && !odd.iter().any(|odd| text.contains(odd)), "story {index}\n{text}");
        }
    }

    #[test]
    fn no_validation_story_is_trained_on() {
        let validation: std::collections::HashSet<String> =
            (0..VALIDATION_DOCUMENTS).map(validation_document).collect();
        assert_eq!(validation.len(), VALIDATION_DOCUMENTS);
        assert!((0..20_000).all(|index| !validation.contains(&train_document(index))));
    }

    #[test]
    fn the_validation_text_and_its_floor_are_frozen() {
        let mut hash = Sha256::new();
        for index in 0..VALIDATION_DOCUMENTS {
            hash.update(validation_document(index));
        }
        let hex: String = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
        let information = validation_information();
        assert_eq!(
            (hex.as_str(), information.bytes),
            ("a689d59d4185ca6a46db792b26c08bf460e441d5247fa0432178fd4db901793b", 2_052_179),
            "a changed corpus makes earlier results incomparable"
        );
        assert!((information.bits_per_byte() - 0.319_613_794_676).abs() < 1e-9);
        let texts: Vec<String> = (0..VALIDATION_DOCUMENTS).map(validation_document).collect();
        let floor = bpb_floor(&texts).unwrap();
        assert!((floor / information.bits_per_byte() - 1.0).abs() < 1e-9);
        assert_eq!(bpb_floor(&["A text of somebody else.".to_owned()]), None);
    }
}
