// Weights of e4m3 with a power of two for each 32 of k: exact in bf16.
#pragma once

#include "csrc/gemm/sm90/formats/decode.cuh"

namespace jaxmoe {

template <class Element>
struct Mxfp8 : PackedWithPowers<Element, Packing::kMxfp8> {
  // bf16: 2^-120 of the values, 2^126 of the scales. fp16: 2^-8 and 2^15; scales below 2^-29 of the
  // largest of an expert are zero there.
  static constexpr float kFactor = SumFactor(Packing::kMxfp8, DTypeOf<Element>());

  using typename PackedWithPowers<Element, Packing::kMxfp8>::Scales;
  using typename PackedWithPowers<Element, Packing::kMxfp8>::Site;

  static __device__ __forceinline__ void Decode(
      const uint32_t* words, const Scales& scales, const Site&, int half, int, uint32_t (&a)[4]) {
    constexpr bool kHalf = std::is_same_v<Element, __half>;
    constexpr uint32_t kSign = 0x80008000;
    constexpr uint32_t kMagnitude = kHalf ? 0x3F803F80 : 0x07F007F0;
    const uint32_t powers = PowersOfTwo<Element>(scales.bytes, half);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // The byte in the upper half of 16 bits.
      const uint32_t bits = j % 2 == 0 ? words[j / 2] << 8 : words[j / 2];
      const uint32_t value = (bits & kSign) | ((bits >> (kHalf ? 1 : 4)) & kMagnitude);
      a[j] = Multiply2<Element>(value, OfRow<Element>(powers, j));
    }
  }
};

}  // namespace jaxmoe
