//! The model, from hyperparameters to schedules. EDITABLE: this file is what an experiment changes.
//!
//! Shape legend: b batch, t time, c channels, h query heads, g key/value heads, d head dim, v vocabulary, l layer, n = b·t.

use crate::config::Profile;
use crate::ops;
use crate::optim::{ParameterGroup, UpdateRule};
use crate::parameters::{Parameter, parameters};
use anyhow::{Result, bail, ensure};
use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Distribution, FloatDType, Int, Tensor, TensorData};
use chacha20::ChaCha8Rng;
use rand::SeedableRng;
use serde::{Deserialize, Serialize};

// ---------------------------------------------------------------------------------------------------------------------
// Hyperparameters
// ---------------------------------------------------------------------------------------------------------------------

/// Everything an experiment may turn, one value for each machine profile.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hyperparameters {
    /// Number of layers, the one dial: the width follows.
    pub depth: usize,
    /// Width = depth · aspect_ratio, rounded up to a multiple of the head dim.
    pub aspect_ratio: usize,
    /// Channels of one attention head.
    pub head_dim: usize,
    /// Query heads that share one key/value head.
    pub heads_per_kv_head: usize,
    /// One letter a layer, repeated: S sees half the context back, L all of it; the last layer is always L.
    pub window_pattern: String,
    /// Rows in one forward pass.
    pub device_batch_size: usize,
    /// Tokens in one optimizer step; gradients accumulate over as many forward passes as that takes.
    pub total_batch_size: usize,
    /// AdamW learning rate of token and value embeddings, at width 768.
    pub embedding_lr: f64,
    /// AdamW learning rate of the output head, at width 768.
    pub unembedding_lr: f64,
    /// Muon learning rate of the matrices.
    pub matrix_lr: f64,
    /// AdamW learning rate of the per-layer scalars.
    pub scalar_lr: f64,
    /// Muon's cautious weight decay at the start; it falls linearly to zero.
    pub weight_decay: f64,
    /// AdamW's decay rates of the first and second moment.
    pub adam_betas: (f64, f64),
    /// Share of the budget in which the learning rate rises from zero.
    pub warmup_ratio: f64,
    /// Share of the budget in which it falls to `final_lr_fraction`.
    pub warmdown_ratio: f64,
    /// Learning rate at the end as a share of the full one.
    pub final_lr_fraction: f64,
}

impl Hyperparameters {
    /// The values for one machine profile.
    pub fn for_profile(profile: Profile) -> Self {
        let h100 = Self {
            depth: 8,
            aspect_ratio: 64,
            head_dim: 128,
            heads_per_kv_head: 1,
            window_pattern: "SSSL".to_owned(),
            device_batch_size: 128,
            total_batch_size: 1 << 19,
            embedding_lr: 0.6,
            unembedding_lr: 0.004,
            matrix_lr: 0.04,
            scalar_lr: 0.5,
            weight_decay: 0.2,
            adam_betas: (0.8, 0.95),
            warmup_ratio: 0.0,
            warmdown_ratio: 0.5,
            final_lr_fraction: 0.0,
        };
        match profile {
            Profile::H100 => h100,
            Profile::Halo => Self { device_batch_size: 16, total_batch_size: 1 << 17, ..h100 },
            Profile::Cpu => Self { depth: 4, head_dim: 64, device_batch_size: 8, total_batch_size: 1 << 11, ..h100 },
            Profile::Ci => Self { depth: 2, head_dim: 64, device_batch_size: 2, total_batch_size: 1 << 8, ..h100 },
        }
    }

    /// The architecture for a sequence length and a vocabulary.
    ///
    /// # Errors
    /// If the heads cannot be made, or [`GptConfig::problem`] finds something.
    pub fn architecture(&self, sequence_len: usize, vocab_size: usize) -> Result<GptConfig> {
        let hint = "hint: see Hyperparameters in src/model.rs";
        ensure!(self.head_dim > 0, "head_dim must be at least 1, found 0; {hint}");
        let n_embd = (self.depth * self.aspect_ratio).next_multiple_of(self.head_dim);
        let n_head = n_embd / self.head_dim;
        let group = self.heads_per_kv_head;
        ensure!(
            group > 0 && n_head.is_multiple_of(group),
            "heads_per_kv_head must divide the {n_head} heads, found {group}; {hint}"
        );
        let config = GptConfig {
            sequence_len,
            vocab_size,
            n_layer: self.depth,
            n_head,
            n_kv_head: n_head / group,
            n_embd,
            window_pattern: self.window_pattern.clone(),
        };
        match config.problem() {
            Some(problem) => bail!("the model cannot be made: {problem}; {hint}"),
            None => Ok(config),
        }
    }
}

/// The sizes that fix a model's parameters and what its layers see.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GptConfig {
    /// Context in tokens (t).
    pub sequence_len: usize,
    /// Token ids (v).
    pub vocab_size: usize,
    /// Layers (l).
    pub n_layer: usize,
    /// Query heads (h).
    pub n_head: usize,
    /// Key/value heads (g).
    pub n_kv_head: usize,
    /// Channels (c).
    pub n_embd: usize,
    /// See [`Hyperparameters::window_pattern`].
    pub window_pattern: String,
}

impl GptConfig {
    /// Channels of one head (d).
    pub fn head_dim(&self) -> usize {
        self.n_embd / self.n_head
    }

    /// How many tokens back each layer sees.
    pub fn windows(&self) -> Vec<usize> {
        let letters: Vec<char> = self.window_pattern.chars().collect();
        let long = |layer: usize| layer == self.n_layer - 1 || letters[layer % letters.len()] == 'L';
        let tokens = |layer| if long(layer) { self.sequence_len } else { self.sequence_len / 2 };
        (0..self.n_layer).map(tokens).collect()
    }

    /// Every second layer, ending with the last, adds value embeddings.
    fn has_value_embedding(&self, layer: usize) -> bool {
        layer % 2 == (self.n_layer - 1) % 2
    }

    /// Says what is wrong with these sizes, if anything is.
    pub fn problem(&self) -> Option<String> {
        let Self { n_embd, n_head, n_kv_head, .. } = *self;
        let sizes = [self.sequence_len, self.vocab_size, self.n_layer, n_head, n_kv_head, n_embd];
        if sizes.contains(&0) {
            Some(format!("every size must be at least 1, found {sizes:?}"))
        } else if n_embd % n_head != 0 || !self.head_dim().is_multiple_of(2) {
            Some(format!("n_embd {n_embd} must be n_head {n_head} times an even head dim"))
        } else if n_head % n_kv_head != 0 {
            Some(format!("n_head {n_head} must be a multiple of n_kv_head {n_kv_head}"))
        } else if n_embd < GATE_CHANNELS {
            Some(format!("n_embd {n_embd} must be at least the {GATE_CHANNELS} channels that the value gate reads"))
        } else if self.window_pattern.is_empty() || self.window_pattern.contains(|letter| !"SL".contains(letter)) {
            Some(format!("window_pattern must be letters S and L, found {:?}", self.window_pattern))
        } else {
            None
        }
    }
}

/// Logits z become SOFTCAP·tanh(z / SOFTCAP).
const SOFTCAP: f64 = 15.0;
/// Channels of the layer input from which a value embedding's gate is computed.
const GATE_CHANNELS: usize = 32;
/// Base of the rotary wavelengths.
const ROTARY_BASE: f32 = 10_000.0;

// ---------------------------------------------------------------------------------------------------------------------
// Blocks
// ---------------------------------------------------------------------------------------------------------------------

/// A matrix without bias, kept in float32 and cast to the type of what it multiplies.
#[derive(Module, Debug)]
pub struct Linear {
    weight: Param<Tensor<2>>, // [out, in]
}

impl Linear {
    /// `[.., in]` to `[.., out]`.
    fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let weight = cast_to(self.weight.val(), x.dtype());
        let [out, inputs] = weight.dims();
        let mut shape = x.dims();
        assert_eq!(shape[D - 1], inputs, "a Linear of [{out}, {inputs}] got an input of the shape {shape:?}");
        let rows = shape.iter().product::<usize>() / inputs;
        shape[D - 1] = out;
        ops::project(x.reshape([rows, inputs]), weight).reshape(shape)
    }
}

/// One row of channels for each token id.
#[derive(Module, Debug)]
pub struct Embedding {
    weight: Param<Tensor<2>>, // [v, c]
}

impl Embedding {
    /// `[b, t]` to `[b, t, c]`.
    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        ops::embedding(self.weight.val(), tokens)
    }
}

/// Attention with rotary positions, normalised queries and keys, grouped key/value heads and a sliding window.
#[derive(Module, Debug)]
pub struct Attention {
    c_q: Linear,
    c_k: Linear,
    c_v: Linear,
    c_proj: Linear,
    ve_gate: Option<Linear>,
}

impl Attention {
    fn forward(&self, x: Tensor<3>, value_embedding: Option<Tensor<3>>, context: &Context, window: usize) -> Tensor<3> {
        let [b, t, c] = x.dims();
        let d = context.head_dim;
        let heads = |y: Tensor<3>| {
            let [_, _, channels] = y.dims();
            y.reshape([b, t, channels / d, d])
        };
        let q = heads(self.c_q.forward(x.clone())); // [b, t, h, d]
        let k = heads(self.c_k.forward(x.clone())); // [b, t, g, d]
        let mut v = heads(self.c_v.forward(x.clone())); // [b, t, g, d]
        if let (Some(gate), Some(embedding)) = (&self.ve_gate, value_embedding) {
            let gate = gate.forward(x.slice([0..b, 0..t, 0..GATE_CHANNELS])); // [b, t, g]
            v = ops::gated_add(v, gate, heads(embedding));
        }
        let q = ops::rotary_rms_norm(q, context.cos.clone(), context.sin.clone());
        let k = ops::rotary_rms_norm(k, context.cos.clone(), context.sin.clone());
        let y = ops::causal_attention(q, k, v, window); // [b, t, h, d]
        self.c_proj.forward(y.reshape([b, t, c]))
    }
}

/// Two matrices with a squared ReLU between them.
#[derive(Module, Debug)]
pub struct Mlp {
    c_fc: Linear,
    c_proj: Linear,
}

impl Mlp {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.c_proj.forward(ops::squared_relu(self.c_fc.forward(x)))
    }
}

/// One layer: attention, then the MLP, each on the normalised residual stream.
#[derive(Module, Debug)]
pub struct Block {
    attn: Attention,
    mlp: Mlp,
}

impl Block {
    fn forward(&self, x: Tensor<3>, value_embedding: Option<Tensor<3>>, context: &Context, window: usize) -> Tensor<3> {
        let x = x.clone() + self.attn.forward(ops::rms_norm(x), value_embedding, context, window);
        x.clone() + self.mlp.forward(ops::rms_norm(x))
    }
}

/// What every layer of one forward pass shares.
struct Context {
    head_dim: usize,
    cos: Tensor<2>, // [t, d / 2]
    sin: Tensor<2>, // [t, d / 2]
}

// ---------------------------------------------------------------------------------------------------------------------
// Model
// ---------------------------------------------------------------------------------------------------------------------

/// Token embedding and layers; the name is part of the parameters' names.
#[derive(Module, Debug)]
pub struct Transformer {
    wte: Embedding,
    h: Vec<Block>,
}

/// The language model.
#[derive(Module, Debug)]
pub struct Gpt {
    transformer: Transformer,
    lm_head: Linear,
    resid_lambdas: Param<Tensor<1>>,
    x0_lambdas: Param<Tensor<1>>,
    value_embeds: Vec<Option<Embedding>>,
    cos: Tensor<2>,
    sin: Tensor<2>,
    #[module(skip)]
    config: GptConfig,
}

impl Gpt {
    /// The sizes this model was made with.
    pub fn config(&self) -> &GptConfig {
        &self.config
    }

    /// Final normalised residual stream: `[b, t]` to `[b, t, c]`.
    ///
    /// # Panics
    /// If t is larger than the context.
    pub fn hidden(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        self.hidden_with(tokens, |_| ())
    }

    /// [`Gpt::hidden`] that shows `see` the residual stream as each block leaves it, `[b, t, c]`.
    ///
    /// # Panics
    /// As [`Gpt::hidden`].
    pub fn hidden_with(&self, tokens: Tensor<2, Int>, mut see: impl FnMut(&Tensor<3>)) -> Tensor<3> {
        let [_, t] = tokens.dims();
        let (context_len, windows) = (self.config.sequence_len, self.config.windows());
        assert!(t <= context_len, "{t} tokens do not fit the context of {context_len}");
        let angles = |table: &Tensor<2>| table.clone().narrow(0, 0, t);
        let context = Context { head_dim: self.config.head_dim(), cos: angles(&self.cos), sin: angles(&self.sin) };
        let x0 = ops::rms_norm(self.transformer.wte.forward(tokens.clone())); // [b, t, c]
        let mut x = x0.clone();
        for (layer, block) in self.transformer.h.iter().enumerate() {
            let scalar = |lambdas: &Param<Tensor<1>>| lambdas.val().narrow(0, layer, 1);
            x = ops::mix(x, scalar(&self.resid_lambdas), x0.clone(), scalar(&self.x0_lambdas));
            let value_embedding = self.value_embeds[layer].as_ref().map(|table| table.forward(tokens.clone()));
            x = block.forward(x, value_embedding, &context, windows[layer]);
            see(&x);
        }
        ops::rms_norm(x)
    }

    /// Softcapped logits in float32: hidden `[n, c]` to `[n, v]`.
    pub fn logits(&self, hidden: Tensor<2>) -> Tensor<2> {
        let weight = cast_to(self.unembedding(), hidden.dtype());
        ops::softcap(cast_to(ops::project(hidden, weight), DType::F32), SOFTCAP)
    }

    /// The output head `[v, c]`, the same for the training loss and for the logits that are evaluated.
    fn unembedding(&self) -> Tensor<2> {
        self.lm_head.weight.val()
    }

    /// Mean cross-entropy in nats of `targets` `[b, t]` after `tokens` `[b, t]`, `[1]`.
    pub fn loss(&self, tokens: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        let hidden = self.hidden(tokens);
        let [b, t, c] = hidden.dims();
        ops::softcap_cross_entropy(hidden.reshape([b * t, c]), self.unembedding(), targets.reshape([b * t]), SOFTCAP)
    }

    /// Floating-point operations of forward and backward for one token: 6 for each weight of a matrix product, and
    /// 12·h·d for each token that a layer's window lets it see (Chowdhery et al. 2022, "PaLM", appendix B).
    pub fn flops_per_token(&self) -> usize {
        let in_products = |p: &&Parameter| p.name.starts_with("transformer.h.") || p.name.starts_with("lm_head.");
        let weights: usize =
            parameters(self).iter().filter(in_products).map(|p| p.shape.iter().product::<usize>()).sum();
        let attention: usize = self.config.windows().iter().map(|window| 12 * self.config.n_embd * window).sum();
        6 * weights + attention
    }

    /// Parameters by kind, as (kind, number).
    pub fn parameter_counts(&self) -> Vec<(&'static str, usize)> {
        let kinds = [
            ("token embedding", "transformer.wte."),
            ("value embeddings", "value_embeds."),
            ("output head", "lm_head."),
            ("matrices", "transformer.h."),
            ("scalars", ""),
        ];
        let mut counts = kinds.map(|(kind, _)| (kind, 0));
        for parameter in parameters(self) {
            let kind =
                kinds.iter().position(|(_, prefix)| parameter.name.starts_with(prefix)).expect("the last is any");
            counts[kind].1 += parameter.shape.iter().product::<usize>();
        }
        counts.to_vec()
    }
}

fn cast_to<const D: usize>(x: Tensor<D>, dtype: DType) -> Tensor<D> {
    if x.dtype() == dtype { x } else { x.cast(dtype) }
}

// ---------------------------------------------------------------------------------------------------------------------
// Initialisation
// ---------------------------------------------------------------------------------------------------------------------

impl Gpt {
    /// A freshly initialised model whose values depend on `seed` alone, not on the device.
    ///
    /// Embeddings and the rotary tables are kept in `compute_type`, everything else in float32.
    ///
    /// # Panics
    /// If [`GptConfig::problem`] finds one.
    pub fn new(config: &GptConfig, compute_type: FloatDType, seed: u64, device: &Device) -> Self {
        if let Some(problem) = config.problem() {
            panic!("these sizes make no model: {problem}");
        }
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (c, v, kv) = (config.n_embd, config.vocab_size, config.n_kv_head * config.head_dim());
        // A uniform distribution with the standard deviation 1 / √c.
        let bound = (3.0 / c as f64).sqrt();
        let uniform = Distribution::Uniform(-bound, bound);
        let compute = DType::from(compute_type);
        let mut draw = |rows: usize, columns: usize, distribution: Distribution, dtype: DType| {
            let data = TensorData::random::<f32, _, _>([rows, columns], distribution, &mut rng);
            Param::from_tensor(Tensor::from_data(data, (device, dtype)))
        };
        let zeros = |rows: usize, columns: usize| Linear {
            weight: Param::from_tensor(Tensor::zeros([rows, columns], (device, DType::F32))),
        };
        let wte = Embedding { weight: draw(v, c, Distribution::Normal(0.0, 1.0), compute) };
        let h = (0..config.n_layer)
            .map(|layer| Block {
                attn: Attention {
                    c_q: Linear { weight: draw(c, c, uniform, DType::F32) },
                    c_k: Linear { weight: draw(kv, c, uniform, DType::F32) },
                    c_v: Linear { weight: draw(kv, c, uniform, DType::F32) },
                    c_proj: zeros(c, c),
                    ve_gate: config.has_value_embedding(layer).then(|| zeros(config.n_kv_head, GATE_CHANNELS)),
                },
                mlp: Mlp { c_fc: Linear { weight: draw(4 * c, c, uniform, DType::F32) }, c_proj: zeros(c, 4 * c) },
            })
            .collect();
        let lm_head = Linear { weight: draw(v, c, Distribution::Normal(0.0, 0.001), DType::F32) };
        let value_embeds = (0..config.n_layer)
            .map(|layer| config.has_value_embedding(layer).then(|| Embedding { weight: draw(v, kv, uniform, compute) }))
            .collect();
        let constant = |value: f64| Param::from_tensor(Tensor::full([config.n_layer], value, (device, DType::F32)));
        let (cos, sin) = rotary_tables(config, compute, device);
        Self {
            transformer: Transformer { wte, h },
            lm_head,
            resid_lambdas: constant(1.0),
            x0_lambdas: constant(0.1),
            value_embeds,
            cos,
            sin,
            config: config.clone(),
        }
    }
}

/// cos and sin of position · base^(−2i / d), each `[t, d / 2]`.
fn rotary_tables(config: &GptConfig, dtype: DType, device: &Device) -> (Tensor<2>, Tensor<2>) {
    let (t, d) = (config.sequence_len, config.head_dim());
    let frequencies: Vec<f32> = (0..d).step_by(2).map(|i| 1.0 / ROTARY_BASE.powf(i as f32 / d as f32)).collect();
    let angles: Vec<f32> = (0..t).flat_map(|time| frequencies.iter().map(move |f| time as f32 * f)).collect();
    let table = |f: fn(f32) -> f32| {
        let values: Vec<f32> = angles.iter().map(|&angle| f(angle)).collect();
        // The tables are constants: they stay outside the autodiff graph.
        Tensor::from_data(TensorData::new(values, [t, d / 2]), (&device.clone().inner(), dtype))
    };
    (table(f32::cos), table(f32::sin))
}

// ---------------------------------------------------------------------------------------------------------------------
// Parameter groups
// ---------------------------------------------------------------------------------------------------------------------

impl Hyperparameters {
    /// Which update rule each parameter follows; every parameter must be in exactly one group.
    pub fn parameter_groups(&self, model: &Gpt) -> Vec<ParameterGroup> {
        // Learning rates of the AdamW groups were tuned at width 768 and scale with 1 / √width.
        let width_scale = (model.config.n_embd as f64 / 768.0).powf(-0.5);
        let adamw = |lr: f64, betas: (f64, f64)| UpdateRule::AdamW { lr, betas, eps: 1e-10, weight_decay: 0.0 };
        let embedding = adamw(self.embedding_lr * width_scale, self.adam_betas);
        let all = parameters(model);
        let of = |prefix: &str| {
            let names = all.iter().map(|parameter| parameter.name.clone());
            names.filter(|name| name.starts_with(prefix)).collect::<Vec<_>>()
        };
        // Muon takes matrices only: what else the layers hold needs a group of its own.
        let matrices =
            all.iter().filter(|parameter| parameter.name.starts_with("transformer.h.") && parameter.shape.len() == 2);
        let matrices = matrices.map(|parameter| parameter.name.clone()).collect();
        vec![
            ParameterGroup::new(
                "unembedding",
                of("lm_head."),
                adamw(self.unembedding_lr * width_scale, self.adam_betas),
            ),
            ParameterGroup::new("embedding", of("transformer.wte."), embedding.clone()),
            ParameterGroup::new("value embeddings", of("value_embeds."), embedding),
            ParameterGroup::new("residual scalars", of("resid_lambdas"), adamw(self.scalar_lr * 0.01, self.adam_betas)),
            // The x0 scalars move fast: a longer memory keeps them steady.
            ParameterGroup::new("x0 scalars", of("x0_lambdas"), adamw(self.scalar_lr, (0.96, 0.95))),
            ParameterGroup::new("matrices", matrices, UpdateRule::Muon { lr: self.matrix_lr, beta2: 0.95 }),
        ]
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Schedules
// ---------------------------------------------------------------------------------------------------------------------

impl Hyperparameters {
    /// Learning rate multiplier at `progress` = spent share of the budget.
    pub fn lr_multiplier(&self, progress: f64) -> f64 {
        if progress < self.warmup_ratio {
            progress / self.warmup_ratio
        } else if progress < 1.0 - self.warmdown_ratio {
            1.0
        } else {
            let left = (1.0 - progress) / self.warmdown_ratio;
            left + (1.0 - left) * self.final_lr_fraction
        }
    }

    /// Muon's momentum at optimizer step `step` (from 0).
    pub fn muon_momentum(&self, step: usize) -> f64 {
        let rise = (step as f64 / 300.0).min(1.0);
        (1.0 - rise) * 0.85 + rise * 0.95
    }

    /// Muon's weight decay at `progress`.
    pub fn weight_decay(&self, progress: f64) -> f64 {
        self.weight_decay * (1.0 - progress)
    }
}
