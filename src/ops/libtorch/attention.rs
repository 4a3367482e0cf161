//! Attention through libtorch's fused kernels, with real sliding windows, and the choice of the fastest way on this GPU.
//!
//! Only some kernels know windows, and some builds take one and ignore it. Any causal kernel can do them in blocks as long
//! as the window: a query sees its own block up to itself, and of the block before the part from its own place on, which
//! becomes causal with time reversed. The two parts are merged by their log-sum-exp; backward kernels take the merged output
//! and log-sum-exp for either part (Dao et al. 2022, "FlashAttention": they enter as they are).

use super::super::{AttentionState, portable};
use super::kernels;
use burn::backend::LibTorch;
use burn_tch::TchTensor;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::ptr::null_mut;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

unsafe extern "C" {
    fn autoresearch_attention_forward(
        kernel: c_int,
        q: *const C_tensor,
        k: *const C_tensor,
        v: *const C_tensor,
        window: i64,
        outputs: *mut *mut C_tensor,
    ) -> *const c_char;
    fn autoresearch_attention_backward(
        kernel: c_int,
        grad: *const C_tensor,
        q: *const C_tensor,
        k: *const C_tensor,
        v: *const C_tensor,
        out: *const C_tensor,
        log_sum_exp: *const C_tensor,
        window: i64,
        outputs: *mut *mut C_tensor,
    ) -> *const c_char;
}

/// One of libtorch's fused attention kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    Flash = 0,
    Cudnn = 1,
    Efficient = 2,
    Cpu = 3,
}

/// How a window gets into the computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Windowing {
    /// Every query sees all tokens before it.
    Full,
    /// The kernel takes the window.
    Native,
    /// Blocks as long as the window.
    Blocks,
}

/// A way to compute attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    pub kernel: Kernel,
    pub windowing: Windowing,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kernel = match self.kernel {
            Kernel::Flash => "flash",
            Kernel::Cudnn => "cuDNN",
            Kernel::Efficient => "memory-efficient",
            Kernel::Cpu => "flash for CPUs",
        };
        match self.windowing {
            Windowing::Full => write!(f, "{kernel}"),
            Windowing::Native => write!(f, "{kernel} with its own window"),
            Windowing::Blocks => write!(f, "{kernel} in blocks"),
        }
    }
}

/// Queries, keys and values, each `[b, t, h, d]`.
pub type Operands = [Tensor; 3];

impl Kernel {
    fn takes_windows(self) -> bool {
        self == Self::Flash
    }

    /// Output `[b, t, h, d]` and log-sum-exp `[b, h, t]`.
    fn forward(self, [q, k, v]: &Operands, window: Option<i64>) -> Result<(Tensor, Tensor), String> {
        let mut outputs = [null_mut(); 2];
        // SAFETY: the tensors live during the call; on success it leaves two that belong to us.
        unsafe {
            let window = window.unwrap_or(-1);
            let (q, k, v) = (q.as_ptr(), k.as_ptr(), v.as_ptr());
            check(autoresearch_attention_forward(self as c_int, q, k, v, window, outputs.as_mut_ptr()))?;
            let [out, log_sum_exp] = outputs.map(|output| Tensor::from_ptr(output));
            Ok((out, log_sum_exp))
        }
    }

    /// Gradients of queries, keys and values.
    fn backward(self, state: &State, grad: &Tensor, window: Option<i64>) -> Result<Operands, String> {
        let State { operands: [q, k, v], out, log_sum_exp } = state;
        let mut outputs = [null_mut(); 3];
        // SAFETY: the tensors live during the call; on success it leaves three that belong to us.
        unsafe {
            check(autoresearch_attention_backward(
                self as c_int,
                grad.as_ptr(),
                q.as_ptr(),
                k.as_ptr(),
                v.as_ptr(),
                out.as_ptr(),
                log_sum_exp.as_ptr(),
                window.unwrap_or(-1),
                outputs.as_mut_ptr(),
            ))?;
            Ok(outputs.map(|output| Tensor::from_ptr(output)))
        }
    }
}

/// # Safety
/// `message` must be null or a string that ends with a zero.
unsafe fn check(message: *const c_char) -> Result<(), String> {
    if message.is_null() {
        return Ok(());
    }
    // SAFETY: the caller's.
    Err(unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned())
}

/// What the forward pass leaves: operands `[b, t, h, d]`, output alike, log-sum-exp `[b, h, t]`.
pub struct State {
    pub operands: Operands,
    pub out: Tensor,
    pub log_sum_exp: Tensor,
}

impl Plan {
    /// Output `[b, t, h, d]` and log-sum-exp `[b, h, t]` of `q` `[b, t, h, d]`, `k` and `v` `[b, t, g, d]`.
    ///
    /// # Errors
    /// What libtorch says.
    pub fn forward(self, q: &Tensor, k: &Tensor, v: &Tensor, window: usize) -> Result<(Tensor, Tensor), String> {
        let operands = with_all_heads(q, k, v);
        let window = window as i64;
        match self.windowing {
            Windowing::Full => self.kernel.forward(&operands, None),
            Windowing::Native => self.kernel.forward(&operands, Some(window)),
            Windowing::Blocks => forward_in_blocks(self.kernel, &operands, window),
        }
    }

    /// Gradients of `q`, `k` and `v` in their own shapes.
    ///
    /// # Errors
    /// What libtorch says.
    pub fn backward(self, state: State, grad: &Tensor, window: usize) -> Result<Operands, String> {
        let [q, k, v] = &state.operands;
        let groups = k.size()[2];
        let state = State { operands: with_all_heads(q, k, v), ..state };
        let window = window as i64;
        let [dq, dk, dv] = match self.windowing {
            Windowing::Full => self.kernel.backward(&state, grad, None),
            Windowing::Native => self.kernel.backward(&state, grad, Some(window)),
            Windowing::Blocks => backward_in_blocks(self.kernel, &state, grad, window),
        }?;
        Ok([dq, sum_of_heads(dk, groups), sum_of_heads(dv, groups)])
    }
}

/// Keys and values repeated for every query head that uses them: not all kernels know grouped heads.
fn with_all_heads(q: &Tensor, k: &Tensor, v: &Tensor) -> Operands {
    let repeats = q.size()[2] / k.size()[2];
    let repeated = |x: &Tensor| {
        if repeats == 1 { x.shallow_clone() } else { x.repeat_interleave_self_int(repeats, 2, None) }
    };
    // Kernels want the last axis without gaps; mostly nothing is copied.
    [q, &repeated(k), &repeated(v)].map(Tensor::contiguous)
}

/// The gradient of [`with_all_heads`]: `[b, t, h, d]` to `[b, t, g, d]`.
fn sum_of_heads(x: Tensor, groups: i64) -> Tensor {
    let size = x.size();
    if size[2] == groups {
        return x;
    }
    let grouped = x.reshape([size[0], size[1], groups, size[2] / groups, size[3]]);
    grouped.sum_dim_intlist(3i64, false, x.kind())
}

/// `[b, t, h, d]` cut into blocks of `window` tokens: `[b, n, window, h, d]`, zeros at the end where they do not fill up.
///
/// Nothing before the end sees what is added there.
fn blocks(x: &Tensor, window: i64) -> Tensor {
    let size = x.size();
    let missing = (window - size[1] % window) % window;
    let padded = if missing == 0 { x.contiguous() } else { x.constant_pad_nd([0, 0, 0, 0, 0, missing]) };
    padded.view([size[0], -1, window, size[2], size[3]])
}

/// The blocks `[b, n, w, h, d]` that look back (all but the first), or those that are looked at (all but the last), with
/// time reversed: `[b, n − 1, w, h, d]`.
fn reversed(blocks: &Tensor, first: i32) -> Tensor {
    match kernels::of(&[blocks]) {
        Some(kernels) => kernels.reverse_blocks(blocks, first),
        None => blocks.narrow(1, first.into(), blocks.size()[1] - 1).flip([2]),
    }
}

/// Adds the gradient of [`reversed`] to that of its blocks.
fn add_reversed(blocks: &Tensor, reversed: &Tensor, first: i32) {
    match kernels::of(&[blocks, reversed]) {
        Some(kernels) => kernels.add_reversed_blocks(blocks, reversed, first),
        None => {
            let mut place = blocks.narrow(1, first.into(), blocks.size()[1] - 1);
            place += reversed.flip([2]);
        }
    }
}

/// Merges attention to the block before into `out` `[b, n, w, h, d]`; gives the log-sum-exp `[b, h, n · w]`.
///
/// `before` `[b, n − 1, w, h, d]` and its log-sum-exp `[b, n − 1, h, w]` are time reversed, `own_sums` are `[b, n, h, w]`.
fn merge(out: &Tensor, before: &Tensor, own_sums: &Tensor, before_sums: &Tensor) -> Tensor {
    if let Some(kernels) = kernels::of(&[out, before]) {
        return kernels.merge_blocks(out, before, own_sums, before_sums);
    }
    let size = out.size();
    let (mut own, mut sums) = (out.narrow(1, 1, size[1] - 1), own_sums.narrow(1, 1, size[1] - 1));
    let (before, before_sums) = (before.flip([2]), before_sums.flip([3]));
    let merged = sums.logaddexp(&before_sums);
    let share = (before_sums - &merged).exp().transpose(2, 3).unsqueeze(-1); // [b, n - 1, w, h, 1]
    own.copy_(&(&own + (before - &own).to_kind(Kind::Float) * share));
    sums.copy_(&merged);
    own_sums.transpose(1, 2).reshape([size[0], size[3], size[1] * size[2]])
}

/// `[b · n, w, h, d]` of `[b, n, w, h, d]`.
fn as_batch(blocks: &Tensor) -> Tensor {
    let size = blocks.size();
    blocks.view([-1, size[2], size[3], size[4]])
}

/// The log-sum-exp `[b, h, t]` in blocks: `[b, n, h, w]`.
fn sum_blocks(log_sum_exp: &Tensor, window: i64) -> Tensor {
    let size = log_sum_exp.size();
    let missing = (window - size[2] % window) % window;
    let padded = log_sum_exp.constant_pad_nd([0, missing]);
    padded.view([size[0], size[1], -1, window]).transpose(1, 2).contiguous()
}

fn forward_in_blocks(kernel: Kernel, operands: &Operands, window: i64) -> Result<(Tensor, Tensor), String> {
    let t = operands[0].size()[1];
    let [q, k, v] = operands.each_ref().map(|x| blocks(x, window));
    let size = q.size();
    let (b, n, h, d) = (size[0], size[1], size[3], size[4]);
    let (out, own_sums) = kernel.forward(&[as_batch(&q), as_batch(&k), as_batch(&v)], None)?;
    let (out, own_sums) = (out.contiguous().view(size.as_slice()), own_sums.contiguous().view([b, n, h, window]));
    let before = [reversed(&q, 1), reversed(&k, 0), reversed(&v, 0)].map(|x| as_batch(&x));
    let (before, before_sums) = kernel.forward(&before, None)?;
    let before = before.contiguous().view([b, n - 1, window, h, d]);
    let before_sums = before_sums.contiguous().view([b, n - 1, h, window]);
    let sums = merge(&out, &before, &own_sums, &before_sums);
    let out = out.view([b, n * window, h, d]).narrow(1, 0, t).contiguous();
    Ok((out, sums.narrow(2, 0, t).contiguous()))
}

fn backward_in_blocks(kernel: Kernel, state: &State, grad: &Tensor, window: i64) -> Result<Operands, String> {
    let t = grad.size()[1];
    let [q, k, v] = state.operands.each_ref().map(|x| blocks(x, window));
    let [out, grad] = [&state.out, grad].map(|x| blocks(x, window));
    let sums = sum_blocks(&state.log_sum_exp, window); // [b, n, h, w]
    let size = q.size();
    let (b, n, h, d) = (size[0], size[1], size[3], size[4]);
    let own =
        State { operands: [&q, &k, &v].map(as_batch), out: as_batch(&out), log_sum_exp: sums.view([-1, h, window]) };
    let gradients = kernel.backward(&own, &as_batch(&grad), None)?;
    let before = State {
        operands: [reversed(&q, 1), reversed(&k, 0), reversed(&v, 0)].map(|x| as_batch(&x)),
        out: as_batch(&reversed(&out, 1)),
        log_sum_exp: sums.narrow(1, 1, n - 1).flip([3]).view([-1, h, window]),
    };
    let gradients_before = kernel.backward(&before, &as_batch(&reversed(&grad, 1)), None)?;
    let gradients = gradients.map(|gradient| gradient.contiguous().view(size.as_slice()));
    // Queries look back, keys and values are looked at.
    for ((gradient, part), first) in gradients.iter().zip(gradients_before).zip([1, 0, 0]) {
        add_reversed(gradient, &part.contiguous().view([b, n - 1, window, h, d]), first);
    }
    Ok(gradients.map(|gradient| gradient.view([b, n * window, h, d]).narrow(1, 0, t).contiguous()))
}

// ---------------------------------------------------------------------------------------------------------------------
// The choice
// ---------------------------------------------------------------------------------------------------------------------

/// What a choice depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Call {
    device: Device,
    kind: Kind,
    t: i64,
    h: i64,
    g: i64,
    d: i64,
    window: usize,
}

/// Most elements of the queries with which ways are timed.
const TIMED_ELEMENTS: i64 = 1 << 27;
/// Tokens of a forward pass that are worth a search for a fused kernel though no backward pass will follow.
const TOKENS_WORTH_A_SEARCH: i64 = 1 << 12;
/// Times that each way is timed, and calls each time: in training, too, one call is started while another is computed.
const TIMED_RUNS: u32 = 3;
const CALLS_A_RUN: u32 = 3;
/// Largest relative error of a way's output and gradients in bfloat16, whose own rounding is about a third of it.
const LARGEST_ERROR_BF16: f64 = 2e-2;
/// The same in float32.
const LARGEST_ERROR_F32: f64 = 1e-4;

type Choices = HashMap<Call, (Option<Plan>, String)>;

fn choices() -> &'static Mutex<Choices> {
    static CHOICES: OnceLock<Mutex<Choices>> = OnceLock::new();
    CHOICES.get_or_init(Mutex::default)
}

/// What was chosen so far and what each way took, one line a choice.
pub fn report() -> Vec<String> {
    let choices = choices().lock().unwrap_or_else(PoisonError::into_inner);
    let mut lines: Vec<String> = choices.values().map(|(_, line)| line.clone()).collect();
    lines.sort();
    lines
}

/// The fastest way for operands like these on their device, measured at the first call; none where no fused kernel will do.
///
/// The batch size of the first call is taken for that of all.
pub fn plan(q: &Tensor, k: &Tensor, window: usize) -> Option<Plan> {
    let call = Call::new(q, k, window);
    let mut choices = choices().lock().unwrap_or_else(PoisonError::into_inner);
    choices.entry(call).or_insert_with(|| call.choose(q.size()[0])).0
}

/// A right way without a backward pass to come: the first, not the fastest, so that an evaluation's rounding does not hang
/// on a stopwatch. A short call is not worth the search, which writing text would make anew for every token.
pub fn inference_plan(q: &Tensor, k: &Tensor, window: usize) -> Option<Plan> {
    static FIRST: OnceLock<Mutex<HashMap<Call, Option<Plan>>>> = OnceLock::new();
    if q.size()[0] * q.size()[1] < TOKENS_WORTH_A_SEARCH {
        return None;
    }
    let call = Call::new(q, k, window);
    let mut first = FIRST.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    *first
        .entry(call)
        .or_insert_with(|| call.candidates().into_iter().find(|&plan| Sample::new(&call).check(plan).is_ok()))
}

impl Call {
    fn new(q: &Tensor, k: &Tensor, window: usize) -> Self {
        let (size, g) = (q.size(), k.size()[2]);
        let (t, h, d) = (size[1], size[2], size[3]);
        Self { device: q.device(), kind: q.kind(), t, h, g, d, window: window.min(t as usize) }
    }

    fn is_full(&self) -> bool {
        self.window as i64 >= self.t - 1
    }

    fn candidates(&self) -> Vec<Plan> {
        let kernels: &[Kernel] =
            if self.device.is_cuda() { &[Kernel::Flash, Kernel::Cudnn, Kernel::Efficient] } else { &[Kernel::Cpu] };
        let with = |windowing| kernels.iter().map(move |&kernel| Plan { kernel, windowing });
        match self.window {
            _ if self.is_full() => with(Windowing::Full).collect(),
            // A block of no tokens: each query sees only itself.
            0 => Vec::new(),
            _ => {
                let native = with(Windowing::Native).filter(|plan| plan.kernel.takes_windows());
                native.chain(with(Windowing::Blocks)).collect()
            }
        }
    }

    fn choose(&self, b: i64) -> (Option<Plan>, String) {
        let what = format!("attention of {} heads of {}, context {}, window {}", self.h, self.d, self.t, self.window);
        let start = Instant::now();
        let mut timed: Vec<(Plan, Duration)> = Vec::new();
        let mut problems = Vec::new();
        for plan in self.candidates() {
            // A sample of its own: in memory that is used again, a kernel that does nothing would leave the right numbers.
            match Sample::new(self).check(plan).and_then(|()| self.time(plan, b)) {
                Ok(time) => timed.push((plan, time)),
                Err(problem) => problems.push(format!("{plan}: {problem}")),
            }
        }
        timed.sort_by_key(|&(_, time)| time);
        tracing::debug!("{what}: chosen in {:.2?}; not used: {problems:?}", start.elapsed());
        let Some(&(fastest, _)) = timed.first() else {
            if self.window > 0 {
                tracing::warn!(
                    "{what}: none of libtorch's fused kernels will do ({}); hint: training goes on with plain operations, right but much slower",
                    problems.join("; ")
                );
            }
            return (None, format!("{what}: plain operations"));
        };
        let times: Vec<String> =
            timed.iter().map(|(plan, time)| format!("{plan} {:.2} ms", time.as_secs_f64() * 1e3)).collect();
        (Some(fastest), format!("{what}: {fastest} (forward and backward: {})", times.join(", ")))
    }

    fn random(&self, b: i64, t: i64, heads: i64) -> Tensor {
        Tensor::randn([b, t, heads, self.d], (self.kind, self.device))
    }

    fn synchronize(&self) {
        if let Device::Cuda(index) = self.device {
            tch::Cuda::synchronize(index as i64);
        }
    }

    /// Median time of forward and backward.
    fn time(&self, plan: Plan, b: i64) -> Result<Duration, String> {
        let b = b.min(TIMED_ELEMENTS / (self.t * self.h * self.d)).max(1);
        let [q, k, v] = [self.h, self.g, self.g].map(|heads| self.random(b, self.t, heads));
        let grad = self.random(b, self.t, self.h);
        let call = || -> Result<(), String> {
            let (out, log_sum_exp) = plan.forward(&q, &k, &v, self.window)?;
            let operands = [&q, &k, &v].map(Tensor::shallow_clone);
            plan.backward(State { operands, out, log_sum_exp }, &grad, self.window).map(drop)
        };
        let run = || -> Result<Duration, String> {
            self.synchronize();
            let start = Instant::now();
            (0..CALLS_A_RUN).try_for_each(|_| call())?;
            self.synchronize();
            Ok(start.elapsed() / CALLS_A_RUN)
        };
        // Libraries prepare themselves at the first call.
        call()?;
        let mut times: Vec<Duration> = (0..TIMED_RUNS).map(|_| run()).collect::<Result<_, _>>()?;
        times.sort();
        Ok(times[times.len() / 2])
    }
}

/// One row of a call, with numbers of its own, and what the portable body makes of it in float32.
pub struct Sample {
    window: usize,
    operands: Operands,
    grad: Tensor,
    /// Output, log-sum-exp, gradients of queries, keys and values.
    expected: [TchTensor; 5],
    largest_error: f64,
}

impl Sample {
    /// A sample of the call's own length and window: libraries have other kernels for other sizes.
    fn new(call: &Call) -> Self {
        let operands = [call.h, call.g, call.g].map(|heads| call.random(1, call.t, heads));
        Self::of(operands, call.random(1, call.t, call.h), call.window)
    }

    /// The sample with these operands and this gradient of the output.
    pub fn of(operands: Operands, grad: Tensor, window: usize) -> Self {
        // Copies, since what is one tensor to libtorch must be one to burn.
        let wide = |x: &Tensor| TchTensor::new(x.to_kind(Kind::Float).copy());
        let [q, k, v] = operands.each_ref().map(wide);
        let (out, log_sum_exp) = portable::attention_forward::<LibTorch>(q.clone(), k.clone(), v.clone(), window);
        let state = AttentionState { q, k, v, out: out.clone(), log_sum_exp: log_sum_exp.clone(), window };
        let [dq, dk, dv] = portable::attention_backward::<LibTorch>(state, wide(&grad));
        let expected = [out, log_sum_exp, dq, dk, dv];
        let largest_error = if grad.kind() == Kind::Float { LARGEST_ERROR_F32 } else { LARGEST_ERROR_BF16 };
        Self { window, operands, grad, expected, largest_error }
    }

    /// Whether `plan` computes what the portable body does.
    ///
    /// # Errors
    /// What differs and by how much, or what libtorch says.
    pub fn check(&self, plan: Plan) -> Result<(), String> {
        let [q, k, v] = &self.operands;
        let (out, log_sum_exp) = plan.forward(q, k, v, self.window)?;
        let operands = self.operands.each_ref().map(Tensor::shallow_clone);
        let state = State { operands, out: out.shallow_clone(), log_sum_exp: log_sum_exp.shallow_clone() };
        let [dq, dk, dv] = plan.backward(state, &self.grad, self.window)?;
        let names = ["output", "log-sum-exp", "gradient of q", "gradient of k", "gradient of v"];
        for ((name, found), expected) in names.iter().zip([out, log_sum_exp, dq, dk, dv]).zip(&self.expected) {
            let (error, largest) = (relative_error(&found, &expected.tensor), self.largest_error);
            // Not a number is an error too.
            if error.is_nan() || error > largest {
                return Err(format!("expected a relative error of the {name} up to {largest}, found {error:.2e}"));
            }
        }
        Ok(())
    }
}

/// ‖found − expected‖ / ‖expected‖, or ‖found‖ where `expected` is zero; `expected` in float32.
pub fn relative_error(found: &Tensor, expected: &Tensor) -> f64 {
    let difference = (found.to_kind(Kind::Float) - expected).norm().double_value(&[]);
    let norm = expected.norm().double_value(&[]);
    if norm == 0.0 { difference } else { difference / norm }
}
