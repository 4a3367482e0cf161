//! Which way to compute attention: the fastest on this device that computes what the portable body does.

use super::super::{AttentionState, portable};
use super::attention::{Kernel, Operands, Plan, State, Windowing};
use burn::backend::LibTorch;
use burn_tch::TchTensor;
use std::collections::HashMap;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tch::{Device, Kind, Tensor};

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
