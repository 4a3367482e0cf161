//! Our own kernels (`kernels.cu`) on libtorch's tensors: compiled at first use, and called like functions of tensors.
//!
//! They do in one pass over memory what takes libtorch several. [`of`] says whether they can be had for some tensors;
//! where they cannot, the portable bodies are right too.

use super::super::portable::RMS_NORM_EPSILON;
use super::driver::{Argument, Driver, Function, Place};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, Once, OnceLock, PoisonError};
use std::time::Instant;
use tch::{Device, Kind, Tensor};

pub const SOURCE: &str = include_str!("kernels.cu");
/// What to do about an error that comes from the GPU.
pub const LATE_ERROR: &str =
    "hint: an earlier operation may be the cause, CUDA_LAUNCH_BLOCKING=1 (AMD: AMD_SERIALIZE_KERNEL=3) tells which";
/// Elements that a thread reads and writes at once.
const VECTOR: i64 = 8;
const THREADS: u32 = 256;
/// Rows that a block of the kernel `embedding_backward` adds up at once, and columns, in vectors, of its share.
const EMBEDDING_ROWS: u32 = 16;
const EMBEDDING_COLUMNS: u32 = 16;
/// Threads of a row of logits: with the vectors that each keeps, a usual vocabulary is read once.
const LOGIT_THREADS: u32 = 512;
/// Blocks of a kernel that sums over all elements: enough to fill any GPU, few enough to add up.
const SUMMING_BLOCKS: u32 = 1024;

pub const NAMES: [&str; 15] = [
    "rms_norm_forward",
    "rms_norm_backward",
    "rotary_rms_norm_forward",
    "rotary_rms_norm_backward",
    "gated_add_forward",
    "gated_add_backward",
    "mix_forward",
    "mix_backward",
    "squared_relu_forward",
    "squared_relu_backward",
    "softcap_cross_entropy",
    "embedding_backward",
    "reverse_blocks",
    "add_reversed_blocks",
    "merge_blocks",
];

/// The kernels for one device and element type.
pub struct Kernels {
    driver: &'static Driver,
    place: Place,
    functions: HashMap<&'static str, Function>,
}

/// The kernels for tensors like these, if all are contiguous, of one type that the kernels know, on one GPU, and made
/// of whole vectors along their last axis.
///
/// The first call for a device and a type compiles; a failure is warned of once.
pub fn of(tensors: &[&Tensor]) -> Option<Arc<Kernels>> {
    let first = tensors[0];
    let Device::Cuda(device) = first.device() else { return None };
    let is_known = matches!(first.kind(), Kind::BFloat16 | Kind::Float) && first.numel() > 0;
    if !is_known || tensors.iter().any(|x| x.kind() != first.kind() || x.device() != first.device()) {
        return None;
    }
    let is_whole = |x: &&&Tensor| x.size().last().is_some_and(|last| last % VECTOR == 0);
    if let Some(odd) = tensors.iter().find(|x| !is_whole(x)) {
        static SAID: Once = Once::new();
        SAID.call_once(|| {
            tracing::warn!(
                "the GPU's own kernels take sizes in multiples of {VECTOR}, found a tensor of {:?}; hint: what does not fit goes by libtorch's operations, right but slower",
                odd.size()
            );
        });
        return None;
    }
    if !tensors.iter().all(|x| x.is_contiguous() && is_aligned(x)) {
        return None;
    }
    type Built = HashMap<(usize, Kind), Option<Arc<Kernels>>>;
    static BUILT: OnceLock<Mutex<Built>> = OnceLock::new();
    let mut built = BUILT.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    let kernels = built.entry((device, first.kind())).or_insert_with(|| match Kernels::build(device, first.kind()) {
        Ok(kernels) => Some(Arc::new(kernels)),
        Err(problem) => {
            tracing::warn!(
                "the GPU's own kernels are not used, expected them to compile, found: {problem}; \
                 hint: training goes on with libtorch's operations, right but much slower"
            );
            None
        }
    });
    kernels.clone()
}

/// What the source wants to be compiled with for elements of `kind`.
pub fn options(kind: Kind) -> Vec<String> {
    let mut options =
        vec![format!("-DEMBEDDING_ROWS={EMBEDDING_ROWS}"), format!("-DEMBEDDING_COLUMNS={EMBEDDING_COLUMNS}")];
    if kind == Kind::BFloat16 {
        options.push("-DELEMENT_BF16".to_owned());
    }
    options
}

fn is_aligned(x: &Tensor) -> bool {
    (x.data_ptr() as usize).is_multiple_of(16)
}

fn driver() -> Result<&'static Driver, String> {
    static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
    DRIVER.get_or_init(Driver::open).as_ref().map_err(Clone::clone)
}

impl Kernels {
    fn build(device: usize, kind: Kind) -> Result<Self, String> {
        let driver = driver()?;
        let place = driver.place(device as i32)?;
        let start = Instant::now();
        let functions = driver.build(SOURCE, &options(kind), place, &NAMES)?;
        tracing::debug!("compiled the kernels for {kind:?} in {:.2?}", start.elapsed());
        Ok(Self { driver, place, functions: NAMES.into_iter().zip(functions).collect() })
    }

    fn launch(&self, name: &str, blocks: u64, threads: u32, arguments: &[Argument]) {
        let launched = u32::try_from(blocks).map_err(|_| format!("{blocks} blocks are too many")).and_then(|blocks| {
            // SAFETY: the functions below give each kernel what it declares, over tensors that `of` has looked at.
            unsafe { self.driver.launch(self.place, self.functions[name], blocks, threads, arguments) }
        });
        launched.unwrap_or_else(|problem| panic!("{name}: {problem}; {LATE_ERROR}"));
    }

    /// See `ops::rms_norm`: the output and 1 / rms of each row.
    pub fn rms_norm_forward(&self, x: &Tensor) -> (Tensor, Tensor) {
        let (rows, vectors) = rows(x);
        let (y, inverse_rms) = (x.empty_like(), Tensor::empty([rows], (Kind::Float, x.device())));
        let split = RowSplit::new(rows, vectors);
        let arguments = [
            pointer(x),
            pointer(&y),
            pointer(&inverse_rms),
            Argument::Long(rows),
            Argument::Int(vectors),
            Argument::Int(split.width),
            Argument::Float(RMS_NORM_EPSILON as f32),
        ];
        self.launch("rms_norm_forward", split.blocks, THREADS, &arguments);
        (y, inverse_rms)
    }

    /// Gradient of `ops::rms_norm`, from its output.
    pub fn rms_norm_backward(&self, y: &Tensor, inverse_rms: &Tensor, grad: &Tensor) -> Tensor {
        let (rows, vectors) = rows(y);
        let dx = y.empty_like();
        let split = RowSplit::new(rows, vectors);
        let arguments = [
            pointer(y),
            pointer(inverse_rms),
            pointer(grad),
            pointer(&dx),
            Argument::Long(rows),
            Argument::Int(vectors),
            Argument::Int(split.width),
        ];
        self.launch("rms_norm_backward", split.blocks, THREADS, &arguments);
        dx
    }

    /// See `ops::rotary_rms_norm`: the output and 1 / rms of each head.
    ///
    /// `x` `[b, t, h, d]`, `cos` and `sin` `[t, d / 2]`.
    pub fn rotary_rms_norm_forward(&self, x: &Tensor, cos: &Tensor, sin: &Tensor) -> (Tensor, Tensor) {
        let (rows, vectors) = rows(x);
        let (y, inverse_rms) = (x.empty_like(), Tensor::empty([rows], (Kind::Float, x.device())));
        let split = RowSplit::new(rows, vectors / 2);
        let (heads, times) = heads_and_times(x);
        let arguments = [
            pointer(x),
            pointer(cos),
            pointer(sin),
            pointer(&y),
            pointer(&inverse_rms),
            Argument::Long(rows),
            heads,
            times,
            Argument::Int(vectors / 2),
            Argument::Int(split.width),
            Argument::Float(RMS_NORM_EPSILON as f32),
        ];
        self.launch("rotary_rms_norm_forward", split.blocks, THREADS, &arguments);
        (y, inverse_rms)
    }

    /// Gradient of `ops::rotary_rms_norm`, from its output.
    pub fn rotary_rms_norm_backward(
        &self,
        y: &Tensor,
        inverse_rms: &Tensor,
        grad: &Tensor,
        cos: &Tensor,
        sin: &Tensor,
    ) -> Tensor {
        let (rows, vectors) = rows(y);
        let dx = y.empty_like();
        let split = RowSplit::new(rows, vectors / 2);
        let (heads, times) = heads_and_times(y);
        let arguments = [
            pointer(y),
            pointer(inverse_rms),
            pointer(grad),
            pointer(cos),
            pointer(sin),
            pointer(&dx),
            Argument::Long(rows),
            heads,
            times,
            Argument::Int(vectors / 2),
            Argument::Int(split.width),
        ];
        self.launch("rotary_rms_norm_backward", split.blocks, THREADS, &arguments);
        dx
    }

    /// See `ops::gated_add`.
    pub fn gated_add_forward(&self, x: &Tensor, gate: &Tensor, y: &Tensor) -> Tensor {
        let out = x.empty_like();
        let (rows, vectors) = rows(x);
        let split = RowSplit::new(rows, vectors);
        let arguments = [
            pointer(x),
            pointer(gate),
            pointer(y),
            pointer(&out),
            Argument::Long(rows),
            Argument::Int(vectors),
            Argument::Int(split.width),
        ];
        self.launch("gated_add_forward", split.blocks, THREADS, &arguments);
        out
    }

    /// Gradients of `ops::gated_add` with respect to `gate` and `y`.
    pub fn gated_add_backward(&self, gate: &Tensor, y: &Tensor, grad: &Tensor) -> [Tensor; 2] {
        let (dgate, dy) = (gate.empty_like(), y.empty_like());
        let (rows, vectors) = rows(y);
        let split = RowSplit::new(rows, vectors);
        let arguments = [
            pointer(gate),
            pointer(y),
            pointer(grad),
            pointer(&dgate),
            pointer(&dy),
            Argument::Long(rows),
            Argument::Int(vectors),
            Argument::Int(split.width),
        ];
        self.launch("gated_add_backward", split.blocks, THREADS, &arguments);
        [dgate, dy]
    }

    /// See `ops::mix`; the scales are float32.
    pub fn mix_forward(&self, x: &Tensor, x_scale: &Tensor, y: &Tensor, y_scale: &Tensor) -> Tensor {
        let out = x.empty_like();
        let arguments =
            [pointer(x), pointer(x_scale), pointer(y), pointer(y_scale), pointer(&out), Argument::Long(vectors(x))];
        self.launch("mix_forward", blocks(vectors(x)), THREADS, &arguments);
        out
    }

    /// Gradients of `ops::mix`; those of the scales are float32.
    pub fn mix_backward(
        &self,
        x: &Tensor,
        x_scale: &Tensor,
        y: &Tensor,
        y_scale: &Tensor,
        grad: &Tensor,
    ) -> [Tensor; 4] {
        let (dx, dy) = (x.empty_like(), y.empty_like());
        let used = blocks(vectors(x)).min(SUMMING_BLOCKS.into());
        let partial = Tensor::empty([used as i64, 2], (Kind::Float, x.device()));
        let arguments = [
            pointer(x),
            pointer(x_scale),
            pointer(y),
            pointer(y_scale),
            pointer(grad),
            pointer(&dx),
            pointer(&dy),
            pointer(&partial),
            Argument::Long(vectors(x)),
        ];
        self.launch("mix_backward", used, THREADS, &arguments);
        let sums = partial.sum_dim_intlist(0i64, false, Kind::Float);
        [dx, sums.narrow_copy(0, 0, 1), dy, sums.narrow_copy(0, 1, 1)]
    }

    /// See `ops::squared_relu`.
    pub fn squared_relu_forward(&self, x: &Tensor) -> Tensor {
        let out = x.empty_like();
        let arguments = [pointer(x), pointer(&out), Argument::Long(vectors(x))];
        self.launch("squared_relu_forward", blocks(vectors(x)), THREADS, &arguments);
        out
    }

    /// Gradient of `ops::squared_relu`, from its output.
    pub fn squared_relu_backward(&self, out: &Tensor, grad: &Tensor) -> Tensor {
        let dx = out.empty_like();
        let arguments = [pointer(out), pointer(grad), pointer(&dx), Argument::Long(vectors(out))];
        self.launch("squared_relu_backward", blocks(vectors(out)), THREADS, &arguments);
        dx
    }

    /// The loss of each row of `logits` `[rows, v]` after softcapping; the gradient of the sum of losses times `scale`
    /// with respect to the logits takes their place.
    pub fn softcap_cross_entropy(&self, logits: &Tensor, targets: &Tensor, cap: f64, scale: f64) -> Tensor {
        let (rows, vectors) = rows(logits);
        let losses = Tensor::empty([rows], (Kind::Float, logits.device()));
        let arguments = [
            pointer(logits),
            pointer(targets),
            pointer(&losses),
            Argument::Int(vectors),
            Argument::Float(cap as f32),
            Argument::Float(scale as f32),
        ];
        self.launch("softcap_cross_entropy", rows as u64, LOGIT_THREADS, &arguments);
        losses
    }

    /// Gradient of `ops::embedding` with respect to its `v` rows, from that of its output `[n, c]`: row `i` of it belongs to
    /// the token whose share of `order` `[n]` holds `i`, those of token `k` being `starts[k]..starts[k + 1]`.
    pub fn embedding_backward(&self, grad: &Tensor, order: &Tensor, starts: &Tensor, v: i64) -> Tensor {
        let (_, vectors) = rows(grad);
        let dweight = Tensor::empty([v, i64::from(vectors) * VECTOR], (grad.kind(), grad.device()));
        let arguments = [pointer(grad), pointer(order), pointer(starts), pointer(&dweight), Argument::Int(vectors)];
        let blocks = v as u64 * (vectors as u64).div_ceil(EMBEDDING_COLUMNS.into());
        self.launch("embedding_backward", blocks, EMBEDDING_ROWS * EMBEDDING_COLUMNS, &arguments);
        dweight
    }

    /// The blocks of `blocks` `[b, n, window, h, d]` from the `first` on, all but one, time reversed: `[b, n − 1, window, h, d]`.
    pub fn reverse_blocks(&self, blocks: &Tensor, first: i32) -> Tensor {
        let size = blocks.size();
        let reversed =
            blocks.new_empty([size[0], size[1] - 1, size[2], size[3], size[4]], (blocks.kind(), blocks.device()));
        let arguments = [&[pointer(blocks), pointer(&reversed)], &reversed_arguments(&reversed, first)[..]].concat();
        self.launch("reverse_blocks", self::blocks(vectors(&reversed)), THREADS, &arguments);
        reversed
    }

    /// Adds `reversed` `[b, n − 1, window, h, d]` to where [`Kernels::reverse_blocks`] takes it from.
    pub fn add_reversed_blocks(&self, blocks: &Tensor, reversed: &Tensor, first: i32) {
        let arguments = [&[pointer(blocks), pointer(reversed)], &reversed_arguments(reversed, first)[..]].concat();
        self.launch("add_reversed_blocks", self::blocks(vectors(reversed)), THREADS, &arguments);
    }

    /// Merges attention to the block before into `out` `[b, n, window, h, d]`; gives the log-sum-exp `[b, h, n · window]`.
    ///
    /// `before` `[b, n − 1, window, h, d]` and `before_sums` `[b, n − 1, h, window]` are time reversed; `own_sums`
    /// `[b, n, h, window]`.
    pub fn merge_blocks(&self, out: &Tensor, before: &Tensor, own_sums: &Tensor, before_sums: &Tensor) -> Tensor {
        let size = out.size();
        let (b, n, window, h, d) = (size[0], size[1], size[2], size[3], size[4]);
        let merged = Tensor::empty([b, h, n * window], (Kind::Float, out.device()));
        let arguments = [
            pointer(out),
            pointer(before),
            pointer(own_sums),
            pointer(before_sums),
            pointer(&merged),
            Argument::Long(vectors(out)),
            Argument::Int(h as i32),
            Argument::Int((d / VECTOR) as i32),
            Argument::Int(window as i32),
            Argument::Int(n as i32),
        ];
        self.launch("merge_blocks", self::blocks(vectors(out)), THREADS, &arguments);
        merged
    }
}

fn reversed_arguments(reversed: &Tensor, first: i32) -> [Argument; 5] {
    let size = reversed.size();
    let (n, window, row) = (size[1] + 1, size[2], size[3] * size[4] / VECTOR);
    [
        Argument::Long(vectors(reversed)),
        Argument::Int(row as i32),
        Argument::Int(window as i32),
        Argument::Int(n as i32),
        Argument::Int(first),
    ]
}

/// How the threads of a block share rows.
struct RowSplit {
    /// Threads of one row: a power of two up to 32.
    width: i32,
    blocks: u64,
}

impl RowSplit {
    fn new(rows: i64, vectors: i32) -> Self {
        let width = (vectors as u32).next_power_of_two().min(32);
        Self { width: width as i32, blocks: (rows as u64).div_ceil((THREADS / width).into()) }
    }
}

fn pointer(x: &Tensor) -> Argument {
    Argument::Pointer(x.data_ptr())
}

/// Rows and vectors in one of them.
fn rows(x: &Tensor) -> (i64, i32) {
    let last = x.size().last().copied().unwrap_or(1);
    (x.numel() as i64 / last, (last / VECTOR) as i32)
}

fn vectors(x: &Tensor) -> i64 {
    x.numel() as i64 / VECTOR
}

fn blocks(vectors: i64) -> u64 {
    (vectors as u64).div_ceil(THREADS.into())
}

fn heads_and_times(x: &Tensor) -> (Argument, Argument) {
    let size = x.size();
    (Argument::Int(size[2] as i32), Argument::Int(size[1] as i32))
}
