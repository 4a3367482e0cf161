//! Attention through libtorch's fused kernels, with real sliding windows; `choice` says by which of them.
//!
//! Only some kernels know windows, and some builds take one and ignore it. Any causal kernel can do them in blocks as long
//! as the window: a query sees its own block up to itself, and of the block before the part from its own place on, which
//! becomes causal with time reversed. The two parts are merged by their log-sum-exp; backward kernels take the merged output
//! and log-sum-exp for either part (Dao et al. 2022, "FlashAttention": they enter as they are).

use super::kernels;
use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::ptr::null_mut;
use tch::{Kind, Tensor};
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
    /// Whether it may take a window by itself.
    pub fn takes_windows(self) -> bool {
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
