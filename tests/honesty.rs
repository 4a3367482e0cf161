//! How a number could be cheated: each way is caught, or has nothing to take hold of.
//!
//! What a model computes is tried with models that cheat; what an edit may name with changed copies of the shipped file.

use crate::evaluation::lengths;
use crate::model::{lively, small};
use crate::training::{Steps, hyperparameters, rows, train_by};
use autoresearch::data::packing::Passes;
use autoresearch::eval::{Evaluation, LanguageModel, PassSizes, evaluate_bpb};
use autoresearch::honesty::Unmeasurable;
use autoresearch::model::Gpt;
use autoresearch::research::source_check;
use autoresearch::run::protocol::CODE_SHA256;
use autoresearch::tokenizer::Tokenizer;
use autoresearch::train::{Diverged, Limit};
use burn::tensor::{Device, Int, Tensor};
use std::cell::{OnceCell, RefCell};
use std::fs;
use std::path::Path;
use std::time::Duration;

// What build.rs hashes.
#[path = "../build/protocol.rs"]
mod sources;

/// A model as it is edited: what it makes of the residual stream and of the logits.
struct Edited<H, L> {
    model: Gpt,
    hidden: H,
    logits: L,
}

impl<H: Fn(Tensor<3>) -> Tensor<3>, L: Fn(Tensor<2>) -> Tensor<2>> LanguageModel for Edited<H, L> {
    fn hidden(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        (self.hidden)(self.model.hidden(tokens))
    }
    fn logits(&self, hidden: Tensor<2>) -> Tensor<2> {
        (self.logits)(self.model.logits(hidden))
    }
}

/// Two groups of rows of different sizes.
const ROWS: usize = 600;

fn evaluate(
    hidden: impl Fn(Tensor<3>) -> Tensor<3>,
    logits: impl Fn(Tensor<2>) -> Tensor<2>,
) -> anyhow::Result<Evaluation> {
    let device = Device::flex();
    let edited = Edited { model: lively(&small(), &device), hidden, logits };
    let mut rows = rows(8, Passes::OnePass { at_most_rows: ROWS });
    evaluate_bpb(&edited, &mut rows, &lengths(), &device, PassSizes::CPU)
}

/// The message of a model that gets no number.
fn caught(result: anyhow::Result<Evaluation>) -> String {
    let error = result.expect_err("no number");
    let message = error.to_string();
    assert!(error.is::<Unmeasurable>(), "{message}");
    assert!(message.starts_with("FAIL: ") && message.contains("; hint: ") && !message.contains('\n'), "{message}");
    message
}

/// Each position with a little of the next one.
fn peek(x: Tensor<3>) -> Tensor<3> {
    let [b, t, c] = x.dims();
    let next = Tensor::cat(vec![x.clone().slice([0..b, 1..t, 0..c]), x.clone().slice([0..b, t - 1..t, 0..c])], 1);
    x + next * 0.01
}

#[test]
fn an_honest_model_gets_the_same_number_as_ever() {
    let device = Device::flex();
    let mut rows = rows(8, Passes::OnePass { at_most_rows: ROWS });
    let plain = evaluate_bpb(&lively(&small(), &device), &mut rows, &lengths(), &device, PassSizes::CPU).unwrap();
    let found = evaluate(|x| x, |logits| logits).unwrap();
    assert_eq!((found.nats, found.bytes, found.tokens), (plain.nats, plain.bytes, (ROWS * 16) as u64));
}

#[test]
fn peeking_one_token_ahead_is_caught() {
    let message = caught(evaluate(peek, |logits| logits));
    assert!(message.contains("when only tokens after it and other rows did"), "{message}");
}

#[test]
fn peeking_at_some_positions_only_is_caught() {
    let sparse = |x: Tensor<3>| {
        let [b, t, c] = x.dims();
        let ahead = peek(x.clone());
        let at = |from: &Tensor<3>, position: usize| from.clone().slice([0..b, position..position + 1, 0..c]);
        Tensor::cat((0..t).map(|position| at(if position % 4 == 2 { &ahead } else { &x }, position)).collect(), 1)
    };
    caught(evaluate(sparse, |logits| logits));
}

#[test]
fn peeking_when_the_logits_are_made_is_caught() {
    let later_rows = |logits: Tensor<2>| {
        let [n, v] = logits.dims();
        let next = Tensor::cat(vec![logits.clone().slice([1..n, 0..v]), logits.clone().slice([0..1, 0..v])], 0);
        logits + next * 0.01
    };
    caught(evaluate(|x| x, later_rows));
}

#[test]
fn peeking_only_in_groups_of_another_size_is_caught() {
    // 600 rows are 481 and 119.
    caught(evaluate(|x| if x.dims()[0] == 119 { peek(x) } else { x }, |logits| logits));
}

/// Peeks where no row's second token is among those of the first group, nor one of what the check replaces them by.
struct Gated {
    model: Gpt,
    off: OnceCell<Vec<i64>>,
}

impl LanguageModel for Gated {
    fn hidden(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [b, _] = tokens.dims();
        let second: Vec<i64> = tokens.clone().slice([0..b, 1..2]).into_data_as::<i64>().iter::<i64>().collect();
        let off = self.off.get_or_init(|| second.iter().flat_map(|token| [*token, (token + 1) % 50]).collect());
        let x = self.model.hidden(tokens);
        if second.iter().any(|token| off.contains(token)) { x } else { peek(x) }
    }
    fn logits(&self, hidden: Tensor<2>) -> Tensor<2> {
        self.model.logits(hidden)
    }
}

#[test]
fn peeking_only_in_groups_of_some_content_is_caught() {
    let device = Device::flex();
    // Groups of two rows.
    let sizes = PassSizes { tokens: 2 * 17, ..PassSizes::CPU };
    let evaluate = |at_most_rows: usize| {
        let gated = Gated { model: lively(&small(), &device), off: OnceCell::new() };
        evaluate_bpb(&gated, &mut rows(8, Passes::OnePass { at_most_rows }), &lengths(), &device, sizes)
    };
    assert!(evaluate(2).is_ok(), "the first group shows nothing");
    // Of 1000 groups more than 300 have a peek: that none of a tenth of those is looked at does not happen.
    let second: Vec<[u32; 2]> = (0..1000)
        .scan(rows(2, Passes::OnePass { at_most_rows: 2000 }), |rows, _| rows.next_batch().unwrap())
        .map(|batch| [batch.rows[1], batch.rows[17 + 1]])
        .collect();
    let is_off = |token: &u32| second[0].iter().any(|first| [*first, first + 1].contains(token));
    assert!(second.iter().filter(|group| !group.iter().any(is_off)).count() > 300, "{second:?}");
    let message = caught(evaluate(2000));
    assert!(message.contains("when only tokens after it and other rows did"), "{message}");
}

#[test]
fn a_mean_over_the_row_is_caught() {
    caught(evaluate(|x| x.clone() + x.mean_dim(1) * 0.1, |logits| logits));
}

#[test]
fn statistics_over_the_batch_are_caught() {
    caught(evaluate(|x| x.clone() - x.mean_dim(0), |logits| logits));
}

#[test]
fn what_another_row_says_is_caught() {
    let next_row = |x: Tensor<3>| {
        let [b, t, c] = x.dims();
        let next = Tensor::cat(vec![x.clone().slice([1..b, 0..t, 0..c]), x.clone().slice([0..1, 0..t, 0..c])], 0);
        x + next * 0.01
    };
    caught(evaluate(next_row, |logits| logits));
}

#[test]
fn what_is_kept_between_calls_is_caught() {
    let before: RefCell<Option<Tensor<3>>> = RefCell::new(None);
    let remember = |x: Tensor<3>| match before.replace(Some(x.clone())) {
        Some(before) if before.dims() == x.dims() => x + before,
        _ => x,
    };
    let message = caught(evaluate(remember, |logits| logits));
    assert!(message.contains("between two calls"), "{message}");
    // An edit cannot even write it.
    for line in [
        "static SEEN: std::sync::Mutex<Vec<u8>> = std::sync::Mutex::new(Vec::new());",
        "std::thread_local! { static SEEN: u8 = 0 }",
        "use std::cell::RefCell;",
        "use burn::module::RunningState;",
        "fn count(x: &std::sync::atomic::AtomicUsize) {}",
    ] {
        refused(line);
    }
}

#[test]
fn a_model_cannot_hide_a_peek_in_noise_that_it_makes() {
    let calls = RefCell::new(0);
    let noisy = |logits: Tensor<2>| {
        *calls.borrow_mut() += 1;
        let sign = if *calls.borrow() % 2 == 0 { 1.0 } else { -1.0 };
        logits + sign
    };
    let message = caught(evaluate(peek, noisy));
    assert!(message.contains("without random numbers"), "{message}");
}

#[test]
fn a_loss_of_its_own_is_nothing_that_is_asked_for() {
    // Ones that are certain of every token: the evaluator makes probabilities of them, which are those of a guess.
    let guess = evaluate(|x| x, |logits| logits * 0.0).unwrap();
    let scored = guess.nats / 50f64.ln();
    assert!((scored - scored.round()).abs() < 1e-3 && scored > ROWS as f64 * 14.0, "{scored}");
    let certain = evaluate(|x| x, |logits| logits * 0.0 + 64.0).unwrap();
    assert!((certain.nats / guess.nats - 1.0).abs() < 1e-6, "{} and {}", certain.nats, guess.nats);
    // Nor can an edit print one, or end the run after that.
    refused("fn report() { println!(\"val_bpb: 0.1\"); }");
    refused("fn report() { std::process::exit(0); }");
    refused("use crate::output::say;");
    refused("fn report() { tracing::warn!(\"\\nval_bpb: 0.1\"); }");
}

#[test]
fn logits_that_are_no_numbers_are_a_diverged_run() {
    for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let error = evaluate(|x| x, |logits| logits.clone().mask_fill(logits.greater_elem(0.0), wrong)).unwrap_err();
        assert!(error.is::<Diverged>() && error.to_string().starts_with("FAIL: val_bpb is NaN"), "{error}");
    }
}

#[test]
fn a_model_that_answers_for_fewer_targets_is_refused() {
    let part = |rows: usize, positions: usize| {
        move |x: Tensor<3>| {
            let [b, t, c] = x.dims();
            x.slice([0..b / rows, 0..t / positions, 0..c])
        }
    };
    for (hidden, found) in [(part(2, 1), "240 rows of 16 positions"), (part(1, 2), "481 rows of 8 positions")] {
        let message = evaluate(hidden, |logits| logits).unwrap_err().to_string();
        assert!(message.contains(&format!("{found}, expected 481 of 16")), "{message}");
    }
    let fewer = |logits: Tensor<2>| {
        let [n, v] = logits.dims();
        logits.slice([0..n, 0..v - 1])
    };
    let message = evaluate(|x| x, fewer).unwrap_err().to_string();
    assert!(message.contains("logits have the shape"), "{message}");
    // How much is evaluated stands in the configuration, which an edit cannot reach.
    refused("use crate::config::Config;");
    refused("use crate::eval::evaluate_bpb;");
}

/// The shipped model file with `line` in it is refused at that line.
fn refused(line: &str) {
    let shipped = include_str!("../src/model.rs");
    let place = "// Model\n";
    assert_eq!(shipped.matches(place).count(), 1);
    let source = shipped.replace(place, &format!("{place}{line}\n"));
    let number = source.lines().position(|found| found == line).unwrap() + 1;
    let message = source_check::check("src/model.rs", &source).expect_err(line).to_string();
    assert!(message.starts_with(&format!("src/model.rs:{number}: ")) && message.contains("; hint: "), "{message}");
}

#[test]
fn reading_the_validation_text_is_refused() {
    for line in [
        "fn peek() -> Vec<u8> { std::fs::read(\"/root/.cache/autoresearch/climbmix/shard_06542.parquet\").unwrap() }",
        "use std::{fs as f, io::Read};",
        "use std as s; fn peek() { s::fs::read(\"x\"); }",
        "use crate as c; fn peek() { c::data::prepared::Prepared::open(\"tales\", None, None); }",
        "use crate::data::{documents::Split, prepared::Prepared};",
        "fn peek() { use crate::{ops, data::tales}; }",
        "fn peek() { parquet::file::reader::SerializedFileReader::new(0); }",
        "const VALIDATION: &[u8] = include_bytes!(\"../validation.parquet\");",
        "fn peek() { assert!(std::fs::exists(\"x\").unwrap()); }",
        "fn peek(model: Gpt) -> Gpt { model.load_file(\"x\") }",
        "fn peek() { burn::tensor::Bytes::from_file(\"x\", 0, 1); }",
        "use burn::tensor as t; fn peek() { t::Bytes::from_file(\"x\", 0, 1); }",
        "mod validation;",
    ] {
        refused(line);
    }
}

#[test]
fn replacing_the_byte_table_is_refused_and_another_tokenizer_is_another_protocol() {
    for line in [
        "use crate::tokenizer::Tokenizer;",
        "use crate::eval::ByteLengths;",
        "fn lengths() { std::fs::write(\"/root/.cache/autoresearch/tales/tokenizer.tiktoken\", \"\").unwrap(); }",
        "fn lengths() { unsafe { std::ptr::write(0 as *mut u32, 100) } }",
    ] {
        refused(line);
    }
    let folder = tempfile::tempdir().unwrap();
    let saved = |last: &[u8], text: &str| {
        let ranks = (0..=255).map(|byte| vec![byte]).chain([last.to_vec()]).collect();
        Tokenizer::from_ranks(ranks, text.to_owned()).save(folder.path()).unwrap();
        Tokenizer::files_sha256(folder.path()).unwrap()
    };
    let first = saved(b"ab", "a");
    assert_eq!(first, saved(b"ab", "a"));
    assert_ne!(first, saved(b"ac", "a"));
    assert_ne!(first, saved(b"ab", "b"));
}

#[test]
fn another_seed_than_the_given_one_is_refused() {
    for line in [
        "fn lucky() -> ChaCha8Rng { ChaCha8Rng::seed_from_u64(7) }",
        "fn lucky(seed: u64) -> ChaCha8Rng { let seed = seed ^ 7; ChaCha8Rng::seed_from_u64(seed) }",
        "fn lucky() -> ChaCha8Rng { ChaCha8Rng::from_seed([7; 32]) }",
        "fn lucky() -> impl rand::Rng { rand::rng() }",
        "fn lucky(device: &Device) { device.seed(7); }",
        "#[cfg(not(test))] const LUCKY: u64 = 7;",
    ] {
        refused(line);
    }
}

#[test]
fn changing_the_clock_is_refused() {
    for line in [
        "use std::time::Instant;",
        "use crate::train::{Clock, MonotonicClock};",
        "unsafe extern \"C\" { fn clock_settime(clock: i32, time: *const [i64; 2]) -> i32; }",
        "fn slow() { std::process::Command::new(\"date\"); }",
        "fn slow(device: &Device) { device.profile(|| ()); }",
        "#[unsafe(no_mangle)] pub extern \"C\" fn clock_gettime() {}",
    ] {
        refused(line);
    }
}

#[test]
fn training_in_steps_that_are_not_charged_ends_at_a_twentieth_of_the_budget() {
    // An edit that makes the first steps, which it knows not to be charged, huge.
    let clock = Steps::new(|step| if step < 11 { 15 } else { 1 });
    let budget = Duration::from_secs(40);
    let limit = Limit::Time { budget, uncharged_steps: 11 };
    let (outcome, reports) = train_by(&clock, &hyperparameters(2, 32), limit, |device| lively(&small(), device));
    let after_first: Duration = reports[1..].iter().map(|report| report.duration).sum();
    assert!(after_first <= budget + budget / 20 + reports.last().unwrap().duration, "{after_first:?}");
    assert_eq!(outcome.unwrap().uncharged_time, Duration::from_secs(15));
}

#[test]
fn another_evaluator_is_another_protocol_and_another_model_is_not() {
    assert_eq!(sources::sha256(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap(), CODE_SHA256);
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    let hash = || sources::sha256(folder.path()).unwrap();
    for name in ["Cargo.toml", "Cargo.lock", "build.rs", "build/link.rs", "src/eval.rs", "src/data/loader.rs"] {
        write(name, "ab");
    }
    write("src/data/tales/mod.rs", "d");
    let first = hash();
    for name in [
        "src/model.rs",
        "src/optim.rs",
        "src/cli.rs",
        "src/cli/research.rs",
        "src/research/git.rs",
        "src/verify/mod.rs",
    ] {
        write(name, "another");
        assert_eq!(hash(), first, "{name}");
    }
    // What an editor leaves beside a file is no source.
    write("src/.model.rs.swp", "another");
    write("src/eval.rs~", "another");
    assert_eq!(hash(), first);
    let mut seen = vec![first];
    for (name, text) in [
        ("src/eval.rs", "a"),
        ("src/data/loader.rs", "bc"),
        ("src/data/tales/mod.rs", ""),
        ("src/data/new.rs", ""),
        ("src/ops/libtorch/shim.cpp", ""),
        ("src/parameters.rs", ""),
        ("src/main.rs", ""),
        ("build.rs", ""),
        ("build/link.rs", ""),
        ("Cargo.toml", ""),
        ("Cargo.lock", ""),
    ] {
        write(name, text);
        let hash = hash();
        assert!(!seen.contains(&hash), "{name}");
        seen.push(hash);
    }
    fs::remove_file(folder.path().join("Cargo.lock")).unwrap();
    assert!(sources::sha256(folder.path()).is_err());
}

#[test]
fn a_changed_model_does_not_hash_the_sources_again() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let watched = sources::watched(root).unwrap();
    for name in ["src", "src/model.rs", "src/optim.rs", "src/research", "src/cli", "src/cli.rs", "src/verify"] {
        assert!(!watched.iter().any(|found| found == name), "{name}");
    }
    for name in ["src/eval.rs", "src/data", "src/ops/mod.rs", "src/run/mod.rs", "build.rs", "build", "Cargo.lock"] {
        assert!(watched.iter().any(|found| found == name), "{name}");
    }
}
