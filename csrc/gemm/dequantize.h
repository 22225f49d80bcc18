// Host contract of decoding packed weights to bf16.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/gemm/formats.h"

namespace jaxmoe {

// out[e][n][k] = the value times its scales, rounded once, as the products decode it.
struct DequantizeParams {
  WeightFormat format = WeightFormat::kMxfp4;  // a packed one
  const void* values = nullptr;                // [num_weights, n / 64, bytes], see PackedLayout
  const float* scales = nullptr;  // [num_weights], or [num_weights, n] where rows have scales
  void* out = nullptr;            // [num_weights, n, k]
  int64_t num_weights = 0;
  int64_t n = 0;  // a multiple of 64
  int64_t k = 0;  // a multiple of 64 and of a superblock
};

cudaError_t LaunchDequantize(const DequantizeParams& params, cudaStream_t stream);

}  // namespace jaxmoe
