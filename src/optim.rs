//! Update rules and the optimizer that applies them. EDITABLE. Knows nothing of the model but names, shapes and groups.
//!
//! AdamW for embeddings, head and scalars; Muon for matrices, stacked by shape so that a step is a few large products.
//! In low precision every interpolation weight is rounded to the type of the tensor it multiplies: mixed-type steps have
//! broken compilers, and a rounding that depends on the backend would make runs incomparable.

use crate::ops;
use crate::parameters::{Parameter, parameters, take_gradient, with_values};
use anyhow::{Result, bail};
use burn::module::Module;
use burn::tensor::{DType, FloatDType, Tensor};
use std::collections::BTreeMap;

/// How the parameters of one group are updated.
#[derive(Clone, Debug, PartialEq)]
pub enum UpdateRule {
    /// See [`adamw_update`].
    AdamW { lr: f64, betas: (f64, f64), eps: f64, weight_decay: f64 },
    /// See [`muon_update`]; momentum and weight decay follow a schedule.
    Muon { lr: f64, beta2: f64 },
}

/// Parameters that share an update rule.
#[derive(Clone, Debug)]
pub struct ParameterGroup {
    /// What the group is called in messages.
    pub name: &'static str,
    /// Names of the parameters.
    pub parameters: Vec<String>,
    /// The rule they follow.
    pub rule: UpdateRule,
}

impl ParameterGroup {
    /// A group.
    pub fn new(name: &'static str, parameters: Vec<String>, rule: UpdateRule) -> Self {
        Self { name, parameters, rule }
    }
}

/// What the schedules say for one step.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// Factor of every group's learning rate.
    pub lr_multiplier: f64,
    /// Muon's momentum.
    pub muon_momentum: f64,
    /// Muon's weight decay.
    pub weight_decay: f64,
}

/// One unit of work of a step, with its state.
#[derive(Debug)]
enum Unit {
    AdamW { name: String, lr: f64, betas: (f64, f64), eps: f64, weight_decay: f64, moments: [Tensor<1>; 2] },
    Muon { names: Vec<String>, shape: [usize; 2], lr: f64, beta2: f64, momentum: Tensor<3>, variance: Tensor<3> },
}

/// AdamW and Muon over named parameters.
#[derive(Debug)]
pub struct MuonAdamW {
    units: Vec<Unit>,
    /// Optimizer steps taken.
    step: usize,
    /// Type of Muon's orthogonalisation.
    compute_type: FloatDType,
}

impl MuonAdamW {
    /// An optimizer with fresh state for the parameters of `model`.
    ///
    /// # Errors
    /// If a parameter is in no group or in two, a group names one that does not exist, or Muon is given a non-matrix.
    pub fn new<M: Module>(model: &M, groups: &[ParameterGroup], compute_type: FloatDType) -> Result<Self> {
        let mut unassigned: BTreeMap<String, Parameter> =
            parameters(model).into_iter().map(|parameter| (parameter.name.clone(), parameter)).collect();
        let mut units = Vec::new();
        for group in groups {
            let mut by_shape: BTreeMap<[usize; 2], Vec<Parameter>> = BTreeMap::new();
            for name in &group.parameters {
                let Some(parameter) = unassigned.remove(name) else {
                    let hint = "hint: see parameter_groups in src/model.rs";
                    match groups.iter().find(|other| other.name != group.name && other.parameters.contains(name)) {
                        Some(other) => bail!(
                            "parameter '{name}' is in two optimizer groups, '{}' and '{}', expected one; {hint}",
                            other.name,
                            group.name
                        ),
                        None => bail!(
                            "optimizer group '{}' names '{name}', which is no parameter or stands in it twice; {hint}",
                            group.name
                        ),
                    }
                };
                match group.rule {
                    UpdateRule::AdamW { lr, betas, eps, weight_decay } => {
                        let zeros = parameter.value.zeros_like();
                        let moments = [zeros.clone(), zeros];
                        units.push(Unit::AdamW { name: name.clone(), lr, betas, eps, weight_decay, moments });
                    }
                    UpdateRule::Muon { .. } => match parameter.shape[..] {
                        [rows, columns] => by_shape.entry([rows, columns]).or_default().push(parameter),
                        _ => bail!(
                            "Muon updates matrices, found '{name}' of shape {:?} in group '{}'; \
                             hint: give it an AdamW group in parameter_groups in src/model.rs",
                            parameter.shape,
                            group.name
                        ),
                    },
                }
            }
            for (shape @ [rows, columns], members) in by_shape {
                let UpdateRule::Muon { lr, beta2 } = group.rule else { unreachable!("only Muon stacks by shape") };
                let n = members.len();
                let options = (&members[0].value.device(), DType::F32);
                let variance = if rows >= columns { [n, rows, 1] } else { [n, 1, columns] };
                units.push(Unit::Muon {
                    shape,
                    lr,
                    beta2,
                    momentum: Tensor::zeros([n, rows, columns], options),
                    variance: Tensor::zeros(variance, options),
                    names: members.into_iter().map(|member| member.name).collect(),
                });
            }
        }
        if let Some(name) = unassigned.keys().next() {
            bail!("parameter '{name}' is in no optimizer group; hint: add it in parameter_groups in src/model.rs");
        }
        Ok(Self { units, step: 0, compute_type })
    }

    /// `model` after one step. `gradients` are flat and by name; a parameter without one is treated as having zeros,
    /// with a warning at the first step.
    pub fn step<M: Module>(&mut self, model: M, mut gradients: BTreeMap<String, Tensor<1>>, schedule: Schedule) -> M {
        self.step += 1;
        let mut values: BTreeMap<String, Tensor<1>> =
            parameters(&model).into_iter().map(|parameter| (parameter.name, parameter.value)).collect();
        for unit in &mut self.units {
            let mut operands = |name: &str| {
                let value = values[name].clone();
                let gradient = take_gradient(&mut gradients, name, &value, self.step == 1);
                (value, gradient)
            };
            match unit {
                Unit::AdamW { name, lr, betas, eps, weight_decay, moments } => {
                    let (value, gradient) = operands(name);
                    let settings = AdamW {
                        lr: *lr * schedule.lr_multiplier,
                        betas: *betas,
                        eps: *eps,
                        weight_decay: *weight_decay,
                        step: self.step,
                    };
                    let (value, updated) = adamw_update(value, gradient, moments.clone(), &settings);
                    *moments = updated;
                    values.insert(name.clone(), value);
                }
                Unit::Muon { names, shape: [rows, columns], lr, beta2, momentum, variance } => {
                    let (stack, gradient): (Vec<_>, Vec<_>) = names.iter().map(|name| operands(name)).unzip();
                    let stacked = |flat| Tensor::cat(flat, 0).reshape([names.len(), *rows, *columns]);
                    let settings = Muon {
                        lr: *lr * schedule.lr_multiplier,
                        momentum: schedule.muon_momentum,
                        weight_decay: schedule.weight_decay,
                        beta2: *beta2,
                        compute_type: self.compute_type,
                    };
                    let (stack, gradient): (Tensor<3>, Tensor<3>) = (stacked(stack), stacked(gradient));
                    let update = muon_update(stack, gradient, momentum.clone(), variance.clone(), &settings);
                    *momentum = update.momentum;
                    *variance = update.variance;
                    let flat = update.parameters.reshape([names.len() * *rows * *columns]);
                    for (name, value) in names.iter().zip(flat.chunk(names.len(), 0)) {
                        values.insert(name.clone(), value);
                    }
                }
            }
        }
        with_values(model, values)
    }
}

/// `value` rounded to the precision of `dtype`.
fn rounded(value: f64, dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => half::bf16::from_f64(value).to_f64(),
        DType::F16 => half::f16::from_f64(value).to_f64(),
        _ => value,
    }
}

/// `from + weight · (to − from)`, in the type of `from`.
fn lerp<const D: usize>(from: Tensor<D>, to: Tensor<D>, weight: f64) -> Tensor<D> {
    let weight = rounded(weight, from.dtype());
    let to = in_type(to, from.dtype());
    from.clone() + (to - from) * weight
}

fn in_type<const D: usize>(x: Tensor<D>, dtype: DType) -> Tensor<D> {
    if x.dtype() == dtype { x } else { x.cast(dtype) }
}

/// The scalars of one AdamW step.
#[derive(Clone, Copy, Debug)]
pub struct AdamW {
    /// Learning rate.
    pub lr: f64,
    /// Decay rates of the first and the second moment.
    pub betas: (f64, f64),
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Share of the parameter taken off, times the learning rate.
    pub weight_decay: f64,
    /// Steps taken with this one, from 1: corrects the moments' bias towards zero.
    pub step: usize,
}

/// One AdamW step: the parameter and its two moments afterwards, all in the types they came in.
///
/// Source: Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2.
///
/// # Shapes
/// `parameter`, `gradient` and both moments `[..]` alike.
pub fn adamw_update<const D: usize>(
    parameter: Tensor<D>,
    gradient: Tensor<D>,
    [mean, mean_square]: [Tensor<D>; 2],
    settings: &AdamW,
) -> (Tensor<D>, [Tensor<D>; 2]) {
    let AdamW { lr, betas: (beta1, beta2), eps, weight_decay, step } = *settings;
    let dtype = parameter.dtype();
    let gradient = in_type(gradient, dtype);
    let decayed = if weight_decay == 0.0 { parameter } else { parameter * rounded(1.0 - lr * weight_decay, dtype) };
    let mean = lerp(mean, gradient.clone(), 1.0 - beta1);
    let mean_square = lerp(mean_square, gradient.square(), 1.0 - beta2);
    let correction = |beta: f64| 1.0 - beta.powi(step as i32);
    let denominator = (mean_square.clone() / rounded(correction(beta2), mean_square.dtype())).sqrt() + eps;
    let step_size = rounded(-lr / correction(beta1), mean.dtype());
    (decayed + in_type(mean.clone() / denominator * step_size, dtype), [mean, mean_square])
}

/// The scalars of one Muon step.
#[derive(Clone, Copy, Debug)]
pub struct Muon {
    /// Learning rate for a square matrix; taller ones take √(rows / columns) times that.
    pub lr: f64,
    /// Decay rate of the momentum.
    pub momentum: f64,
    /// Share of the parameter taken off where it agrees with the update, times the learning rate.
    pub weight_decay: f64,
    /// Decay rate of the variance.
    pub beta2: f64,
    /// Type of the orthogonalisation.
    pub compute_type: FloatDType,
}

/// What [`muon_update`] leaves.
#[derive(Debug)]
pub struct MuonUpdate {
    /// The parameters after the step.
    pub parameters: Tensor<3>,
    /// The momentum after the step.
    pub momentum: Tensor<3>,
    /// The variance after the step.
    pub variance: Tensor<3>,
    /// The orthogonalised momentum before it was normalised and applied.
    pub orthogonal: Tensor<3>,
}

/// One Muon step on a stack of equal matrices: Nesterov momentum, orthogonalisation, variance normalisation along the
/// shorter axis (NorMuon), and weight decay only where it agrees with the update (cautious).
///
/// Sources: Jordan et al. 2024, "Muon"; Li et al. 2025, "NorMuon"; Liang et al. 2024, "Cautious Optimizers".
///
/// # Shapes
/// `parameters`, `gradients`, `momentum` `[n, rows, columns]`; `variance` `[n, rows, 1]`, or `[n, 1, columns]` where
/// there are more columns than rows.
pub fn muon_update(
    parameters: Tensor<3>,
    gradients: Tensor<3>,
    momentum: Tensor<3>,
    variance: Tensor<3>,
    settings: &Muon,
) -> MuonUpdate {
    let [_, rows, columns] = parameters.dims();
    let compute = DType::from(settings.compute_type);
    let lr = rounded(settings.lr * (rows as f64 / columns as f64).max(1.0).sqrt(), compute);
    let weight_decay = rounded(settings.weight_decay, compute);
    let momentum = lerp(momentum, gradients.clone(), 1.0 - settings.momentum);
    let orthogonal = orthogonalize(in_type(lerp(gradients, momentum.clone(), settings.momentum), compute));

    let (reduced_axis, reduced) = if rows >= columns { (2, columns) } else { (1, rows) };
    let mean_square = in_type(orthogonal.clone(), DType::F32).square().mean_dim(reduced_axis); // [n, rows, 1]
    let variance = lerp(variance, mean_square.clone(), 1.0 - settings.beta2);
    let step = variance.clone().clamp_min(1e-10).sqrt().recip();
    let norm = |square: Tensor<3>| (square.sum_dims(&[1, 2]) * reduced as f64).sqrt(); // [n, 1, 1]
    let before = norm(mean_square.clone());
    let after = norm(mean_square * step.clone().square());
    let scale = step * (before / after.clamp_min(1e-10));
    let update = orthogonal.clone() * in_type(scale, compute);

    let agrees = (in_type(update.clone(), DType::F32) * parameters.clone()).greater_equal_scalar(0.0);
    let decay = parameters.clone() * rounded(lr * weight_decay, compute);
    let decay = decay.zeros_like().mask_where(agrees, decay);
    let parameters = parameters - (in_type(update * lr, DType::F32) + decay);
    MuonUpdate { parameters, momentum, variance, orthogonal }
}

/// Coefficients of the five iterations of Amsel et al. 2025, "The Polar Express", for singular values in [1e-3, 1].
const POLAR_EXPRESS: [(f64, f64, f64); 5] = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
];

/// The nearest matrices with orthonormal rows or columns, approximately, in the type of `x`.
///
/// # Shapes
/// `x` `[n, rows, columns]`, to the same.
pub fn orthogonalize(x: Tensor<3>) -> Tensor<3> {
    ops::newton_schulz(x, &POLAR_EXPRESS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Profile;
    use crate::model::{Gpt, Hyperparameters};
    use burn::tensor::Device;

    #[test]
    fn moments_are_in_the_type_of_their_parameter_and_muons_state_is_in_float32() {
        let hyperparameters = Hyperparameters::for_profile(Profile::Ci);
        let config = hyperparameters.architecture(16, 50).unwrap();
        let model = Gpt::new(&config, FloatDType::BF16, 1, &Device::flex());
        let types: BTreeMap<_, _> = parameters(&model).into_iter().map(|p| (p.name, p.value.dtype())).collect();
        let groups = hyperparameters.parameter_groups(&model);
        let mut optimizer = MuonAdamW::new(&model, &groups, FloatDType::BF16).unwrap();
        // Gradients come in float32, whatever the parameter's type.
        let gradients =
            parameters(&model).into_iter().map(|p| (p.name, p.value.cast(DType::F32).ones_like())).collect();
        optimizer.step(model, gradients, Schedule { lr_multiplier: 1.0, muon_momentum: 0.9, weight_decay: 0.1 });
        for unit in &optimizer.units {
            match unit {
                Unit::AdamW { name, moments, .. } => {
                    assert_eq!(moments.each_ref().map(|moment| moment.dtype()), [types[name]; 2], "{name}");
                }
                Unit::Muon { names, momentum, variance, .. } => {
                    assert_eq!([momentum.dtype(), variance.dtype()], [DType::F32; 2], "{names:?}");
                }
            }
        }
    }
}
