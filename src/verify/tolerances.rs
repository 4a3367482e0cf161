//! How far off each quantity may be, in each type of matrix products.

use anyhow::{Result, bail};
use burn::tensor::FloatDType;

/// How far off each quantity may be; where nothing else is said, by ‖a − b‖ / ‖b‖.
#[derive(Debug)]
pub(super) struct Tolerances {
    pub(super) logits: f64,
    pub(super) loss_per_token: f64,
    /// Mean loss of a batch, as a share of it.
    pub(super) loss: f64,
    /// Gradient of a matrix.
    pub(super) gradient: f64,
    /// Gradient of the per-layer scalars: sums over a whole batch in which much cancels.
    pub(super) scalar_gradient: f64,
    /// Largest gradient that should be nought, absolute.
    pub(super) vanishing_gradient: f64,
    pub(super) after_first_step: Drift,
    pub(super) after_later_steps: Drift,
    /// Largest difference of a loss on an optimizer trajectory.
    pub(super) trajectory_loss: f64,
    pub(super) muon_orthogonal: f64,
    /// Parameters after a Muon step, as a share of the step.
    pub(super) muon_parameters: f64,
    pub(super) muon_momentum: f64,
    pub(super) muon_variance: f64,
    /// Differences of a run's losses.
    pub(super) run_first_loss: f64,
    pub(super) run_largest_loss: f64,
    pub(super) run_mean_loss: f64,
    /// Differences of bits per byte.
    pub(super) bpb_at_init: f64,
    pub(super) bpb_final: f64,
    pub(super) bpb_between_batches: f64,
}

/// Mean absolute differences of parameters.
#[derive(Debug)]
pub(super) struct Drift {
    pub(super) embedding: f64,
    pub(super) scalars: f64,
    pub(super) matrix: f64,
    pub(super) all: f64,
}

impl Drift {
    /// The tolerance for one parameter by name.
    pub(super) fn of(&self, name: &str) -> f64 {
        if name.starts_with("transformer.wte.") || name.starts_with("value_embeds.") {
            self.embedding
        } else if name.ends_with("_lambdas") {
            self.scalars
        } else {
            self.matrix
        }
    }
}

/// The goldens' own type: what is left are sums taken in another order, and that training amplifies them.
const FLOAT32: Tolerances = Tolerances {
    logits: 1e-4,
    loss_per_token: 1e-4,
    loss: 1e-4,
    gradient: 1e-4,
    scalar_gradient: 1e-4,
    vanishing_gradient: 1e-9,
    // One parameter may be further off than all in the mean: embeddings move by whole units a step.
    after_first_step: Drift { embedding: 1e-3, scalars: 1e-3, matrix: 1e-3, all: 1e-4 },
    after_later_steps: Drift { embedding: 1e-3, scalars: 1e-3, matrix: 1e-3, all: 1e-4 },
    trajectory_loss: 1e-3,
    muon_orthogonal: 1e-4,
    muon_parameters: 1e-3,
    muon_momentum: 1e-4,
    muon_variance: 1e-4,
    run_first_loss: 1e-5,
    run_largest_loss: 3e-2,
    run_mean_loss: 1e-2,
    bpb_at_init: 1e-4,
    bpb_final: 1e-2,
    bpb_between_batches: 1e-6,
};

/// bfloat16 against float32 goldens: about twice what PyTorch itself is off by in bfloat16.
///
/// bfloat16 has 8 significant bits, so each value is off by up to 4e-3. The independent implementation that the goldens
/// are from, with embeddings, rotary tables, activations and products in bfloat16, was compared with itself in float32 on
/// 23 random models of 1 to 6 layers (PyTorch 2.11 on a CPU, 2026-11-30). Largest differences: logits 1.2e-2, loss of
/// each token 1.1e-3, loss 9e-5, gradients of matrices 2.5e-2, of scalars 6.5e-2 (but 1.0 for one model of a single layer,
/// whose scalars' gradients all but cancel), those that should be nought 4e-6; after the first optimizer step embeddings
/// 7.5e-3, matrices 2.3e-4, all 9e-4. Muon: orthogonalised update 3e-2 to 0.13, step 3e-2 to 0.12, variance 0.19.
///
/// In the seven further steps of a trajectory on random tokens AdamW makes whole steps of the signs of small gradients:
/// there PyTorch's losses were off by 2.2e-2, matrices by 9e-3, all parameters by 0.33, and scalars by 0.3. These
/// tolerances find what is broken, not what is slightly wrong; that the first step and the single batch do.
const BFLOAT16: Tolerances = Tolerances {
    logits: 2e-2,
    loss_per_token: 2e-3,
    loss: 2e-4,
    gradient: 4e-2,
    scalar_gradient: 2e-1,
    vanishing_gradient: 5e-5,
    after_first_step: Drift { embedding: 2e-2, scalars: 1e-3, matrix: 5e-4, all: 2e-3 },
    after_later_steps: Drift { embedding: 2e0, scalars: 2e0, matrix: 3e-2, all: 5e-1 },
    trajectory_loss: 1e-1,
    muon_orthogonal: 2e-1,
    muon_parameters: 2e-1,
    muon_momentum: 1e-4,
    muon_variance: 3e-1,
    run_first_loss: 1e-4,
    run_largest_loss: 6e-2,
    run_mean_loss: 2e-2,
    bpb_at_init: 1e-4,
    bpb_final: 2e-2,
    bpb_between_batches: 1e-6,
};

impl Tolerances {
    /// Those for matrix products in `product_type`; float16 has more significant bits than bfloat16.
    ///
    /// # Errors
    /// If there are none for it.
    pub(super) fn of(product_type: FloatDType) -> Result<&'static Self> {
        match product_type {
            FloatDType::F32 => Ok(&FLOAT32),
            FloatDType::BF16 | FloatDType::F16 => Ok(&BFLOAT16),
            other => bail!(
                "goldens are compared in float32, bfloat16 and float16, found the compute type {other:?}; hint: pass one of these"
            ),
        }
    }
}
