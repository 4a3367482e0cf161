//! Batches of packed rows, prepared in background threads.
//!
//! One thread reads documents in order, a few tokenize them, one packs rows. Every channel between them is bounded, so that
//! they run ahead of training by a fixed amount; none of them uses rayon's pool, which belongs to the training step.

use super::DataError;
use super::documents::Documents;
use super::packing::{Packer, PackerPosition, PackerState, Packing, Passes, Refill, TokenizedDocument};
use crate::tokenizer::Tokenizer;
use anyhow::{Result, anyhow, bail, ensure};
use burn_dataset::Dataset;
use serde::{Deserialize, Serialize};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Threads that tokenize; a few keep up with the fastest accelerators.
const MOST_TOKENIZERS: usize = 4;
/// Refills that wait before and after each tokenizing thread.
const REFILLS_AHEAD: usize = 2;
/// Batches that wait to be trained on.
const BATCHES_AHEAD: usize = 8;

/// Turns a text into tokens.
pub trait Encode: Send + Sync {
    /// Token ids of `text`, without BOS; special tokens in it are plain text.
    fn encode(&self, text: &str) -> Vec<u32>;
    /// The token that starts every document.
    fn bos_id(&self) -> u32;
}

impl Encode for Tokenizer {
    fn encode(&self, text: &str) -> Vec<u32> {
        Tokenizer::encode(self, text)
    }
    fn bos_id(&self) -> u32 {
        Tokenizer::bos_id(self)
    }
}

/// Where a loader has got to between two batches: what it takes to go on exactly from there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoaderState {
    /// Number of documents in the split that the other numbers refer to.
    pub documents: usize,
    /// The packing that made the rows so far.
    pub packing: Packing,
    /// The packer's position.
    pub packer: PackerState,
}

/// Some rows of tokens.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Token ids, row after row: `[row_count, row_length]`.
    pub rows: Vec<u32>,
    /// Number of rows; the last batch of a single pass may have fewer than the others.
    pub row_count: usize,
    /// Tokens per row: the sequence length and one more.
    pub row_length: usize,
    /// The pass over the documents that the packer had reached, from 1.
    pub epoch: usize,
    /// The share of the tokens taken so far that stand in no row, in percent.
    pub dropped_percent: f64,
    /// How long the caller waited for it.
    pub waited: Duration,
    documents: usize,
    packing: Packing,
    position: PackerPosition,
}

impl Batch {
    /// Where a loader goes on after this batch.
    pub fn state(&self) -> LoaderState {
        LoaderState { documents: self.documents, packing: self.packing, packer: self.position.state() }
    }
}

/// A refill before it is tokenized. Threads pass on results, the first error last.
struct Texts {
    epoch: usize,
    next_document: usize,
    texts: Vec<(usize, Arc<str>)>,
}

/// Reads, tokenizes and packs documents ahead of the caller.
pub struct Loader {
    /// Taken when the loader is dropped, which makes the threads stop.
    batches: Option<Receiver<Result<Batch>>>,
    threads: Vec<JoinHandle<()>>,
    failed: bool,
}

impl Loader {
    /// Starts reading `documents` from the start, or from `state`; the rows do not depend on `batch_rows`.
    ///
    /// # Errors
    /// If there are no documents, if a size is 0, or if `state` does not belong to these documents and this packing.
    pub fn new<E: Encode + ?Sized + 'static>(
        documents: Arc<Documents>,
        encoder: Arc<E>,
        batch_rows: usize,
        packing: Packing,
        passes: Passes,
        state: Option<LoaderState>,
    ) -> Result<Self> {
        ensure!(
            documents.len() > 0,
            "expected documents to load, found none; hint: prepare a data set that holds text"
        );
        ensure!(
            batch_rows > 0 && packing.row_length > 1 && packing.buffer_documents > 0 && packing.refill_documents > 0,
            "expected positive batch and packing sizes, found {batch_rows} rows, {packing:?}; hint: check the batch size and sequence length"
        );
        let state = match state {
            Some(state) => {
                check(&state, documents.len(), packing)?;
                state.packer
            }
            None => PackerState::start(),
        };

        let tokenizers = std::thread::available_parallelism().map_or(1, |cores| cores.get().min(MOST_TOKENIZERS));
        let (batch_sender, batches) = sync_channel(BATCHES_AHEAD);
        // The i-th refill goes through the (i modulo n)-th tokenizer, which keeps the order without sorting.
        let (texts_senders, texts): (Vec<_>, Vec<_>) = (0..tokenizers).map(|_| sync_channel(REFILLS_AHEAD)).unzip();
        let (refill_senders, refills): (Vec<_>, Vec<_>) = (0..tokenizers).map(|_| sync_channel(REFILLS_AHEAD)).unzip();

        // Built first, so that a thread that cannot be started stops the ones before it.
        let mut loader = Self { batches: Some(batches), threads: Vec::new(), failed: false };
        let total = documents.len();
        let resumed = state.clone();
        loader.spawn("documents", move || {
            let mut outputs = texts_senders.iter().cycle();
            let failure = guarded(|| read(&documents, packing, &resumed, &mut outputs));
            if let (Err(error), Some(output)) = (failure, outputs.next()) {
                // A closed channel means that nobody is interested any more.
                output.send(Err(error)).ok();
            }
        })?;
        for (texts, output) in texts.into_iter().zip(refill_senders) {
            let encoder = encoder.clone();
            loader.spawn("tokenizer", move || {
                if let Err(error) = guarded(|| tokenize(&*encoder, &texts, &output)) {
                    output.send(Err(error)).ok();
                }
            })?;
        }
        loader.spawn("packer", move || {
            if let Err(error) = guarded(|| pack(total, packing, passes, batch_rows, state, &refills, &batch_sender)) {
                batch_sender.send(Err(error)).ok();
            }
        })?;
        Ok(loader)
    }

    /// The next batch; none at the end of a single pass.
    ///
    /// # Errors
    /// [`DataError`] if a document could not be read or a thread panicked; every later call fails too.
    pub fn next_batch(&mut self) -> Result<Option<Batch>> {
        ensure!(!self.failed, "the loader has stopped after an error; hint: see the first error");
        let asked = Instant::now();
        match self.batches.as_ref().and_then(|batches| batches.recv().ok()) {
            None => Ok(None),
            Some(Ok(batch)) => Ok(Some(Batch { waited: asked.elapsed(), ..batch })),
            Some(Err(error)) => {
                self.failed = true;
                Err(DataError::from(error).into())
            }
        }
    }

    fn spawn(&mut self, name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = std::thread::Builder::new().name(name.to_string()).spawn(body).map_err(|error| {
            anyhow!("the loader's {name} thread cannot be started ({error}); hint: raise the limit on threads")
        })?;
        self.threads.push(thread);
        Ok(())
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.batches = None;
        for thread in self.threads.drain(..) {
            // Panics have been caught and passed on as errors.
            thread.join().ok();
        }
    }
}

fn check(state: &LoaderState, documents: usize, packing: Packing) -> Result<()> {
    let hint = "hint: resume with the data set, shards and sequence length that the run was started with";
    ensure!(
        state.documents == documents,
        "the saved position belongs to {} documents, found {documents}; {hint}",
        state.documents
    );
    ensure!(
        state.packing == packing,
        "the saved position was packed with {:?}, found {packing:?}; {hint}",
        state.packing
    );
    let PackerState { epoch, next_document, buffered, .. } = &state.packer;
    ensure!(
        *epoch > 0 && *next_document <= documents && buffered.iter().all(|&index| index < documents),
        "the saved position is damaged: it names documents beyond the last of {documents}, or epoch 0; hint: resume from another checkpoint"
    );
    Ok(())
}

/// Turns a panic of `body` into an error.
fn guarded(body: impl FnOnce() -> Result<()>) -> Result<()> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        bail!("a loader thread panicked: {}; hint: this is a bug, please report it with the data", message(&*panic))
    })
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

/// Sends the texts of the documents that `state` has buffered, then those of all refills from there on.
fn read<'a>(
    documents: &Documents,
    packing: Packing,
    state: &PackerState,
    outputs: &mut impl Iterator<Item = &'a SyncSender<Result<Texts>>>,
) -> Result<()> {
    let mut send = |epoch, next_document, numbers: Vec<usize>| -> Result<bool> {
        let texts = documents.get_many(numbers.clone())?;
        let texts = Texts { epoch, next_document, texts: numbers.into_iter().zip(texts).collect() };
        Ok(outputs.next().is_some_and(|output| output.send(Ok(texts)).is_ok()))
    };
    for numbers in state.buffered.chunks(packing.refill_documents) {
        if !send(state.epoch, state.next_document, numbers.to_vec())? {
            return Ok(());
        }
    }
    let (mut epoch, mut next) = (state.epoch, state.next_document);
    loop {
        if next == documents.len() {
            (epoch, next) = (epoch + 1, 0);
        }
        let numbers = documents.refill(next, packing.refill_documents);
        next = numbers.end;
        if !send(epoch, next, numbers.collect())? {
            return Ok(());
        }
    }
}

fn tokenize<E: Encode + ?Sized>(
    encoder: &E,
    texts: &Receiver<Result<Texts>>,
    output: &SyncSender<Result<Refill>>,
) -> Result<()> {
    for step in texts {
        let Texts { epoch, next_document, texts } = step?;
        let documents = texts
            .into_iter()
            .map(|(index, text)| {
                let mut tokens = vec![encoder.bos_id()];
                tokens.extend(encoder.encode(&text));
                TokenizedDocument { index, tokens }
            })
            .collect();
        if output.send(Ok(Refill { epoch, next_document, documents })).is_err() {
            break;
        }
    }
    Ok(())
}

fn pack(
    documents: usize,
    packing: Packing,
    passes: Passes,
    batch_rows: usize,
    state: PackerState,
    refills: &[Receiver<Result<Refill>>],
    output: &SyncSender<Result<Batch>>,
) -> Result<()> {
    let mut inputs = refills.iter().cycle();
    let mut next_refill = || {
        let step = inputs.next().and_then(|input| input.recv().ok());
        step.unwrap_or_else(|| bail!("a loader thread stopped without a reason; hint: this is a bug, please report it"))
    };

    let restored = state.buffered.len();
    let mut buffered = Vec::with_capacity(restored);
    while buffered.len() < restored {
        buffered.extend(next_refill()?.documents);
    }
    let mut packer = Packer::resume(packing, passes, state, buffered);

    loop {
        let mut rows = Vec::new();
        let mut row_count = 0;
        while row_count < batch_rows && packer.pack_row(&mut next_refill, &mut rows)? {
            row_count += 1;
        }
        if row_count == 0 {
            return Ok(());
        }
        let position = packer.position();
        let batch = Batch {
            rows,
            row_count,
            row_length: packing.row_length,
            epoch: position.epoch(),
            dropped_percent: position.dropped_percent(),
            waited: Duration::ZERO,
            documents,
            packing,
            position,
        };
        if output.send(Ok(batch)).is_err() {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::parquet_shards::ParquetShards;
    /// One token per byte.
    struct Bytes;

    const BOS: u32 = 256;

    impl Encode for Bytes {
        fn encode(&self, text: &str) -> Vec<u32> {
            text.bytes().map(u32::from).collect()
        }
        fn bos_id(&self) -> u32 {
            BOS
        }
    }

    /// 700 texts: empty ones, ones longer than a row, ones that hold the text of a special token.
    fn text(index: usize) -> String {
        match index % 10 {
            0 => String::new(),
            1 => format!("{index}:{}", "long ".repeat(40)),
            2 => format!("{index}:<|reserved_0|>"),
            _ => format!("{index}:{}", "x".repeat(index * 7 % 50)),
        }
    }

    fn texts() -> Arc<Documents> {
        Arc::new(Documents::generated(700, 200, text))
    }

    fn small() -> Packing {
        Packing { row_length: 65, buffer_documents: 100, refill_documents: 16 }
    }

    fn loader(batch_rows: usize, passes: Passes, state: Option<LoaderState>) -> Loader {
        Loader::new(texts(), Arc::new(Bytes), batch_rows, small(), passes, state).unwrap()
    }

    fn batches(loader: &mut Loader, most: usize) -> Vec<Batch> {
        let mut batches = Vec::new();
        while batches.len() < most
            && let Some(batch) = loader.next_batch().unwrap()
        {
            batches.push(batch);
        }
        batches
    }

    fn rows(batches: &[Batch]) -> Vec<u32> {
        batches.iter().flat_map(|batch| batch.rows.clone()).collect()
    }

    fn refusal(result: Result<Loader>) -> String {
        let message = result.err().expect("refused").to_string();
        assert!(message.contains("hint: ") && !message.contains('\n'), "{message}");
        message
    }

    #[test]
    fn rows_do_not_depend_on_the_batch_size() {
        let expected = rows(&batches(&mut loader(1, Passes::OnePass { at_most_rows: usize::MAX }, None), usize::MAX));
        for batch_rows in [2, 7, 1000] {
            let batches =
                batches(&mut loader(batch_rows, Passes::OnePass { at_most_rows: usize::MAX }, None), usize::MAX);
            assert_eq!(rows(&batches), expected, "{batch_rows}");
            let (last, whole) = batches.split_last().unwrap();
            assert!(whole.iter().all(|batch| batch.row_count == batch_rows));
            assert_eq!(last.rows.len(), last.row_count * last.row_length);
        }
    }

    #[test]
    fn a_single_pass_ends_and_stays_ended() {
        let mut loader = loader(4, Passes::OnePass { at_most_rows: usize::MAX }, None);
        let state = batches(&mut loader, usize::MAX).pop().unwrap().state();
        assert!(state.packer.buffered.len() * 65 < 65 * 65);
        assert_eq!(state.packer.next_document, 700);
        assert!(loader.next_batch().unwrap().is_none());
    }

    #[test]
    fn every_document_starts_once_per_epoch() {
        let tokens: usize = (0..700).map(|index| 1 + text(index).len()).sum();
        let mut loader = loader(1, Passes::Endless, None);
        let mut seen = Vec::new();
        let mut epochs = Vec::new();
        while epochs.last() != Some(&4) {
            let batch = loader.next_batch().unwrap().unwrap();
            let state = batch.state().packer;
            seen.extend(batch.rows);
            epochs.push(batch.epoch);
            // Whatever has been taken in stands in rows, was cut off, or is still buffered.
            let buffered: usize = state.buffered.iter().map(|&index| 1 + text(index).len()).sum();
            let passes = tokens * (state.epoch - 1);
            let this_pass: usize = (0..state.next_document).map(|index| 1 + text(index).len()).sum();
            let taken = state.packed_tokens + state.dropped_tokens;
            assert_eq!(taken + buffered as u64, (passes + this_pass) as u64);
            assert_eq!(batch.dropped_percent, 100.0 * state.dropped_tokens as f64 / taken as f64);
        }
        epochs.dedup();
        assert_eq!(epochs, [1, 2, 3, 4]);
        let starts = seen.iter().filter(|&&token| token == BOS).count();
        let state = batches(&mut loader, 1).pop().unwrap().state();
        assert!(starts + state.packer.buffered.len() >= 3 * 700);
    }

    #[test]
    fn documents_of_every_kind_arrive_as_their_text() {
        let rows = rows(&batches(&mut loader(8, Passes::OnePass { at_most_rows: usize::MAX }, None), usize::MAX));
        assert!(rows.windows(2).any(|pair| pair == [BOS, BOS]), "an empty document is a lone BOS");
        let mut special = vec![BOS];
        special.extend(Bytes.encode("2:<|reserved_0|>"));
        assert!(rows.windows(special.len()).any(|window| window == special), "the text of a special token is text");
        assert!(rows.chunks(65).any(|row| row[0] == BOS && !row[1..].contains(&BOS)), "a long document fills a row");
    }

    #[test]
    fn a_saved_position_goes_on_with_the_same_rows() {
        for passes in [Passes::OnePass { at_most_rows: usize::MAX }, Passes::Endless] {
            let mut whole = loader(3, passes, None);
            let all = batches(&mut whole, 400);
            for stop in (0..all.len()).step_by(23) {
                let saved = serde_json::to_string(&all[stop].state()).unwrap();
                let mut resumed = loader(3, passes, Some(serde_json::from_str(&saved).unwrap()));
                let rest = batches(&mut resumed, 20.min(all.len() - stop - 1));
                let expected = &all[stop + 1..][..rest.len()];
                assert_eq!(rows(&rest), rows(expected), "after batch {stop}");
                assert!(rest.iter().zip(expected).all(|(ours, theirs)| ours.state() == theirs.state()));
            }
        }
    }

    #[test]
    fn a_position_of_other_documents_is_refused() {
        let state = batches(&mut loader(3, Passes::Endless, None), 1).pop().unwrap().state();
        let resume = |state| Loader::new(texts(), Arc::new(Bytes), 3, small(), Passes::Endless, Some(state));
        let other = LoaderState { documents: 699, ..state.clone() };
        assert!(refusal(resume(other)).contains("belongs to 699 documents, found 700"));
        let other = LoaderState { packing: Packing::new(64), ..state.clone() };
        assert!(refusal(resume(other)).contains("packed with"));
        let mut other = state.clone();
        other.packer.buffered.push(700);
        assert!(refusal(resume(other)).contains("is damaged"));
    }

    #[test]
    fn no_documents_and_no_rows_are_refused() {
        let none = Arc::new(Documents::generated(0, 1, text));
        refusal(Loader::new(none, Arc::new(Bytes), 3, small(), Passes::Endless, None));
        refusal(Loader::new(texts(), Arc::new(Bytes), 0, small(), Passes::Endless, None));
    }

    #[test]
    fn a_text_too_short_for_a_row_gives_no_batch() {
        let short = Arc::new(Documents::generated(3, 1, |_| "short".to_string()));
        let mut loader =
            Loader::new(short, Arc::new(Bytes), 3, small(), Passes::OnePass { at_most_rows: usize::MAX }, None)
                .unwrap();
        assert!(loader.next_batch().unwrap().is_none());
    }

    #[test]
    fn a_panic_while_reading_is_an_error_after_the_rows_before_it() {
        let faulty = Arc::new(Documents::generated(700, 200, |index| {
            assert!(index < 400, "no document {index}");
            text(index)
        }));
        let mut loader = Loader::new(faulty, Arc::new(Bytes), 1, small(), Passes::Endless, None).unwrap();
        let mut rows = 0;
        let error = loop {
            match loader.next_batch() {
                Ok(batch) => rows += batch.unwrap().row_count,
                Err(error) => break error.to_string(),
            }
        };
        assert!(rows > 10, "{rows}");
        assert!(error.contains("panicked: no document 400") && error.contains("hint: "), "{error}");
        assert!(loader.next_batch().is_err());
    }

    #[test]
    fn a_panic_while_tokenizing_is_an_error() {
        struct Faulty;
        impl Encode for Faulty {
            fn encode(&self, text: &str) -> Vec<u32> {
                assert!(!text.starts_with("502:"), "cannot encode {text}");
                Vec::new()
            }
            fn bos_id(&self) -> u32 {
                BOS
            }
        }
        for passes in [Passes::OnePass { at_most_rows: usize::MAX }, Passes::Endless] {
            let mut loader = Loader::new(texts(), Arc::new(Faulty), 1, small(), passes, None).unwrap();
            let error = std::iter::from_fn(|| loader.next_batch().transpose()).find_map(Result::err).unwrap();
            assert!(error.to_string().contains("panicked: cannot encode 502:"), "{error}");
        }
    }

    #[test]
    fn an_unreadable_document_is_an_error_that_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shard.parquet");
        crate::data::parquet_shards::tests::write_shard(&path, &[Some("some text"); 50]);
        let documents = Documents::from_parquet(ParquetShards::open(vec![path.clone()], "text").unwrap());
        std::fs::remove_file(&path).unwrap();
        let mut loader = Loader::new(Arc::new(documents), Arc::new(Bytes), 1, small(), Passes::Endless, None).unwrap();
        let error = loader.next_batch().unwrap_err().to_string();
        assert!(error.starts_with(path.to_str().unwrap()) && error.contains("hint: "), "{error}");
    }

    #[test]
    fn dropping_the_loader_stops_its_threads() {
        let (documents, encoder) = (texts(), Arc::new(Bytes));
        let mut loader = Loader::new(documents.clone(), encoder.clone(), 3, small(), Passes::Endless, None).unwrap();
        loader.next_batch().unwrap();
        drop(loader);
        assert_eq!((Arc::strong_count(&documents), Arc::strong_count(&encoder)), (1, 1));
    }
}
