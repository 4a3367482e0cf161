//! `packing-*`: rows of packed documents.

use super::tokenizer::{golden_tokenizer, split};
use super::{Check, Goldens, token_ids};
use crate::data::loader::Loader;
use crate::data::packing::{Packing, Passes};
use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Deserialize)]
struct Case {
    tokenizer: String,
    split: String,
    batch: usize,
    seq_len: usize,
    batches: usize,
    buffer_size: usize,
    tokenizer_batch: usize,
}

pub(super) fn checks(goldens: &Goldens, name: &str) -> Result<Vec<Check>> {
    let cases: BTreeMap<String, Case> = goldens.json(name)?;
    let file = goldens.tensors(name)?;
    let mut checks = Vec::new();
    for (case, settings) in cases {
        let tokenizer = Arc::new(golden_tokenizer(goldens, &settings.tokenizer)?);
        let documents = Arc::new(goldens.documents(split(&settings.split)?)?);
        let packing = Packing {
            buffer_documents: settings.buffer_size,
            refill_documents: settings.tokenizer_batch,
            ..Packing::new(settings.seq_len)
        };
        let (shape, golden) = token_ids(&file, &case, tokenizer.vocab_size())?;
        let Case { batch, batches, .. } = settings;
        let expected = batches.checked_mul(batch).and_then(|rows| rows.checked_mul(packing.row_length));
        ensure!(
            expected == Some(golden.len()),
            "'{case}' has the shape {shape:?}, expected {batches} times {batch} rows of {} tokens",
            packing.row_length
        );
        let mut loader = Loader::new(documents, tokenizer, batch, packing, Passes::Endless, None)?;
        let mut differing = 0;
        for golden in golden.chunks(batch * packing.row_length) {
            let batch = loader.next_batch()?.context("the rows ended")?;
            differing += batch.rows.iter().zip(golden).filter(|(a, b)| a != b).count();
        }
        checks.push(Check::new(name, format!("{case} differing tokens"), differing as f64, 0.0));
    }
    Ok(checks)
}
