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
    /// One letter a layer, repeated: S sees half the context back, L all of it; the last layer always sees all.
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
    ///
    /// # Panics
    /// If the window pattern is not one ([`GptConfig::problem`]).
    pub fn windows(&self) -> Vec<usize> {
        let letters: Vec<char> = self.window_pattern.chars().collect();
        let part = |letter| part_of_context(letter).expect("a letter of the window pattern");
        let mut windows: Vec<usize> =
            (0..self.n_layer).map(|layer| self.sequence_len / part(letters[layer % letters.len()])).collect();
        windows[self.n_layer - 1] = self.sequence_len;
        windows
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
        } else if self.window_pattern.is_empty() || self.window_pattern.contains(|c| part_of_context(c).is_none()) {
            let letters = WINDOWS.map(|(letter, _)| letter.to_string()).join(" and ");
            Some(format!("window_pattern must be letters {letters}, found {:?}", self.window_pattern))
        } else {
            None
        }
    }
}

/// The letters of a window pattern; a layer sees the context divided by the number.
const WINDOWS: [(char, usize); 2] = [('S', 2), ('L', 1)];
/// Logits z become SOFTCAP·tanh(z / SOFTCAP).
const SOFTCAP: f64 = 15.0;
/// Channels of the layer input from which a value embedding's gate is computed.
const GATE_CHANNELS: usize = 32;
/// Base of the rotary wavelengths.
const ROTARY_BASE: f32 = 10_000.0;

fn part_of_context(letter: char) -> Option<usize> {
    WINDOWS.iter().find(|(known, _)| *known == letter).map(|(_, part)| *part)
}

// ---------------------------------------------------------------------------------------------------------------------
// Blocks: for each its parameters, their initial values, and what it computes
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
    fn new(config: &GptConfig, layer: usize, init: &mut Initializer) -> Self {
        let (c, kv) = (config.n_embd, config.n_kv_head * config.head_dim());
        Self {
            c_q: init.linear(c, c, uniform(c)),
            c_k: init.linear(kv, c, uniform(c)),
            c_v: init.linear(kv, c, uniform(c)),
            c_proj: init.zeros(c, c),
            ve_gate: config.has_value_embedding(layer).then(|| init.zeros(config.n_kv_head, GATE_CHANNELS)),
        }
    }

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
    fn new(config: &GptConfig, init: &mut Initializer) -> Self {
        let c = config.n_embd;
        Self { c_fc: init.linear(4 * c, c, uniform(c)), c_proj: init.zeros(c, 4 * c) }
    }

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
    fn new(config: &GptConfig, layer: usize, init: &mut Initializer) -> Self {
        Self { attn: Attention::new(config, layer, init), mlp: Mlp::new(config, init) }
    }

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
        let compute_type = DType::from(compute_type);
        let init = &mut Initializer { rng: ChaCha8Rng::seed_from_u64(seed), device, compute_type };
        let layers = 0..config.n_layer;
        let (v, c, kv) = (config.vocab_size, config.n_embd, config.n_kv_head * config.head_dim());
        let (cos, sin) = rotary_tables(config, compute_type, device);
        // A field's values are drawn where it stands: one more does not change those before it.
        Self {
            transformer: Transformer {
                wte: init.embedding(v, c, normal(1.0)),
                h: layers.clone().map(|layer| Block::new(config, layer, init)).collect(),
            },
            lm_head: init.linear(v, c, normal(0.001)),
            resid_lambdas: init.scalars(config.n_layer, 1.0),
            x0_lambdas: init.scalars(config.n_layer, 0.1),
            value_embeds: layers
                .map(|layer| config.has_value_embedding(layer).then(|| init.embedding(v, kv, uniform(c))))
                .collect(),
            cos,
            sin,
            config: config.clone(),
        }
    }

    /// The output head `[v, c]`, the same for the training loss and for the logits that are evaluated.
    fn unembedding(&self) -> Tensor<2> {
        self.lm_head.weight.val()
    }

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

    /// Mean cross-entropy in nats of `targets` `[b, t]` after `tokens` `[b, t]`, `[1]`.
    pub fn loss(&self, tokens: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        let hidden = self.hidden(tokens);
        let [b, t, c] = hidden.dims();
        ops::softcap_cross_entropy(hidden.reshape([b * t, c]), self.unembedding(), targets.reshape([b * t]), SOFTCAP)
    }

    /// Floating-point operations of forward and backward for one token: 6 for each weight of a matrix product, and
    /// 12·h·d for each token that a layer's window lets it see (Chowdhery et al. 2022, "PaLM", appendix B).
    pub fn flops_per_token(&self) -> usize {
        let in_layers = parameters(self).iter().filter(|p| is_layer_matrix(p)).map(Parameter::elements).sum::<usize>();
        let in_head = self.unembedding().shape().num_elements();
        let attention: usize = self.config.windows().iter().map(|window| 12 * self.config.n_embd * window).sum();
        6 * (in_layers + in_head) + attention
    }
}

/// Whether a parameter is a matrix of a layer.
fn is_layer_matrix(parameter: &Parameter) -> bool {
    parameter.name.starts_with("transformer.h.") && parameter.shape.len() == 2
}

fn cast_to<const D: usize>(x: Tensor<D>, dtype: DType) -> Tensor<D> {
    if x.dtype() == dtype { x } else { x.cast(dtype) }
}

// ---------------------------------------------------------------------------------------------------------------------
// Initialisation
// ---------------------------------------------------------------------------------------------------------------------

/// Draws initial values; they depend on the seed and on the order of the draws, not on the device.
struct Initializer<'a> {
    rng: ChaCha8Rng,
    device: &'a Device,
    compute_type: DType,
}

impl Initializer<'_> {
    /// A matrix for products: kept in float32.
    fn linear(&mut self, out: usize, inputs: usize, values: Distribution) -> Linear {
        Linear { weight: self.draw(out, inputs, values, DType::F32) }
    }

    /// A matrix of noughts: what it leads to adds nothing before the first step.
    fn zeros(&mut self, out: usize, inputs: usize) -> Linear {
        Linear { weight: Param::from_tensor(Tensor::zeros([out, inputs], (self.device, DType::F32))) }
    }

    /// A table of rows that are looked up: kept in the compute type.
    fn embedding(&mut self, rows: usize, channels: usize, values: Distribution) -> Embedding {
        Embedding { weight: self.draw(rows, channels, values, self.compute_type) }
    }

    /// `numbers` equal scalars: kept in float32.
    fn scalars(&mut self, numbers: usize, value: f64) -> Param<Tensor<1>> {
        Param::from_tensor(Tensor::full([numbers], value, (self.device, DType::F32)))
    }

    fn draw(&mut self, rows: usize, columns: usize, values: Distribution, dtype: DType) -> Param<Tensor<2>> {
        let data = TensorData::random::<f32, _, _>([rows, columns], values, &mut self.rng);
        Param::from_tensor(Tensor::from_data(data, (self.device, dtype)))
    }
}

/// Uniform values with the standard deviation 1 / √channels.
fn uniform(channels: usize) -> Distribution {
    let bound = (3.0 / channels as f64).sqrt();
    Distribution::Uniform(-bound, bound)
}

/// Normal values around nought.
fn normal(standard_deviation: f64) -> Distribution {
    Distribution::Normal(0.0, standard_deviation)
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
        let scalar = adamw(self.scalar_lr * 0.01, self.adam_betas);
        let all = parameters(model);
        let group = |name, members: &dyn Fn(&Parameter) -> bool, rule| {
            let members = all.iter().filter(|parameter| members(parameter));
            ParameterGroup::new(name, members.map(|parameter| parameter.name.clone()).collect(), rule)
        };
        let named = |prefix: &'static str| move |parameter: &Parameter| parameter.name.starts_with(prefix);
        vec![
            group("unembedding", &named("lm_head."), adamw(self.unembedding_lr * width_scale, self.adam_betas)),
            group("embedding", &named("transformer.wte."), embedding.clone()),
            group("value embeddings", &named("value_embeds."), embedding),
            group("residual scalars", &named("resid_lambdas"), scalar.clone()),
            // The x0 scalars move fast: a longer memory keeps them steady.
            group("x0 scalars", &named("x0_lambdas"), adamw(self.scalar_lr, (0.96, 0.95))),
            group("matrices", &is_layer_matrix, UpdateRule::Muon { lr: self.matrix_lr, beta2: 0.95 }),
            // Muon takes matrices only: whatever else a layer holds.
            group("layer scalars", &|p| named("transformer.h.")(p) && !is_layer_matrix(p), scalar),
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
