//! `muon*`: single Muon steps.

use super::tolerances::Tolerances;
use super::{Check, Goldens, relative_error};
use crate::optim::{Muon, muon_update};
use anyhow::{Result, bail, ensure};
use burn::tensor::{DType, Tensor, TensorData};
use serde::Deserialize;
use std::collections::BTreeMap;

#[derive(Deserialize)]
struct Case {
    lr: f64,
    momentum: f64,
    weight_decay: f64,
    beta2: f64,
    ns_steps: usize,
}

pub(super) fn checks(goldens: &Goldens, name: &str, tolerances: &Tolerances) -> Result<Vec<Check>> {
    let cases: BTreeMap<String, Case> = goldens.json(name)?;
    let file = goldens.tensors(name)?;
    let mut checks = Vec::new();
    for (case, settings) in cases {
        if settings.ns_steps != 5 {
            bail!("case '{case}' has {} orthogonalisation steps, this program takes 5", settings.ns_steps);
        }
        let shape = match file.get(&format!("{case}/params"))?.shape()[..] {
            [n, rows, columns] if n * rows * columns > 0 => [n, rows, columns],
            ref other => bail!("'{case}/params' must have three axes, none empty, found the shape {other:?}"),
        };
        let [n, rows, columns] = shape;
        let variance_shape = if rows >= columns { [n, rows, 1] } else { [n, 1, columns] };
        let tensor = |quantity: &str, expected: [usize; 3]| -> Result<Tensor<3>> {
            let data = file.get(&format!("{case}/{quantity}"))?;
            let found = data.shape();
            ensure!(found[..] == expected, "'{case}/{quantity}' must have the shape {expected:?}, found {found:?}");
            Ok(Tensor::from_data(data.clone(), (&goldens.device, DType::F32)))
        };
        let before = tensor("params", shape)?;
        let update = muon_update(
            before.clone(),
            tensor("grads", shape)?,
            tensor("momentum", shape)?,
            tensor("second_momentum", variance_shape)?,
            &Muon {
                lr: settings.lr,
                momentum: settings.momentum,
                weight_decay: settings.weight_decay,
                beta2: settings.beta2,
                compute_type: goldens.compute_type,
            },
        );
        let golden = |quantity: &str| file.get(&format!("{case}/{quantity}"));
        let mut check = |quantity: &str, found: TensorData, golden: &TensorData, tolerance| -> Result<()> {
            let error = relative_error(&found, golden)?;
            checks.push(Check::new(name, format!("{case} {quantity}"), error, tolerance));
            Ok(())
        };
        check("orthogonal", update.orthogonal.into_data(), golden("orthogonal")?, tolerances.muon_orthogonal)?;
        // A step is a few hundredths of the parameters: compared with them, a wrong one would hardly show.
        let step = update.parameters - before.clone();
        let golden_step = (tensor("params_after", shape)? - before).into_data();
        check("params_after", step.into_data(), &golden_step, tolerances.muon_parameters)?;
        check("momentum_after", update.momentum.into_data(), golden("momentum_after")?, tolerances.muon_momentum)?;
        let variance = golden("second_momentum_after")?;
        check("second_momentum_after", update.variance.into_data(), variance, tolerances.muon_variance)?;
    }
    Ok(checks)
}
