//! What is kept and computed in bfloat16 and what in float32, on every backend for CPUs that is compiled in.

use crate::model::{lively, small};
use crate::training::rows;
use autoresearch::config::Profile;
use autoresearch::data::packing::Passes;
use autoresearch::device::ComputeDevice;
use autoresearch::device::compute_type::ComputeType;
use autoresearch::model::{Gpt, Hyperparameters};
use autoresearch::optim::{AdamW, Muon, MuonAdamW, adamw_update, muon_update};
use autoresearch::parameters::{in_compute_type, parameters, take_gradients, with_values};
use autoresearch::train::{BatchPlan, Limit, MonotonicClock, Training};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use half::bf16;

/// Every backend for CPUs.
pub fn cpus() -> Vec<Device> {
    let names = if cfg!(feature = "tch") { &["cpu", "libtorch:cpu"][..] } else { &["cpu"] };
    names.iter().map(|name| ComputeDevice::select(name, ComputeType::Auto).unwrap().device).collect()
}

fn tokens(device: &Device, step: usize) -> Tensor<2, Int> {
    let ids: Vec<i32> = (0..32).map(|i| ((i * step + i / 7) % 50) as i32).collect();
    Tensor::from_data(TensorData::new(ids, [2, 16]), device)
}

fn is_embedding(name: &str) -> bool {
    name.starts_with("transformer.wte.") || name.starts_with("value_embeds.")
}

/// What training keeps of a model whose matrix products are in `compute`.
fn assert_kept_types(model: &Gpt, compute: DType) {
    for parameter in parameters(model) {
        let expected = if is_embedding(&parameter.name) { compute } else { DType::F32 };
        assert_eq!(parameter.value.dtype(), expected, "{}", parameter.name);
    }
}

// The model.

#[test]
fn every_block_leaves_the_residual_stream_in_the_compute_type_and_logits_and_loss_are_float32() {
    for device in cpus() {
        for compute in [FloatDType::F32, FloatDType::BF16] {
            let device = device.clone().autodiff();
            let master = Gpt::new(&small(), compute, 1, &device);
            // Products cast the float32 masters themselves where nobody has done it before.
            for model in [in_compute_type(&master, compute), master] {
                let mut blocks = Vec::new();
                let hidden = model.hidden_with(tokens(&device, 3), |x| blocks.push(x.dtype()));
                assert_eq!(blocks, vec![DType::from(compute); small().n_layer], "{device:?}");
                assert_eq!(hidden.dtype(), DType::from(compute));
                assert_eq!(model.logits(hidden.reshape([32, small().n_embd])).dtype(), DType::F32);
                let loss = model.loss(tokens(&device, 3), tokens(&device, 5));
                assert_eq!(loss.dtype(), DType::F32);
                let gradients = take_gradients(&model, &mut loss.backward());
                for parameter in parameters(&model) {
                    assert_eq!(gradients[&parameter.name].dtype(), parameter.value.dtype(), "{}", parameter.name);
                }
            }
        }
    }
}

// Working copies.

#[test]
fn working_copies_are_of_exactly_the_float32_matrices() {
    for device in cpus() {
        let model = Gpt::new(&small(), FloatDType::BF16, 1, &device.autodiff());
        for parameter in parameters(&in_compute_type(&model, FloatDType::BF16)) {
            let expected = if parameter.name.ends_with("_lambdas") { DType::F32 } else { DType::BF16 };
            assert_eq!(parameter.value.dtype(), expected, "{}", parameter.name);
        }
        // The masters are as they were.
        assert_kept_types(&model, DType::BF16);
    }
}

#[test]
fn parameters_of_the_right_type_are_not_copied_but_shared() {
    // A shared parameter is the same leaf of the autodiff graph: its gradient is found under the model's own.
    for device in cpus() {
        let device = device.autodiff();
        let found_under_the_masters = |compute| {
            let model = Gpt::new(&small(), compute, 1, &device);
            let loss = in_compute_type(&model, compute).loss(tokens(&device, 3), tokens(&device, 5));
            let found = take_gradients(&model, &mut loss.backward()).into_keys().collect::<Vec<_>>();
            let mut names: Vec<String> = parameters(&model).into_iter().map(|parameter| parameter.name).collect();
            names.sort();
            (found, names)
        };
        let (found, names) = found_under_the_masters(FloatDType::F32);
        assert_eq!(found, names);
        let (found, names) = found_under_the_masters(FloatDType::BF16);
        let shared = |name: &String| is_embedding(name) || name.ends_with("_lambdas");
        assert_eq!(found, names.into_iter().filter(shared).collect::<Vec<_>>());
    }
}

#[test]
fn working_copies_are_trained_where_their_masters_are() {
    struct Trained(Vec<bool>);
    impl ModuleVisitor for Trained {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push(param.val().is_require_grad());
        }
    }
    let trained = |model: &Gpt| {
        let mut visitor = Trained(Vec::new());
        model.visit(&mut visitor);
        visitor.0
    };
    for device in cpus() {
        let model = lively(&small(), &device.autodiff());
        assert!(trained(&in_compute_type(&model, FloatDType::BF16)).into_iter().all(|is_trained| is_trained));
        let frozen = model.no_grad();
        assert!(!trained(&in_compute_type(&frozen, FloatDType::BF16)).into_iter().any(|is_trained| is_trained));
    }
}

// Optimizer steps of mixed types, against the same computation by hand.

const TYPES: [DType; 2] = [DType::F32, DType::BF16];

/// `value` as an element of type `dtype` holds it.
fn held(value: f32, dtype: DType) -> f32 {
    if dtype == DType::BF16 { bf16::from_f32(value).to_f32() } else { value }
}

/// from + weight · (to − from), every result and the weight held in `dtype`.
fn lerp_by_hand(from: f32, to: f32, weight: f64, dtype: DType) -> f32 {
    let held = |value| held(value, dtype);
    held(from + held(held(held(to) - from) * held(weight as f32)))
}

/// Values of both signs and many sizes, held in `dtype`.
fn wave(n: usize, phase: f32, dtype: DType) -> Vec<f32> {
    (0..n).map(|i| held((i as f32 * 0.7 + phase).sin() * 10f32.powi(i as i32 % 4 - 2), dtype)).collect()
}

fn tensor(values: &[f32], dtype: DType, device: &Device) -> Tensor<1> {
    Tensor::from_data(TensorData::new(values.to_vec(), [values.len()]), (device, dtype))
}

/// The elements are those of `expected`: in bfloat16 all bits, in float32 but for the order of two roundings.
fn assert_elements<const D: usize>(found: Tensor<D>, expected: &[f32], dtype: DType, what: &str) {
    assert_eq!(found.dtype(), dtype, "{what}");
    let largest = if dtype == DType::BF16 { 0.0 } else { 2e-6 };
    let found = found.into_data().convert::<f32>().iter::<f32>().collect::<Vec<_>>();
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= largest * expected.abs(), "{what}: {found}, expected {expected}");
    }
}

fn type_combinations() -> impl Iterator<Item = [DType; 3]> {
    TYPES.into_iter().flat_map(|a| TYPES.into_iter().flat_map(move |b| TYPES.map(|c| [a, b, c])))
}

#[test]
fn adamw_steps_of_mixed_types_equal_the_computation_in_the_destinations_type() {
    const N: usize = 24;
    let settings = AdamW { lr: 0.3, betas: (0.8, 0.95), eps: 1e-10, weight_decay: 0.1, step: 3 };
    for device in cpus() {
        for [parameter_type, gradient_type, moment_type] in type_combinations() {
            let what = format!("{device:?}: {parameter_type:?}, gradient {gradient_type:?}, moments {moment_type:?}");
            let (parameter, gradient) = (wave(N, 0.1, parameter_type), wave(N, 0.5, gradient_type));
            let mean = wave(N, 0.9, moment_type);
            let mean_square: Vec<f32> =
                wave(N, 1.3, moment_type).into_iter().map(|x| held(x * x + 1e-3, moment_type)).collect();
            let (found, [found_mean, found_mean_square]) = adamw_update(
                tensor(&parameter, parameter_type, &device),
                tensor(&gradient, gradient_type, &device),
                [tensor(&mean, moment_type, &device), tensor(&mean_square, moment_type, &device)],
                &settings,
            );
            let in_parameter = |value| held(value, parameter_type);
            let in_moment = |value| held(value, moment_type);
            let gradient: Vec<f32> = gradient.into_iter().map(in_parameter).collect();
            let correction = |beta: f64| 1.0 - beta.powi(3);
            let (mut expected, mut means, mut squares) = (Vec::new(), Vec::new(), Vec::new());
            for i in 0..N {
                let m = lerp_by_hand(mean[i], gradient[i], 1.0 - 0.8, moment_type);
                let square = in_parameter(gradient[i] * gradient[i]);
                let v = lerp_by_hand(mean_square[i], square, 1.0 - 0.95, moment_type);
                let root = in_moment(in_moment(v / in_moment(correction(0.95) as f32)).sqrt());
                let step =
                    in_moment(in_moment(m / in_moment(root + 1e-10)) * in_moment((-0.3 / correction(0.8)) as f32));
                let decayed = in_parameter(parameter[i] * in_parameter((1.0 - 0.3 * 0.1) as f32));
                expected.push(in_parameter(decayed + in_parameter(step)));
                means.push(m);
                squares.push(v);
            }
            assert_elements(found_mean, &means, moment_type, &format!("{what}: mean"));
            assert_elements(found_mean_square, &squares, moment_type, &format!("{what}: mean square"));
            assert_elements(found, &expected, parameter_type, &format!("{what}: parameter"));
        }
    }
}

#[test]
fn muon_steps_of_mixed_types_keep_every_tensor_in_its_type() {
    const SHAPE: [usize; 3] = [2, 8, 4];
    const N: usize = 64;
    for device in cpus() {
        let stack = |values: &[f32], dtype| tensor(values, dtype, &device).reshape(SHAPE);
        let step = |gradient_type, momentum_type, compute_type| {
            muon_update(
                stack(&wave(N, 0.1, DType::F32), DType::F32),
                stack(&wave(N, 0.5, DType::BF16), gradient_type),
                stack(&wave(N, 0.9, DType::BF16), momentum_type),
                Tensor::full([2, 8, 1], 0.1, (&device, DType::F32)),
                &Muon { lr: 0.3, momentum: 0.85, weight_decay: 0.1, beta2: 0.95, compute_type },
            )
        };
        // The same numbers in float32 throughout: what is left is bf16's rounding.
        let exact = step(DType::F32, DType::F32, FloatDType::F32);
        let before = wave(N, 0.1, DType::F32);
        let change =
            |after: Tensor<3>| (after - stack(&before, DType::F32)).into_data().iter::<f32>().collect::<Vec<_>>();
        let exact_change = change(exact.parameters);
        let size = exact_change.iter().map(|x| x * x).sum::<f32>().sqrt();
        for [gradient_type, momentum_type, compute] in type_combinations() {
            let what =
                format!("{device:?}: gradient {gradient_type:?}, momentum {momentum_type:?}, compute {compute:?}");
            let update = step(gradient_type, momentum_type, compute.into());
            let (gradient, momentum) = (wave(N, 0.5, DType::BF16), wave(N, 0.9, DType::BF16));
            let expected: Vec<f32> =
                gradient.iter().zip(&momentum).map(|(&g, &m)| lerp_by_hand(m, g, 1.0 - 0.85, momentum_type)).collect();
            assert_elements(update.momentum, &expected, momentum_type, &format!("{what}: momentum"));
            assert_eq!(update.orthogonal.dtype(), compute, "{what}");
            assert_eq!([update.parameters.dtype(), update.variance.dtype()], [DType::F32; 2], "{what}");
            let found = change(update.parameters);
            let error = found.iter().zip(&exact_change).map(|(a, b)| (a - b) * (a - b)).sum::<f32>().sqrt() / size;
            // PyTorch is off by up to 0.13 on small matrices, see src/verify/tolerances.rs.
            assert!(error < 0.2, "{what}: the step is off by {error}");
        }
    }
}

// Training.

/// `model` with output projections that are not zero: the scalars' first gradients are nought else, and what rounding makes
/// of them decides on their first step.
fn with_output_projections(model: Gpt) -> Gpt {
    let projections = parameters(&model).into_iter().filter(|parameter| parameter.name.ends_with("c_proj.weight"));
    let values = projections.map(|parameter| {
        let elements: Vec<f32> = (0..parameter.value.dims()[0]).map(|i| 0.05 * (i as f32 * 1.7).sin()).collect();
        let value = Tensor::<1>::from_data(elements.as_slice(), &parameter.value.device());
        (parameter.name, value)
    });
    let values = values.collect();
    with_values(model, values)
}

fn train(device: &Device, compute_type: FloatDType, steps: usize) -> (Gpt, Vec<f64>) {
    // Calmer than usual: what is to be seen is rounding, not what training makes of it.
    let usual = Hyperparameters::for_profile(Profile::Cpu);
    let hyperparameters = Hyperparameters {
        device_batch_size: 4,
        total_batch_size: 128,
        embedding_lr: 0.06,
        scalar_lr: 0.05,
        matrix_lr: 0.01,
        ..usual
    };
    let model = with_output_projections(Gpt::new(&small(), compute_type, 1, &device.clone().autodiff()));
    let groups = hyperparameters.parameter_groups(&model);
    let plan = BatchPlan::new(&hyperparameters, small().sequence_len).unwrap();
    let mut losses = Vec::new();
    let outcome = Training {
        optimizer: &mut MuonAdamW::new(&model, &groups, compute_type).unwrap(),
        model,
        rows: &mut rows(plan.device_batch_size, Passes::Endless),
        hyperparameters: &hyperparameters,
        plan,
        limit: Limit::Steps(steps),
        device,
        compute_type,
        clock: &MonotonicClock::start(),
    }
    .run(|step| {
        losses.push(step.loss);
        Ok(())
    });
    (outcome.unwrap().model, losses)
}

#[test]
fn training_in_bf16_follows_training_in_float32_and_keeps_its_masters_in_float32() {
    const STEPS: usize = 30;
    for device in cpus() {
        let (model, exact) = train(&device, FloatDType::F32, STEPS);
        assert_kept_types(&model, DType::F32);
        let (model, low) = train(&device, FloatDType::BF16, STEPS);
        assert_kept_types(&model, DType::BF16);
        assert!(exact[STEPS - 1] < exact[0] - 1.0, "{device:?}: {exact:?}");
        let differences: Vec<f64> = exact.iter().zip(&low).map(|(a, b)| (a - b).abs()).collect();
        let mean = differences.iter().sum::<f64>() / STEPS as f64;
        assert!(differences[0] < 1e-3, "{device:?}: first losses {} and {}", exact[0], low[0]);
        assert!(mean < 5e-3, "{device:?}: mean difference {mean}, losses {low:?}, expected {exact:?}");
    }
}
