// Weights of e2m1 with an e4m3 scale for each 16 of k and a float32 one for each weight: exact.
#pragma once

#include "csrc/gemm/sm90/formats/decode.cuh"

namespace jaxmoe {

template <class Element>
struct Nvfp4 : PackedWeights<Element, Packing::kNvfp4, 256> {
  static constexpr float kFactor = 128.0f;  // of both elements, see Scale

  struct Scales {
    uint32_t bytes;  // [group][row]
  };

  static __device__ __forceinline__ Scales LoadScales(const uint8_t* strip,
                                                      int site,
                                                      int half,
                                                      const PackedArgs&) {
    return {reinterpret_cast<const uint32_t*>(strip)[2 * site + half]};
  }

  static __device__ __forceinline__ void Decode(const uint32_t* word,
                                                const Scales& scales,
                                                int part,
                                                uint32_t (&a)[4]) {
    DecodeE2m1<Element>(*word, a);
    const uint32_t bytes = part == 0 ? scales.bytes : scales.bytes >> 16;
    const uint32_t low = Scale(ByteInHalves<0>(bytes));
    const uint32_t high = Scale(ByteInHalves<1>(bytes));
#pragma unroll
    for (int j = 0; j < 4; ++j) a[j] = Multiply2<Element>(a[j], j % 2 == 0 ? low : high);
  }

 private:
  // A byte is 5 bits of exponent and 3 of mantissa, 2^(e - 9) (1 + m / 8): times 2^119 in bf16 and
  // 2^7 in fp16.
  static __device__ __forceinline__ uint32_t Scale(uint32_t byte_in_halves) {
    if constexpr (std::is_same_v<Element, __half>) return (byte_in_halves << 7) + 0x34003400;
    return (byte_in_halves << 4) + 0x76807680;
  }
};

}  // namespace jaxmoe
