// What the `tch` crate does not bind: libtorch's fused attention kernels with their log-sum-exp, forward and backward, and
// copies to a GPU that nothing waits for.
//
// No header of a GPU's maker is needed: builds for CUDA and for ROCm compile this alike. Queries, keys, values and their
// gradients are [b, t, h, d], the log-sum-exp is [b, h, t] in float32. Each function returns null or a message that stays
// valid until the thread's next call.

#include <ATen/ops/_efficient_attention_backward.h>
#include <ATen/ops/_efficient_attention_forward.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <exception>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

namespace {

// As `Kernel` in attention.rs counts them.
enum Kernel { FLASH = 0, CUDNN = 1, EFFICIENT = 2, CPU = 3 };

using at::Tensor;
using Scale = std::optional<double>;
using Window = std::optional<int64_t>;

// In the efficient kernels: a query sees the keys up to its own place.
constexpr int64_t CAUSAL = 1;
// CUDA's efficient kernels keep room for a multiple of this many queries' log-sum-exps, ROCm's for as many as there are.
#ifdef AUTORESEARCH_HIP
constexpr int64_t SUM_ALIGNMENT = 1;
#else
constexpr int64_t SUM_ALIGNMENT = 32;
#endif

Window window_left(int64_t window) { return window < 0 ? Window() : Window(window); }
Window window_right(int64_t window) { return window < 0 ? Window() : Window(0); }

std::pair<Tensor, Tensor> forward(int kernel, const Tensor& q, const Tensor& k, const Tensor& v, int64_t window) {
    const auto t = q.size(1);
    switch (kernel) {
        case FLASH: {
            auto result = at::_flash_attention_forward(q, k, v, std::nullopt, std::nullopt, t, t, 0.0, true, false, Scale(),
                                                       window_left(window), window_right(window));
            return {std::get<0>(result), std::get<1>(result)};
        }
        case CUDNN: {
            auto result = at::_scaled_dot_product_cudnn_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                                                  std::nullopt, true, 0.0, true, false);
            auto log_sum_exp = std::get<1>(result);
            return {std::get<0>(result).transpose(1, 2), log_sum_exp.dim() == 4 ? log_sum_exp.squeeze(-1) : log_sum_exp};
        }
        case EFFICIENT: {
            auto result = at::_efficient_attention_forward(q, k, v, std::nullopt, std::nullopt, std::nullopt, std::nullopt,
                                                           std::nullopt, 0.0, CAUSAL, true);
            return {std::get<0>(result), std::get<1>(result).slice(2, 0, t)};
        }
        case CPU: {
            auto result = at::_scaled_dot_product_flash_attention_for_cpu(q.transpose(1, 2), k.transpose(1, 2),
                                                                          v.transpose(1, 2), 0.0, true);
            return {std::get<0>(result).transpose(1, 2), std::get<1>(result)};
        }
    }
    TORCH_CHECK(false, "no attention kernel has the number ", kernel);
}

std::tuple<Tensor, Tensor, Tensor> backward(int kernel, const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Tensor& out, const Tensor& log_sum_exp, int64_t window) {
    const auto t = q.size(1);
    // State of the random numbers for dropout, of which there is none.
    const auto seed = at::empty({}, q.options().dtype(at::kLong)), offset = at::empty({}, q.options().dtype(at::kLong));
    switch (kernel) {
        case FLASH:
            return at::_flash_attention_backward(grad, q, k, v, out, log_sum_exp, Tensor(), Tensor(), t, t, 0.0, true, seed,
                                                 offset, Scale(), window_left(window), window_right(window));
        case CUDNN: {
            auto [dq, dk, dv] = at::_scaled_dot_product_cudnn_attention_backward(
                grad.transpose(1, 2), q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), out.transpose(1, 2),
                log_sum_exp.unsqueeze(-1), seed, offset, Tensor(), Tensor(), Tensor(), t, t, 0.0, true);
            return {dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)};
        }
        case EFFICIENT: {
            const auto missing = (SUM_ALIGNMENT - t % SUM_ALIGNMENT) % SUM_ALIGNMENT;
            const auto padded = at::constant_pad_nd(log_sum_exp, {0, missing}, std::numeric_limits<double>::infinity());
            auto result = at::_efficient_attention_backward(grad, q, k, v, std::nullopt, out, std::nullopt, std::nullopt, t, t,
                                                            padded, 0.0, seed, offset, CAUSAL, false);
            return {std::get<0>(result), std::get<1>(result), std::get<2>(result)};
        }
        case CPU: {
            auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
                grad.transpose(1, 2), q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), out.transpose(1, 2), log_sum_exp,
                0.0, true);
            return {dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)};
        }
    }
    TORCH_CHECK(false, "no attention kernel has the number ", kernel);
}

template <typename Body>
const char* guarded(Body body) {
    thread_local std::string message;
    try {
        body();
        return nullptr;
    } catch (const c10::Error& error) {
        message = error.what_without_backtrace();
    } catch (const std::exception& error) {
        message = error.what();
    } catch (...) {
        message = "an exception without a description";
    }
    return message.c_str();
}

}  // namespace

// `window`: tokens back that a query sees, negative for all; only the flash kernel takes one. `outputs`: the output and the
// log-sum-exp, owned by the caller.
extern "C" const char* autoresearch_attention_forward(int kernel, const Tensor* q, const Tensor* k, const Tensor* v,
                                                      int64_t window, Tensor** outputs) {
    return guarded([&] {
        auto [out, log_sum_exp] = forward(kernel, *q, *k, *v, window);
        outputs[0] = new Tensor(std::move(out));
        outputs[1] = new Tensor(std::move(log_sum_exp));
    });
}

// `outputs`: the gradients of q, k and v, owned by the caller.
extern "C" const char* autoresearch_attention_backward(int kernel, const Tensor* grad, const Tensor* q, const Tensor* k,
                                                       const Tensor* v, const Tensor* out, const Tensor* log_sum_exp,
                                                       int64_t window, Tensor** outputs) {
    return guarded([&] {
        auto [dq, dk, dv] = backward(kernel, *grad, *q, *k, *v, *out, *log_sum_exp, window);
        outputs[0] = new Tensor(std::move(dq));
        outputs[1] = new Tensor(std::move(dk));
        outputs[2] = new Tensor(std::move(dv));
    });
}

// `output`: `count` numbers on the GPU `device`, owned by the caller. They go through memory that the GPU reads by itself: a
// copy from other memory waits for all that was started before, and some drivers take milliseconds to prepare it.
extern "C" const char* autoresearch_upload(const int64_t* numbers, int64_t count, int device, Tensor** output) {
    return guarded([&] {
        auto pinned = at::empty({count}, at::TensorOptions().dtype(at::kLong).pinned_memory(true));
        std::memcpy(pinned.data_ptr(), numbers, count * sizeof(int64_t));
        const auto there = at::Device(at::kCUDA, static_cast<at::DeviceIndex>(device));
        *output = new Tensor(pinned.to(there, at::kLong, /*non_blocking=*/true));
    });
}
