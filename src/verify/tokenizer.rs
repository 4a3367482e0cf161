//! `tokenizer-*`: train on the corpus, compare merges, encodings and byte lengths.

use super::{Check, Goldens};
use crate::data::documents::{Documents, Split};
use crate::tokenizer::{PATTERN, SPECIAL_TOKENS, Tokenizer, TrainOptions, parse_tiktoken};
use anyhow::{Context, Result, bail};
use burn_dataset::Dataset;
use serde::Deserialize;

#[derive(Deserialize)]
struct Description {
    trained_on: TrainedOn,
    vocab_size: usize,
    pattern: String,
    special_tokens: Vec<String>,
    bos_id: u32,
    token_bytes_true: Vec<u32>,
    token_bytes_upstream: Vec<u32>,
    encode_cases: Vec<EncodeCase>,
}

#[derive(Deserialize)]
struct TrainedOn {
    split: String,
    max_chars: usize,
    doc_cap_chars: usize,
}

#[derive(Deserialize)]
struct EncodeCase {
    text: String,
    ids: Vec<u32>,
}

pub(super) fn checks(goldens: &Goldens, name: &str) -> Result<Vec<Check>> {
    let description: Description = goldens.json(name)?;
    let documents = goldens.documents(split(&description.trained_on.split)?)?;
    let tokenizer = train(&documents, &description)?;
    let golden = golden_ranks(goldens, name)?;
    let count = |quantity: &str, differences: usize| Check::new(name, quantity, differences as f64, 0.0);
    let differing = |a: &[u32], b: &[u32]| a.iter().zip(b).filter(|(a, b)| a != b).count() + a.len().abs_diff(b.len());
    let ranks = tokenizer.ranks();
    let merges = ranks.iter().zip(&golden).filter(|(a, b)| a != b).count() + ranks.len().abs_diff(golden.len());
    let encodings = description.encode_cases.iter().filter(|case| tokenizer.encode(&case.text) != case.ids).count();
    Ok(vec![
        count("differing merges", merges),
        count("differing encodings", encodings),
        count("differing byte lengths", differing(&tokenizer.byte_lengths(), &description.token_bytes_true)),
        count(
            "differing upstream byte lengths",
            differing(&tokenizer.upstream_byte_lengths(), &description.token_bytes_upstream),
        ),
        count("pattern", usize::from(description.pattern != PATTERN)),
        count("special tokens", usize::from(description.special_tokens != SPECIAL_TOKENS)),
        count("bos_id", tokenizer.bos_id().abs_diff(description.bos_id) as usize),
        count("vocab_size", tokenizer.vocab_size().abs_diff(description.vocab_size)),
    ])
}

fn train(documents: &Documents, description: &Description) -> Result<Tokenizer> {
    let texts = documents.iter().map(|text| Ok(text?.to_string()));
    let options = TrainOptions {
        vocab_size: description.vocab_size,
        max_chars: description.trained_on.max_chars,
        doc_cap_chars: description.trained_on.doc_cap_chars,
    };
    Tokenizer::train(texts, &options, |_, _, _| {})
}

fn golden_ranks(goldens: &Goldens, name: &str) -> Result<Vec<Vec<u8>>> {
    let path = goldens.folder.join(format!("{name}.tiktoken"));
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    parse_tiktoken(&text).with_context(|| format!("{} is no rank file", path.display()))
}

/// The golden tokenizer `name`, not trained but read.
pub(super) fn golden_tokenizer(goldens: &Goldens, name: &str) -> Result<Tokenizer> {
    Ok(Tokenizer::from_ranks(golden_ranks(goldens, name)?, "golden".to_owned()))
}

pub(super) fn split(name: &str) -> Result<Split> {
    match name {
        "train" => Ok(Split::Train),
        "val" => Ok(Split::Validation),
        _ => bail!("a split must be 'train' or 'val', found '{name}'"),
    }
}
