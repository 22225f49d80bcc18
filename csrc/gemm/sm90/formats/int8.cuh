// Weights of eight bits with a float32 scale for each row, which multiplies their sums.
#pragma once

#include "csrc/gemm/sm90/formats/decode.cuh"

namespace jaxmoe {

template <class Element>
struct Int8 : PackedWeights<Element, Packing::kInt8, 0> {
  static constexpr float kFactor = SumFactor(Packing::kInt8, DTypeOf<Element>());

  struct Scales {};

  using Site = StripSite;

  static __device__ __forceinline__ Scales LoadScales(const uint8_t*, const Site&, int) {
    return {};
  }

  static __device__ __forceinline__ void Decode(
      const uint32_t* words, const Scales&, const Site&, int, int, uint32_t (&a)[4]) {
    // 128 or 1024 plus seven bits, less the same plus the sign's 128.
    constexpr uint32_t kOne = std::is_same_v<Element, __half> ? 0x64006400 : 0x43004300;
    constexpr uint32_t kMinus = 0x80008000;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t bits = words[j / 2] >> (j % 2 * 8);
      a[j] = Add2<Element>((bits & 0x007F007F) | kOne, (bits & 0x00800080) | kOne | kMinus);
    }
  }
};

}  // namespace jaxmoe
