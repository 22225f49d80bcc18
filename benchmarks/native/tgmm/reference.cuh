// Elements of a weight gradient against sums in float64, and operands that make mistakes show.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "benchmarks/native/workload.cuh"
#include "csrc/common/ptx.cuh"
#include "csrc/weight_grad/tgmm.h"

namespace jaxmoe::bench {

// What the kernel is asked for, as the reference reads it. Groups are in bounds.
struct TgmmReference {
  const void* x;
  const void* dy;
  const void* dw;
  const void* old;    // dw before an accumulation, or null
  const int* starts;  // [num_groups]
  const int* sizes;   // [num_groups]
  int num_weights;
  int num_groups;
  int k;
  int n;
};

struct TgmmErrors {
  double error;                   // squared, of finite elements
  double reference;               // squared
  double worst;                   // largest error over what its terms may round to
  unsigned long long not_finite;  // NaN or infinity on one side only
  unsigned long long not_zero;    // of weights without rows
};

template <class Element>
__device__ inline float LoadFloat(const void* at, int64_t i) {
  if constexpr (sizeof(Element) == 4) {
    return static_cast<const float*>(at)[i];
  } else {
    return ptx::ToFloat(static_cast<const Element*>(at)[i]);
  }
}

__device__ inline void AtomicMax(double* at, double value) {  // of values that are not negative
  atomicMax(reinterpret_cast<unsigned long long*>(at),
            static_cast<unsigned long long>(__double_as_longlong(value)));
}

// A warp an element, of every `stride`-th.
template <class Element, class Out>
__global__ void TgmmReferenceKernel(TgmmReference p, int64_t stride, TgmmErrors* errors) {
  const int64_t warps = static_cast<int64_t>(gridDim.x) * blockDim.x / 32;
  const int64_t count = static_cast<int64_t>(p.num_weights) * p.k * p.n;
  const int lane = threadIdx.x % 32;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  for (int64_t at = first * stride; at < count; at += warps * stride) {
    const int weight = at / (static_cast<int64_t>(p.k) * p.n);
    const int k = at / p.n % p.k;
    const int n = at % p.n;
    double sum = 0, magnitude = 0;
    bool any = false;
    for (int g = weight; g < p.num_groups; g += p.num_weights) {
      any |= p.sizes[g] > 0;
      for (int t = p.starts[g] + lane; t < p.starts[g] + p.sizes[g]; t += 32) {
        const double a = LoadFloat<Element>(p.x, static_cast<int64_t>(t) * p.k + k);
        const double b = LoadFloat<Element>(p.dy, static_cast<int64_t>(t) * p.n + n);
        sum += a * b;
        magnitude += fabs(a * b);
      }
    }
    for (int o = 16; o > 0; o /= 2) {
      sum += __shfl_xor_sync(~0u, sum, o);
      magnitude += __shfl_xor_sync(~0u, magnitude, o);
    }
    if (lane > 0) continue;
    const double got = LoadFloat<Out>(p.dw, at);
    const double old = p.old != nullptr ? LoadFloat<Out>(p.old, at) : 0.0;
    if (!any) {
      if (got != old) atomicAdd(&errors->not_zero, 1ull);
      continue;
    }
    sum += old;
    magnitude += fabs(old);
    if (!isfinite(sum) || !isfinite(got)) {
      if (isnan(sum) != isnan(got)) atomicAdd(&errors->not_finite, 1ull);
      continue;
    }
    const double ulp = sizeof(Out) == 4                                               ? 0x1p-23
                       : sizeof(Out) == sizeof(__half) && std::is_same_v<Out, __half> ? 0x1p-10
                                                                                      : 0x1p-7;
    const double bound = ulp * fabs(sum) + 0x1p-18 * magnitude + 1e-7;
    AtomicMax(&errors->worst, fabs(got - sum) / bound);
    atomicAdd(&errors->error, (got - sum) * (got - sum));
    atomicAdd(&errors->reference, sum * sum);
  }
}

template <class Element, class Out>
TgmmErrors CompareWithReference(const TgmmReference& p, int64_t stride, cudaStream_t stream) {
  DeviceArray<TgmmErrors> errors(1);
  BENCH_CHECK_CUDA(cudaMemsetAsync(errors.get(), 0, errors.bytes(), stream));
  TgmmReferenceKernel<Element, Out><<<2048, 256, 0, stream>>>(p, stride, errors.get());
  BENCH_CHECK_CUDA(cudaGetLastError());
  TgmmErrors host;
  BENCH_CHECK_CUDA(
      cudaMemcpyAsync(&host, errors.get(), sizeof(host), cudaMemcpyDeviceToHost, stream));
  BENCH_CHECK_CUDA(cudaStreamSynchronize(stream));
  return host;
}

// Normal values; whole rows are NaN where `nan_rows` (or null) says so.
template <class Element>
__global__ void FillRowsKernel(
    Element* out, int64_t rows, int64_t columns, uint64_t seed, const uint8_t* nan_rows) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < rows * columns;
       i += stride) {
    const uint64_t key = i * 2 + seed * 0x9E3779B97F4A7C15ULL;
    const float u1 = (Hash(key) + 1.0f) * 2.3283e-10f;  // in (0, 1)
    const float u2 = Hash(key + 1) * 2.3283e-10f;
    float value = sqrtf(-2 * __logf(u1)) * __cosf(6.2831853f * u2);
    if (nan_rows != nullptr && nan_rows[i / columns]) value = NAN;
    if constexpr (sizeof(Element) == 4) {
      out[i] = value;
    } else {
      out[i] = ptx::FromFloat<Element>(value);
    }
  }
}

template <class Element>
void FillRows(void* out,
              int64_t rows,
              int64_t columns,
              uint64_t seed,
              const uint8_t* nan_rows,
              cudaStream_t stream) {
  FillRowsKernel<<<2048, 256, 0, stream>>>(
      static_cast<Element*>(out), rows, columns, seed, nan_rows);
  BENCH_CHECK_CUDA(cudaGetLastError());
}

template <class T>
DeviceArray<T> ToDevice(const std::vector<T>& values) {
  DeviceArray<T> out(std::max<size_t>(values.size(), 1));
  BENCH_CHECK_CUDA(
      cudaMemcpy(out.get(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return out;
}

}  // namespace jaxmoe::bench
