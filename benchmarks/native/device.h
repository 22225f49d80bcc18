// Device memory and status checks of gemm_bench; a failure ends the program with a message.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <utility>

namespace jaxmoe::bench {

[[noreturn]] inline void Die(const char* file, int line, const char* what, const char* reason) {
  std::fprintf(stderr, "gemm_bench: %s:%d: %s: %s\n", file, line, what, reason);
  std::exit(1);
}

#define BENCH_CHECK_CUDA(expr)                                                           \
  do {                                                                                   \
    if (cudaError_t bench_status = (expr); bench_status != cudaSuccess) {                \
      ::jaxmoe::bench::Die(__FILE__, __LINE__, #expr, cudaGetErrorString(bench_status)); \
    }                                                                                    \
  } while (0)

// For launchers that return null or the reason why nothing was launched.
#define BENCH_CHECK_LAUNCH(expr)                                     \
  do {                                                               \
    if (const char* bench_reason = (expr)) {                         \
      ::jaxmoe::bench::Die(__FILE__, __LINE__, #expr, bench_reason); \
    }                                                                \
  } while (0)

// `count` elements of device memory.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count) : count_(count) {
    BENCH_CHECK_CUDA(cudaMalloc(&data_, bytes()));
  }
  DeviceArray(DeviceArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(other.count_) {}
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { BENCH_CHECK_CUDA(cudaFree(data_)); }

  T* get() const { return data_; }
  size_t count() const { return count_; }
  size_t bytes() const { return count_ * sizeof(T); }

 private:
  T* data_ = nullptr;
  size_t count_;
};

}  // namespace jaxmoe::bench
