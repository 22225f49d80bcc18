// Weights of e2m1 with an e4m3 scale for each 16 of k and a float32 one for each weight: exact.
#pragma once

#include "csrc/gemm/sm90/formats/decode.cuh"

namespace jaxmoe {

template <class Element>
struct Nvfp4 : PackedWeights<Element, Packing::kNvfp4, 256> {
  static constexpr float kFactor =
      SumFactor(Packing::kNvfp4, DTypeOf<Element>());  // of both elements, see Scale

  struct Scales {
    uint32_t bytes;  // [row][group]
  };

  using Site = StripSite;

  static __device__ __forceinline__ Scales LoadScales(const uint8_t* strip,
                                                      const Site& site,
                                                      int half) {
    return {reinterpret_cast<const uint32_t*>(strip)[2 * site.index + half]};
  }

  static __device__ __forceinline__ void Decode(
      const uint32_t* words, const Scales& scales, const Site&, int, int part, uint32_t (&a)[4]) {
    DecodeE2m1<Element>(words, part, a);
    const uint32_t rows = Scale(scales.bytes, part);
#pragma unroll
    for (int j = 0; j < 4; ++j) a[j] = Multiply2<Element>(a[j], OfRow<Element>(rows, j));
  }

 private:
  // A byte is 5 bits of exponent and 3 of mantissa, 2^(e - 9) (1 + m / 8): times 2^119 in bf16 and
  // 2^7 in fp16.
  static __device__ __forceinline__ uint32_t Scale(uint32_t bytes, int part) {
    constexpr bool kHalf = std::is_same_v<Element, __half>;
    constexpr uint32_t kLow = 0x00FF00FF;
    constexpr int kShift = kHalf ? 7 : 4;
    const uint32_t bits =
        part == 0 ? (bytes & kLow) << kShift : (bytes >> (8 - kShift)) & (kLow << kShift);
    return bits + (kHalf ? 0x34003400 : 0x76807680);
  }
};

}  // namespace jaxmoe
