//! `muon*`: single Muon steps.

use super::{Check, Goldens, relative_error};
use crate::optim::{Muon, muon_update};
use anyhow::{Result, bail, ensure};
use burn::tensor::{DType, FloatDType, Tensor, TensorData};
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

pub(super) fn checks(goldens: &Goldens, name: &str) -> Result<Vec<Check>> {
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
        let update = muon_update(
            tensor("params", shape)?,
            tensor("grads", shape)?,
            tensor("momentum", shape)?,
            tensor("second_momentum", variance_shape)?,
            &Muon {
                lr: settings.lr,
                momentum: settings.momentum,
                weight_decay: settings.weight_decay,
                beta2: settings.beta2,
                compute_type: FloatDType::F32,
            },
        );
        let found: [(&str, TensorData); 4] = [
            ("orthogonal", update.orthogonal.into_data()),
            ("params_after", update.parameters.into_data()),
            ("momentum_after", update.momentum.into_data()),
            ("second_momentum_after", update.variance.into_data()),
        ];
        for (quantity, found) in found {
            let error = relative_error(&found, file.get(&format!("{case}/{quantity}"))?)?;
            checks.push(Check::new(name, format!("{case} {quantity}"), error, 1e-4));
        }
    }
    Ok(checks)
}
