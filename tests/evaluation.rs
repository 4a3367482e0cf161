//! The metric: equal for every batch size, scored outside the model, honest about bytes.

use crate::model::{lively, small};
use crate::training::rows;
use autoresearch::data::packing::Passes;
use autoresearch::eval::{ByteLengths, Evaluation, PassSizes, evaluate_bpb};
use autoresearch::parameters::{parameters, with_values};
use burn::tensor::Device;

pub fn lengths() -> ByteLengths {
    let mut exact = vec![1; 50];
    exact[49] = 0;
    exact[3] = 2;
    ByteLengths { upstream: exact.iter().map(|length| length * 2).collect(), exact }
}

fn evaluate(batch: usize, count: usize) -> Evaluation {
    let device = Device::flex();
    let model = lively(&small(), &device);
    evaluate_bpb(&model, &mut rows(batch, Passes::OnePass { at_most_rows: count }), &lengths(), &device, PassSizes::CPU)
        .unwrap()
}

#[test]
fn the_number_is_identical_for_every_batch_size() {
    // More rows than go through the model at once, twice, and a rest.
    let one = evaluate(1, 950);
    assert_eq!(one.tokens, 950 * 16);
    for batch in [2, 3, 7, 481, 600, 2000] {
        let other = evaluate(batch, 950);
        assert_eq!((other.nats, other.bytes, other.tokens), (one.nats, one.bytes, one.tokens), "batch {batch}");
    }
}

#[test]
fn a_model_that_knows_nothing_scores_the_logarithm_of_the_vocabulary() {
    let device = Device::flex();
    let model = lively(&small(), &device);
    let nothing = parameters(&model)
        .into_iter()
        .filter(|parameter| parameter.name == "lm_head.weight")
        .map(|parameter| (parameter.name, parameter.value * 0.0))
        .collect();
    let model = with_values(model, nothing);
    let evaluation =
        evaluate_bpb(&model, &mut rows(4, Passes::OnePass { at_most_rows: 10 }), &lengths(), &device, PassSizes::CPU)
            .unwrap();
    // Tokens without bytes are not scored; token 3 has two.
    let scored = evaluation.nats / 50f64.ln();
    assert!((scored - scored.round()).abs() < 1e-3 && scored < 160.0 && scored > 140.0, "{scored}");
    assert!(evaluation.bytes as f64 > scored);
    assert!((evaluation.bpb() - evaluation.nats / 2f64.ln() / evaluation.bytes as f64).abs() < 1e-12);
    assert!((evaluation.bpb_upstream() - evaluation.bpb() / 2.0).abs() < 1e-12);
}

#[test]
fn logits_of_another_width_than_the_vocabulary_are_refused() {
    let device = Device::flex();
    let model = lively(&small(), &device);
    let lengths = ByteLengths { exact: vec![1; 60], upstream: vec![1; 60] };
    let error =
        evaluate_bpb(&model, &mut rows(4, Passes::OnePass { at_most_rows: 10 }), &lengths, &device, PassSizes::CPU)
            .unwrap_err();
    assert!(error.to_string().contains("logits have the shape"), "{error}");
}
