// The dynamic scale of FP8 values that share it: their largest finite magnitude over FP8's.
#pragma once

#include <cuda_runtime.h>

namespace jaxmoe {

inline constexpr float kMinQuantScale = 0x1p-126f;  // these and their reciprocals are normal
inline constexpr float kMaxQuantScale = 0x1p126f;
inline constexpr float kLargestE4M3 = 448.0f;
inline constexpr float kLargestE5M2 = 57344.0f;

// Bits of |value|, or 0 if it is not finite. Bits of non-negative floats are ordered as integers.
__device__ __forceinline__ unsigned FiniteMagnitude(float value) {
  const unsigned magnitude = __float_as_uint(value) & 0x7fffffffu;
  return magnitude < 0x7f800000u ? magnitude : 0u;
}

// Scale of values whose largest magnitude has the bits `largest`. All-zero input gets the smallest
// scale, so it quantizes to zero.
__device__ __forceinline__ float QuantScale(unsigned largest, float limit) {
  return fmaxf(__fdiv_rn(__uint_as_float(largest), limit), kMinQuantScale);
}

}  // namespace jaxmoe
