// What libtorch knows of its GPUs and the `tch` crate does not bind. No CUDA or ROCm header: users have neither, and both
// builds of libtorch offer the same names here. Text goes into the caller's buffer; exceptions end here.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>

namespace {

void write_text(const std::string& from, char* text, size_t capacity) {
  if (capacity == 0) return;
  const size_t length = std::min(from.size(), capacity - 1);
  std::memcpy(text, from.data(), length);
  text[length] = '\0';
}

// Runs `body`; -1 and the message in `text` if it throws.
template <typename Body>
int64_t guarded(char* text, size_t capacity, Body body) noexcept {
  try {
    return body();
  } catch (const c10::Error& error) {
    write_text(error.what_without_backtrace(), text, capacity);
  } catch (const std::exception& error) {
    write_text(error.what(), text, capacity);
  } catch (...) {
    write_text("an exception of unknown type", text, capacity);
  }
  return -1;
}

// Keeps warnings instead of printing them.
class Collector : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { collected += warning.msg() + "\n"; }
  std::string collected;
};

}  // namespace

extern "C" {

// Whether the GPU part of libtorch is in this process: it registers its hooks when it is loaded.
int64_t autoresearch_gpu_part_is_loaded(char* text, size_t capacity) {
  return guarded(text, capacity, [] { return at::CUDAHooksRegistry()->Has("CUDAHooks") ? 1 : 0; });
}

// Number of GPUs that libtorch sees; `text` gets what it warns of while it looks, which it does only the first time.
int64_t autoresearch_gpu_count(char* text, size_t capacity) {
  return guarded(text, capacity, [&] {
    Collector collector;
    int64_t count = 0;
    {
      c10::WarningUtils::WarningHandlerGuard guard(&collector);
      count = at::detail::getCUDAHooks().getNumGPUs();
    }
    write_text(collector.collected, text, capacity);
    return count;
  });
}

// Most bytes that tensors on GPU `index` have taken at a time, as torch.cuda.max_memory_allocated.
int64_t autoresearch_gpu_peak_bytes(int64_t index, char* text, size_t capacity) {
  return guarded(text, capacity, [&]() -> int64_t {
    auto* allocator = c10::getDeviceAllocator(c10::DeviceType::CUDA);
    // Before the first allocation there are no statistics.
    if (!allocator->initialized()) return 0;
    const auto statistics = allocator->getDeviceStats(static_cast<c10::DeviceIndex>(index));
    const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return statistics.allocated_bytes[all].peak;
  });
}

}  // extern "C"
