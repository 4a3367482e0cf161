//! What the model computes and how it is made.

use autoresearch::config::Profile;
use autoresearch::model::{Gpt, GptConfig, Hyperparameters};
use autoresearch::parameters::{parameters, take_gradients, with_values};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use std::collections::{BTreeMap, BTreeSet};

pub fn small() -> GptConfig {
    GptConfig {
        sequence_len: 16,
        vocab_size: 50,
        n_layer: 3,
        n_head: 4,
        n_kv_head: 2,
        n_embd: 32,
        window_pattern: "SL".to_owned(),
    }
}

/// A model in which no matrix is zero, so that everything has an effect.
pub fn lively(config: &GptConfig, device: &Device) -> Gpt {
    let model = Gpt::new(config, FloatDType::F32, 1, device);
    let values = parameters(&model).into_iter().enumerate().map(|(i, parameter)| {
        let n = parameter.value.dims()[0];
        let wave = (0..n).map(|j| ((i * 131 + j * 17) as f32).sin() * 0.2).collect::<Vec<_>>();
        (
            parameter.name,
            parameter.value.clone() + Tensor::from_data(TensorData::new(wave, [n]), &parameter.value.device()),
        )
    });
    let values: BTreeMap<_, _> = values.collect();
    with_values(model, values)
}

fn tokens(rows: usize, columns: usize, step: usize, device: &Device) -> Tensor<2, Int> {
    let ids: Vec<i32> = (0..rows * columns).map(|i| ((i * step + i / 7) % 50) as i32).collect();
    Tensor::from_data(TensorData::new(ids, [rows, columns]), device)
}

fn logits(model: &Gpt, tokens: Tensor<2, Int>) -> Vec<f32> {
    let hidden = model.hidden(tokens);
    let [b, t, c] = hidden.dims();
    model.logits(hidden.reshape([b * t, c])).into_data().iter::<f32>().collect()
}

#[test]
fn logits_do_not_change_when_later_tokens_do() {
    let device = Device::flex();
    let model = lively(&small(), &device);
    let row = tokens(1, 16, 3, &device);
    let changed = row.clone().slice_assign([0..1, 10..16], tokens(1, 6, 11, &device));
    let (before, after) = (logits(&model, row), logits(&model, changed));
    assert_eq!(before[..10 * 50], after[..10 * 50]);
    assert_ne!(before[10 * 50..11 * 50], after[10 * 50..11 * 50]);
}

#[test]
fn logits_are_softcapped() {
    let device = Device::flex();
    let logits = logits(&lively(&small(), &device), tokens(2, 16, 3, &device));
    assert!(logits.iter().all(|z| z.abs() <= 15.0));
}

#[test]
fn a_shorter_row_gives_the_same_logits() {
    let device = Device::flex();
    let model = lively(&small(), &device);
    let row = tokens(1, 16, 3, &device);
    let (whole, start) = (logits(&model, row.clone()), logits(&model, row.slice([0..1, 0..7])));
    for (a, b) in whole.iter().zip(&start) {
        assert!((a - b).abs() < 1e-5, "{a} and {b}");
    }
}

#[test]
fn every_parameter_gets_a_gradient() {
    let device = Device::flex().autodiff();
    let model = lively(&small(), &device);
    let loss = model.loss(tokens(2, 16, 3, &device), tokens(2, 16, 5, &device));
    let gradients = take_gradients(&model, &mut loss.backward());
    for parameter in parameters(&model) {
        let gradient = gradients.get(&parameter.name).unwrap_or_else(|| panic!("{} has none", parameter.name));
        let largest = gradient.clone().abs().max().into_scalar::<f32>();
        assert!(largest > 0.0 && largest.is_finite(), "{}: {largest}", parameter.name);
    }
}

#[test]
fn windows_follow_the_pattern_and_the_last_layer_sees_all() {
    let windows =
        |pattern: &str, layers| GptConfig { window_pattern: pattern.to_owned(), n_layer: layers, ..small() }.windows();
    assert_eq!(windows("SSSL", 6), [8, 8, 8, 16, 8, 16]);
    assert_eq!(windows("S", 2), [8, 16]);
    assert_eq!(windows("L", 3), [16, 16, 16]);
}

#[test]
fn initial_values_depend_on_the_seed_alone() {
    let device = Device::flex();
    let values = |seed| {
        let model = Gpt::new(&small(), FloatDType::F32, seed, &device);
        parameters(&model)
            .into_iter()
            .map(|p| p.value.into_data().iter::<f32>().collect::<Vec<_>>())
            .collect::<Vec<_>>()
    };
    assert_eq!(values(7), values(7));
    assert_ne!(values(7), values(8));
}

#[test]
fn initial_values_have_the_stated_spread() {
    let config = GptConfig { vocab_size: 2000, n_embd: 64, ..small() };
    let model = Gpt::new(&config, FloatDType::F32, 3, &Device::flex());
    let spread = |name: &str| {
        let parameter = parameters(&model).into_iter().find(|p| p.name == name).expect(name);
        parameter.value.square().mean().sqrt().into_scalar::<f32>() as f64
    };
    let close = |name: &str, expected: f64| {
        let found = spread(name);
        assert!((found - expected).abs() < 0.05 * expected + 1e-12, "{name}: {found}, expected {expected}");
    };
    close("transformer.wte.weight", 1.0);
    close("lm_head.weight", 0.001);
    close("transformer.h.0.attn.c_q.weight", 1.0 / 8.0);
    close("transformer.h.1.mlp.c_fc.weight", 1.0 / 8.0);
    close("value_embeds.0.weight", 1.0 / 8.0);
    close("transformer.h.0.attn.c_proj.weight", 0.0);
    close("transformer.h.0.mlp.c_proj.weight", 0.0);
    close("transformer.h.0.attn.ve_gate.weight", 0.0);
    close("resid_lambdas", 1.0);
    close("x0_lambdas", 0.1);
}

#[test]
fn a_bf16_model_keeps_its_residual_stream_and_embeddings_in_bf16_and_its_loss_in_float32() {
    let device = Device::flex().autodiff();
    let model = Gpt::new(&small(), FloatDType::BF16, 1, &device);
    assert_eq!(model.hidden(tokens(1, 16, 3, &device)).dtype(), DType::BF16);
    for parameter in parameters(&model) {
        let embedding = parameter.name.contains("wte") || parameter.name.contains("value_embeds");
        let expected = if embedding { DType::BF16 } else { DType::F32 };
        assert_eq!(parameter.value.dtype(), expected, "{}", parameter.name);
    }
    let loss = model.loss(tokens(1, 16, 3, &device), tokens(1, 16, 5, &device));
    assert_eq!(loss.dtype(), DType::F32);
    let gradients = take_gradients(&model, &mut loss.backward());
    for parameter in parameters(&model) {
        assert_eq!(gradients[&parameter.name].dtype(), parameter.value.dtype(), "{}", parameter.name);
    }
}

#[test]
fn every_profile_has_a_legal_model_with_every_parameter_in_one_group() {
    for profile in [Profile::Halo, Profile::H100, Profile::Cpu, Profile::Ci] {
        let hyperparameters = Hyperparameters::for_profile(profile);
        let config = hyperparameters.architecture(32, 300).unwrap();
        assert_eq!(config.n_embd, (hyperparameters.depth * 64).next_multiple_of(hyperparameters.head_dim));
        let model = Gpt::new(&config, FloatDType::F32, 1, &Device::flex());
        let groups = hyperparameters.parameter_groups(&model);
        let grouped: Vec<String> = groups.into_iter().flat_map(|group| group.parameters).collect();
        let names: BTreeSet<String> = parameters(&model).into_iter().map(|p| p.name).collect();
        assert_eq!(grouped.len(), names.len());
        assert_eq!(grouped.into_iter().collect::<BTreeSet<_>>(), names);
    }
}

#[test]
fn schedules_have_the_original_values() {
    let h = Hyperparameters::for_profile(Profile::H100);
    let multipliers = [0.0, 0.3, 0.5, 0.75, 1.0].map(|progress| h.lr_multiplier(progress));
    assert_eq!(multipliers, [1.0, 1.0, 1.0, 0.5, 0.0]);
    assert_eq!([0, 150, 300, 1000].map(|step| (h.muon_momentum(step) * 1e6).round() / 1e6), [0.85, 0.9, 0.95, 0.95]);
    assert_eq!([0.0, 0.5, 1.0].map(|progress| h.weight_decay(progress)), [0.2, 0.1, 0.0]);
    let warm = Hyperparameters { warmup_ratio: 0.2, final_lr_fraction: 0.1, ..h };
    let multipliers = [0.0, 0.1, 0.2, 1.0].map(|progress| (warm.lr_multiplier(progress) * 1e6).round() / 1e6);
    assert_eq!(multipliers, [0.0, 0.5, 1.0, 0.1]);
}

#[test]
fn sizes_that_make_no_model_are_named() {
    let problem = |config: GptConfig| config.problem().unwrap_or_default();
    assert!(problem(GptConfig { n_kv_head: 3, ..small() }).contains("n_kv_head 3"));
    assert!(problem(GptConfig { n_head: 0, ..small() }).contains("at least 1"));
    assert!(problem(GptConfig { n_head: 3, n_kv_head: 1, ..small() }).contains("n_embd 32"));
    assert!(problem(GptConfig { n_embd: 16, ..small() }).contains("32 channels"));
    assert!(problem(GptConfig { window_pattern: "SXL".to_owned(), ..small() }).contains("SXL"));
    assert!(problem(GptConfig { window_pattern: String::new(), ..small() }).contains("window_pattern"));
    assert_eq!(problem(small()), "");

    let message = |hyperparameters: Hyperparameters| hyperparameters.architecture(32, 300).unwrap_err().to_string();
    let usual = Hyperparameters::for_profile(Profile::Cpu);
    assert!(message(Hyperparameters { head_dim: 0, ..usual.clone() }).contains("head_dim must be at least 1"));
    assert!(message(Hyperparameters { heads_per_kv_head: 0, ..usual.clone() }).contains("found 0"));
    assert!(message(Hyperparameters { heads_per_kv_head: 3, ..usual.clone() }).contains("divide the 4 heads"));
    assert!(message(Hyperparameters { window_pattern: "x".to_owned(), ..usual }).contains("letters S and L"));
}
