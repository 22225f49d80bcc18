// Weights of four bits, minus 8 or a zero point, times a 16-bit scale for each group of k. Their
// product is rounded once in bf16.
#pragma once

#include "csrc/gemm/sm90/formats/decode.cuh"

namespace jaxmoe {

template <class Element>
struct Int4 : PackedWeights<Element, Packing::kInt4, 384> {
  static constexpr float kFactor = 1.0f;

  struct Scales {
    uint32_t scale;  // of the rows
    uint32_t zeros;  // bytes
  };

  static __device__ __forceinline__ Scales LoadScales(const uint8_t* strip,
                                                      int site,
                                                      int half,
                                                      const PackedArgs& packed) {
    const int at = packed.by_32 ? 2 * site + half : site;
    Scales s;
    s.scale = reinterpret_cast<const uint32_t*>(strip)[at];
    s.zeros = 0x0808;
    if (packed.has_zeros) {
      s.zeros = reinterpret_cast<const uint16_t*>(strip + (packed.by_32 ? 256 : 128))[at];
    }
    return s;
  }

  static __device__ __forceinline__ void Decode(const uint32_t* word,
                                                const Scales& scales,
                                                int,
                                                uint32_t (&a)[4]) {
    // A number whose last bit of mantissa is 1; 128 or 1024 plus what is added to its bits.
    constexpr uint32_t kOne = std::is_same_v<Element, __half> ? 0x64006400 : 0x43004300;
    constexpr uint32_t kMinus = 0x80008000;
    const uint32_t zero[2] = {kMinus | kOne | ByteInHalves<0>(scales.zeros),
                              kMinus | kOne | ByteInHalves<1>(scales.zeros)};
    const uint32_t by[2] = {HalfInHalves<0>(scales.scale), HalfInHalves<1>(scales.scale)};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t q = ((*word >> (4 * j)) & 0x000F000F) | kOne;
      a[j] = Multiply2<Element>(Add2<Element>(q, zero[j % 2]), by[j % 2]);
    }
  }
};

}  // namespace jaxmoe
