//! `model-*`: logits, losses and gradients of one batch; `model-*-optim`: eight optimizer steps.

use super::tolerances::Tolerances;
use super::{Check, Goldens, mean_absolute_difference, reference_hyperparameters, relative_error, token_ids};
use crate::checkpoint::{TensorFile, load_weights};
use crate::model::{Gpt, GptConfig};
use crate::optim::{MuonAdamW, Schedule};
use crate::parameters::{Parameter, in_compute_type, parameters, take_gradients};
use crate::train::accumulate;
use anyhow::{Result, bail, ensure};
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData, activation};
use serde::Deserialize;
use std::collections::BTreeMap;

/// Rotary tables of a longer context than this would be larger than any golden.
const LONGEST_CONTEXT: usize = 1 << 20;

#[derive(Deserialize)]
struct Description {
    config: GptConfig,
    loss: f64,
    flops_per_token: usize,
    num_params: usize,
    window_sizes: Vec<usize>,
    optimizer_steps: Trajectories,
}

#[derive(Deserialize)]
struct Trajectories {
    float32: Vec<Step>,
    /// Muon's orthogonalisation in bfloat16, all else in float32.
    bfloat16: Vec<Step>,
}

#[derive(Deserialize)]
struct Step {
    losses: Vec<f64>,
    lr_multiplier: f64,
    muon_momentum: f64,
    weight_decay: f64,
}

pub(super) fn checks(goldens: &Goldens, name: &str, tolerances: &Tolerances) -> Result<Vec<Check>> {
    let description: Description = goldens.json(name)?;
    let mut checks = single_batch(goldens, name, &description, tolerances)?;
    let trajectory = format!("{name}-optim");
    if goldens.folder.join(format!("{trajectory}.safetensors")).exists() {
        checks.extend(optimizer_steps(goldens, &trajectory, &description, tolerances)?);
    }
    Ok(checks)
}

/// A model with the weights `param/*` of `file`, in the types that training keeps them in, with gradients.
pub(super) fn golden_model(goldens: &Goldens, config: &GptConfig, file: &TensorFile) -> Result<Gpt> {
    if let Some(problem) = config.problem() {
        bail!("these sizes make no model: {problem}");
    }
    // Before a model of wrong sizes takes all memory.
    let (v, c) = (config.vocab_size, config.n_embd);
    let shapes = [
        ("param/transformer.wte.weight", vec![v, c]),
        ("param/transformer.h.0.attn.c_q.weight", vec![c, c]),
        ("param/resid_lambdas", vec![config.n_layer]),
    ];
    for (name, expected) in shapes {
        let found = file.get(name)?.shape();
        ensure!(found[..] == expected[..], "'{name}' has the shape {found:?}, its sizes say {expected:?}");
    }
    ensure!(
        config.sequence_len <= LONGEST_CONTEXT,
        "sequence_len must be at most {LONGEST_CONTEXT}, found {}",
        config.sequence_len
    );
    let model = Gpt::new(config, goldens.compute_type, 0, &goldens.device.clone().autodiff());
    load_weights(model, &file.with_prefix("param/"))
}

fn single_batch(
    goldens: &Goldens,
    name: &str,
    description: &Description,
    tolerances: &Tolerances,
) -> Result<Vec<Check>> {
    let file = goldens.tensors(name)?;
    let model = golden_model(goldens, &description.config, &file)?;
    let mut checks = Vec::new();
    let mut check = |quantity: &str, error, tolerance| checks.push(Check::new(name, quantity, error, tolerance));

    let differs = |found: bool| if found { 1.0 } else { 0.0 };
    check("flops_per_token", differs(model.flops_per_token() != description.flops_per_token), 0.0);
    let count: usize = parameters(&model).iter().map(Parameter::elements).sum();
    check("num_params", differs(count != description.num_params), 0.0);
    check("window_sizes", differs(model.config().windows() != description.window_sizes), 0.0);

    let device = goldens.device.clone().autodiff();
    let GptConfig { sequence_len, vocab_size, .. } = description.config;
    let tokens = |quantity: &str| -> Result<Tensor<2, Int>> {
        let (shape, ids) = token_ids(&file, quantity, vocab_size)?;
        let [b, t] = shape[..] else { bail!("'{quantity}' must have two axes, found the shape {shape:?}") };
        Ok(int_tensor(ids, [b, t], &device))
    };
    let (input, target) = (tokens("input")?, tokens("target")?);
    let ([b, t], targets) = (input.dims(), target.dims());
    ensure!(
        t <= sequence_len && targets == [b, t],
        "'input' must be rows of at most {sequence_len} tokens and 'target' alike, found {:?} and {targets:?}",
        [b, t]
    );
    let working = in_compute_type(&model, goldens.compute_type);
    let hidden = working.hidden(input.clone());
    let [_, _, c] = hidden.dims();
    let logits = working.logits(hidden.reshape([b * t, c])).inner();
    let picked = target.clone().inner().reshape([b * t, 1]);
    let per_token = activation::log_softmax(logits.clone(), 1).gather(1, picked).neg();
    check("logits", relative_error(&logits.into_data(), file.get("logits")?)?, tolerances.logits);
    let error = relative_error(&per_token.into_data(), file.get("loss_per_token")?)?;
    check("loss_per_token", error, tolerances.loss_per_token);

    let loss = working.loss(input, target);
    let found = loss.clone().into_scalar::<f32>() as f64;
    check("loss", (found - description.loss).abs() / description.loss, tolerances.loss);
    let gradients = take_gradients(&working, &mut loss.backward());
    for parameter in parameters(&model) {
        let name = parameter.name;
        let golden = file.get(&format!("grad/{name}"))?;
        let error = match gradients.get(&name) {
            Some(gradient) => relative_error(&gradient.to_data(), golden)?,
            None => f64::INFINITY,
        };
        let is_scalars = parameter.shape.len() == 1;
        let tolerance = if is_scalars { tolerances.scalar_gradient } else { tolerances.gradient };
        check(&format!("grad {name}"), error, tolerance);
    }
    Ok(checks)
}

fn int_tensor(ids: Vec<u32>, shape: [usize; 2], device: &Device) -> Tensor<2, Int> {
    let ids: Vec<i32> = ids.into_iter().map(|id| id as i32).collect();
    Tensor::from_data(TensorData::new(ids, shape), device)
}

/// Names of the parameters whose gradient is nothing but what rounding leaves of a zero.
///
/// While the output projections are zero, as at the start, the per-layer scalars only rescale what the next
/// normalisation removes: their gradient is nought but rounding, about 1e-11 in float32. AdamW makes a full step of it in
/// a direction that no two programs share (the reference itself ends 0.1 to 0.5 away, in the mean over all parameters,
/// when its initial weights are perturbed by 1e-7).
pub(super) fn undetermined(model: &Gpt) -> Vec<String> {
    let all = parameters(model);
    let is_zero = |value: &Tensor<1>| value.clone().abs().max().into_scalar::<f32>() == 0.0;
    let mut projections = all.iter().filter(|parameter| parameter.name.ends_with(".c_proj.weight"));
    if projections.all(|projection| is_zero(&projection.value)) {
        all.into_iter().map(|parameter| parameter.name).filter(|name| name.ends_with("_lambdas")).collect()
    } else {
        Vec::new()
    }
}

/// Sets the `undetermined` gradients to nought, what exact arithmetic would give; the largest element that they had.
pub(super) fn set_to_zero(gradients: &mut BTreeMap<String, Tensor<1>>, undetermined: &[String]) -> f64 {
    let mut largest = 0.0;
    for (_, gradient) in gradients.iter_mut().filter(|(name, _)| undetermined.contains(name)) {
        largest = larger(largest, gradient.clone().abs().max().into_scalar::<f32>() as f64);
        *gradient = gradient.zeros_like();
    }
    largest
}

/// After a step with [`undetermined`] gradients their parameters are left out of the comparison, and the trajectory goes
/// on from the golden weights, with this program's own optimizer state.
fn optimizer_steps(
    goldens: &Goldens,
    name: &str,
    description: &Description,
    tolerances: &Tolerances,
) -> Result<Vec<Check>> {
    let file = goldens.tensors(name)?;
    let mut model = golden_model(goldens, &description.config, &file)?;
    let groups = reference_hyperparameters().parameter_groups(&model);
    let mut optimizer = MuonAdamW::new(&model, &groups, goldens.compute_type)?;
    let device = goldens.device.clone().autodiff();
    let GptConfig { sequence_len, vocab_size, .. } = description.config;
    let (shape, ids) = token_ids(&file, "tokens", vocab_size)?; // [steps, micro-batches, b, t + 1]
    let [steps, micro_batches, b, row] = shape[..] else {
        bail!("'tokens' must have four axes, found the shape {shape:?}");
    };
    let golden_steps = match goldens.product_type {
        FloatDType::BF16 => &description.optimizer_steps.bfloat16,
        _ => &description.optimizer_steps.float32,
    };
    let losses: Vec<usize> = golden_steps.iter().map(|step| step.losses.len()).collect();
    ensure!(
        losses.len() <= steps && losses.iter().all(|&losses| losses == micro_batches),
        "'tokens' has {steps} steps of {micro_batches} micro-batches, expected as many losses, found {losses:?}"
    );
    ensure!(
        (2..=sequence_len + 1).contains(&row),
        "'tokens' must be rows of 2 to {} tokens, found {row}",
        sequence_len + 1
    );
    let tokens = int_tensor(ids, [steps * micro_batches * b, row], &device);
    let mut checks = Vec::new();
    let (mut largest_loss_error, mut largest_vanishing) = (0.0, 0.0);
    for (step, golden) in golden_steps.iter().enumerate() {
        let undetermined = undetermined(&model);
        let working = in_compute_type(&model, goldens.compute_type);
        let mut gradients = BTreeMap::new();
        for (micro_batch, golden_loss) in golden.losses.iter().enumerate() {
            let first = (step * micro_batches + micro_batch) * b;
            let rows = tokens.clone().narrow(0, first, b);
            let (input, target) = (rows.clone().slice([0..b, 0..row - 1]), rows.slice([0..b, 1..row]));
            let loss = working.loss(input, target);
            let error = (loss.clone().into_scalar::<f32>() as f64 - golden_loss).abs();
            largest_loss_error = larger(largest_loss_error, error);
            let loss = loss / micro_batches as f64;
            accumulate(&mut gradients, take_gradients(&working, &mut loss.backward()));
        }
        let vanishing = set_to_zero(&mut gradients, &undetermined);
        largest_vanishing = larger(largest_vanishing, vanishing);
        let schedule = Schedule {
            lr_multiplier: golden.lr_multiplier,
            muon_momentum: golden.muon_momentum,
            weight_decay: golden.weight_decay,
        };
        model = optimizer.step(model, gradients, schedule);
        let after = format!("after{}/", step + 1);
        let golden_weights = file.with_prefix(&after);
        if golden_weights.is_empty() {
            continue;
        }
        let drift = if step == 0 { &tolerances.after_first_step } else { &tolerances.after_later_steps };
        let (mut total, mut elements) = (0.0, 0);
        for parameter in parameters(&model).into_iter().filter(|parameter| !undetermined.contains(&parameter.name)) {
            let Some(golden) = golden_weights.get(parameter.name.as_str()) else {
                bail!("there are tensors '{after}*', but none for '{}'", parameter.name);
            };
            let error = mean_absolute_difference(&parameter.value.to_data(), golden)?;
            total += error * golden.num_elements() as f64;
            elements += golden.num_elements();
            let tolerance = drift.of(&parameter.name);
            checks.push(Check::new(name, format!("{after}{}", parameter.name), error, tolerance));
        }
        checks.push(Check::new(name, format!("{after}all parameters"), total / elements as f64, drift.all));
        if !undetermined.is_empty() {
            model = load_weights(model, &golden_weights)?;
        }
    }
    let vanishing = "largest gradient that should be nought";
    checks.push(Check::new(name, vanishing, largest_vanishing, tolerances.vanishing_gradient));
    checks.push(Check::new(name, "largest loss error", largest_loss_error, tolerances.trajectory_loss));
    Ok(checks)
}

/// The larger of two errors; a NaN stays visible, which f64::max would hide.
pub(super) fn larger(a: f64, b: f64) -> f64 {
    if b > a || b.is_nan() { b } else { a }
}
