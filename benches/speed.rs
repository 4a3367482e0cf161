//! How fast the parts are on this machine: `cargo bench`. Each part's result is verified before it is timed; what is
//! printed is the median of several repetitions.

use autoresearch::config::Profile;
use autoresearch::data::documents::Documents;
use autoresearch::data::loader::Loader;
use autoresearch::data::packing::{Packing, Passes};
use autoresearch::data::tales;
use autoresearch::device::ComputeDevice;
use autoresearch::device::compute_type::ComputeType;
#[cfg(feature = "tch")]
use autoresearch::device::environment;
use autoresearch::eval::{ByteLengths, PassSizes, evaluate_bpb};
use autoresearch::model::{Gpt, Hyperparameters};
use autoresearch::ops;
use autoresearch::optim::{MuonAdamW, orthogonalize};
use autoresearch::tokenizer::{Tokenizer, TrainOptions};
use autoresearch::train::{BatchPlan, Limit, MonotonicClock, Training};
use burn::module::Module;
use burn::tensor::{DType, Distribution, Tensor};
use std::sync::Arc;
use std::time::Instant;

const SEQUENCE_LEN: usize = 256;
const VOCAB_SIZE: usize = 1024;

fn main() -> anyhow::Result<()> {
    #[cfg(feature = "tch")]
    environment::correct(environment::is_amd())?;
    let compute = ComputeDevice::select("auto", ComputeType::Auto)?;
    println!("device: {}", compute.name);
    let stories: Vec<String> = (0..10_000).map(tales::train_document).collect();
    let bytes: usize = stories.iter().map(String::len).sum();

    let train = || {
        let options = TrainOptions { vocab_size: VOCAB_SIZE, max_chars: usize::MAX, doc_cap_chars: usize::MAX };
        Tokenizer::train(stories.iter().map(|story| Ok(story.clone())), &options, |_, _, _| {})
    };
    let tokenizer = Arc::new(train()?);
    assert_eq!(tokenizer.vocab_size(), VOCAB_SIZE);
    report("tokenizer training, built-in stories", "MB/s", 3, || train().map(|_| bytes as f64 / 1e6))?;

    let ids = tokenizer.encode(&stories[0]);
    assert_eq!(tokenizer.decode(&ids), stories[0]);
    report("encoding, one thread", "MB/s", 3, || {
        let tokens: usize = stories.iter().map(|story| tokenizer.encode(story).len()).sum();
        assert!(tokens > ids.len());
        Ok(bytes as f64 / 1e6)
    })?;

    let rows = |epochs| {
        let documents = match epochs {
            Passes::Endless => Documents::generated(tales::TRAIN_DOCUMENTS, 1024, tales::train_document),
            _ => Documents::generated(tales::VALIDATION_DOCUMENTS, 1024, tales::validation_document),
        };
        Loader::new(Arc::new(documents), tokenizer.clone(), 8, Packing::new(SEQUENCE_LEN), epochs, None)
    };
    let mut packed = rows(Passes::Endless)?;
    report("rows of 257 tokens, generated, tokenized and packed", "tokens/s", 5, || {
        let mut tokens = 0;
        for _ in 0..200 {
            let batch = packed.next_batch()?.expect("rows without end");
            assert_eq!(batch.rows[0], tokenizer.bos_id());
            tokens += batch.rows.len();
        }
        Ok(tokens as f64)
    })?;
    drop(packed);

    let stack = || Tensor::<3>::random([16, 256, 256], Distribution::Normal(0.0, 1.0), &compute.device);
    let x = orthogonalize(stack());
    let trace = (x.clone() * x).sum().into_scalar::<f32>() / (16.0 * 256.0);
    assert!((0.7..1.3).contains(&trace), "mean squared singular value {trace}");
    let x = stack();
    report("orthogonalisation of 256 x 256", "matrices/s", 5, || {
        orthogonalize(x.clone());
        compute.device.sync().expect("the device answers");
        Ok(16.0)
    })?;

    attention(&compute)?;

    let hyperparameters = Hyperparameters::for_profile(Profile::Cpu);
    let sizes = hyperparameters.architecture(SEQUENCE_LEN, VOCAB_SIZE)?;
    let autodiff = compute.device.clone().autodiff();
    let mut model = Gpt::new(&sizes, compute.compute_type, 1, &autodiff);
    let plan = BatchPlan::new(&hyperparameters, SEQUENCE_LEN)?;
    let mut optimizer = MuonAdamW::new(&model, &hyperparameters.parameter_groups(&model), compute.compute_type)?;
    let mut training_rows = rows(Passes::Endless)?;
    let mut last_loss = f64::INFINITY;
    report("training, profile cpu", "tokens/s", 3, || {
        let mut loss = 0.0;
        let outcome = Training {
            model: model.clone(),
            optimizer: &mut optimizer,
            rows: &mut training_rows,
            hyperparameters: &hyperparameters,
            plan,
            limit: Limit::Steps(8),
            device: &compute.device,
            compute_type: compute.compute_type,
            clock: &MonotonicClock::start(),
        }
        .run(|step| {
            loss = step.loss;
            Ok(())
        })?;
        assert!(loss < last_loss, "the loss rose from {last_loss} to {loss}");
        last_loss = loss;
        model = outcome.model;
        Ok(outcome.tokens as f64)
    })?;

    let inference = model.valid();
    report("evaluation, profile cpu", "tokens/s", 3, || {
        let lengths = ByteLengths::of(&tokenizer);
        let sizes = if compute.is_cpu { PassSizes::CPU } else { PassSizes::GPU };
        let evaluation = evaluate_bpb(
            &inference,
            &mut rows(Passes::OnePass { at_most_rows: 128 })?,
            &lengths,
            &compute.device,
            sizes,
        )?;
        assert!(evaluation.bpb().is_finite());
        Ok(evaluation.tokens as f64)
    })?;
    Ok(())
}

/// Forward and backward of attention for windows of all of the context and less.
fn attention(compute: &ComputeDevice) -> anyhow::Result<()> {
    let (b, t, h, d) = if compute.is_cpu { (2, 512, 4, 64) } else { (16, 2048, 4, 128) };
    let operand = || {
        let x = Tensor::<4>::random([b, t, h, d], Distribution::Normal(0.0, 1.0), &compute.device);
        Tensor::<4>::from_inner(x.cast(compute.compute_type)).require_grad()
    };
    let [q, k, v] = [operand(), operand(), operand()];
    for window in [t, t / 2, t / 4, t / 8, t / 16] {
        let run = || ops::causal_attention(q.clone(), k.clone(), v.clone(), window);
        // The first query sees one key.
        let difference = run().narrow(1, 0, 1) - v.clone().narrow(1, 0, 1);
        assert!(difference.abs().max().cast(DType::F32).into_scalar::<f32>() < 0.05);
        report(&format!("attention {b} x {t} x {h} x {d}, window {window}, backward too"), "tokens/s", 9, || {
            let gradients = run().sum().backward();
            assert!(q.grad(&gradients).is_some());
            compute.device.sync().expect("the device answers");
            Ok((b * t) as f64)
        })?;
    }
    ops::choices().iter().for_each(|line| println!("{line}"));
    Ok(())
}

/// Prints the median rate at which `work` gets through the amount that it gives back.
fn report(name: &str, unit: &str, times: usize, mut work: impl FnMut() -> anyhow::Result<f64>) -> anyhow::Result<()> {
    let mut rates = Vec::new();
    for _ in 0..times {
        let start = Instant::now();
        let amount = work()?;
        rates.push(amount / start.elapsed().as_secs_f64());
    }
    rates.sort_by(f64::total_cmp);
    println!("{name:<52} {:>12.1} {unit}", rates[times / 2]);
    Ok(())
}
