// FP8 values that share a dynamic scale: their largest finite magnitude over FP8's, and how they
// are rounded.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

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

// Magnitudes are compared as integers, without their signs: two of 16 bits in a word, or one of 32.
template <typename T>
struct Magnitude {
  static constexpr bool kPairs = sizeof(T) == 2;
  static constexpr uint32_t kInfinity = std::is_same_v<T, float>           ? 0x7f800000u
                                        : std::is_same_v<T, __nv_bfloat16> ? 0x7f807f80u
                                                                           : 0x7c007c00u;
  static constexpr uint32_t kNoSign = kPairs ? 0x7fff7fffu : 0x7fffffffu;

  static __device__ __forceinline__ uint32_t Max(uint32_t a, uint32_t b) {
    return kPairs ? __vmaxu2(a, b) : max(a, b);
  }

  static __device__ __forceinline__ uint32_t Finite(uint32_t word) {
    if constexpr (kPairs) {
      return word & __vcmpltu2(word, kInfinity);
    } else {
      return word < kInfinity ? word : 0u;
    }
  }

  static __device__ __forceinline__ bool AllFinite(uint32_t word) { return Finite(word) == word; }

  // Largest of a piece; infinities and NaNs are larger than all others.
  template <bool kOnlyFinite>
  static __device__ __forceinline__ uint32_t OfPiece(uint4 bits) {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = words[i] & kNoSign;
      largest = Max(largest, kOnlyFinite ? Finite(word) : word);
    }
    return largest;
  }

  // The same as the bits of a float. `half`: which of a pair.
  static __device__ __forceinline__ unsigned ToFloat(uint32_t word, unsigned half) {
    if constexpr (!kPairs) {
      return word;
    } else {
      const uint16_t bits = static_cast<uint16_t>(half ? word >> 16 : word);
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        return static_cast<unsigned>(bits) << 16;
      } else {
        return __float_as_uint(__half2float(__half(__half_raw{bits})));
      }
    }
  }
};

// Four values; rounding to nearest even and saturation are the instruction's, NaN stays NaN.
template <__nv_fp8_interpretation_t kInterpretation>
__device__ __forceinline__ uint32_t ToFp8(const float* values, float inverse) {
  uint32_t low = __nv_cvt_float2_to_fp8x2(
      make_float2(values[0] * inverse, values[1] * inverse), __NV_SATFINITE, kInterpretation);
  uint32_t high = __nv_cvt_float2_to_fp8x2(
      make_float2(values[2] * inverse, values[3] * inverse), __NV_SATFINITE, kInterpretation);
  return low | high << 16;
}

}  // namespace jaxmoe
