// Parts that decoders of packed weights share: two 16-bit numbers in each register.
//
// Values are not converted: their bits are moved to the place of exponent and mantissa in a 16-bit
// float, whose exponent is then too small by a constant. The scale, which has to multiply them
// anyway, and Decoder::kFactor make up for it. So subnormal values are exact as well.
#pragma once

#include "csrc/gemm/args.h"
#include "csrc/gemm/sm90/formats/plain.cuh"

namespace jaxmoe {

// What traits of packed weights share: tokens are plain, and so are weights once they are decoded.
template <class Element, Packing kPacking_, int kStripBytes_>
struct PackedWeights : Plain<Element> {
  static constexpr Scaling kScaling = Scaling::kWeight;
  static constexpr Packing kPacking = kPacking_;
  static constexpr int kValueBytes = PackedLayout{kPacking_}.value_bytes();
  static constexpr int kStripBytes = kStripBytes_;
};

// A power of two for each 32 of k, so one a row in half a step.
template <class Element, Packing kPacking_>
struct PackedWithPowers : PackedWeights<Element, kPacking_, 128> {
  struct Scales {
    uint32_t bytes;  // of the rows
  };

  static __device__ __forceinline__ Scales LoadScales(const uint8_t* strip,
                                                      int site,
                                                      int half,
                                                      const PackedArgs&) {
    return {reinterpret_cast<const uint16_t*>(strip)[2 * site + half]};
  }
};

template <class Element>
using Pair = std::conditional_t<std::is_same_v<Element, __half>, __half2, __nv_bfloat162>;

template <class Element>
__device__ __forceinline__ Pair<Element> AsPair(uint32_t bits) {
  return reinterpret_cast<Pair<Element>&>(bits);
}

template <class Element>
__device__ __forceinline__ uint32_t Multiply2(uint32_t a, uint32_t b) {
  Pair<Element> product = __hmul2(AsPair<Element>(a), AsPair<Element>(b));
  return reinterpret_cast<uint32_t&>(product);
}

template <class Element>
__device__ __forceinline__ uint32_t Add2(uint32_t a, uint32_t b) {
  Pair<Element> sum = __hadd2(AsPair<Element>(a), AsPair<Element>(b));
  return reinterpret_cast<uint32_t&>(sum);
}

// Byte `kIndex` of `word` in the low byte of both halves.
template <int kIndex>
__device__ __forceinline__ uint32_t ByteInHalves(uint32_t word) {
  return __byte_perm(word, 0, 0x4040 | kIndex << 8 | kIndex);
}

// The 16 bits at byte 2 * kIndex of `word` in both halves.
template <int kIndex>
__device__ __forceinline__ uint32_t HalfInHalves(uint32_t word) {
  return __byte_perm(word, 0, kIndex == 0 ? 0x1010 : 0x3232);
}

// Scale of e8m0 weights: 2^(byte - 127) in bf16. In fp16 2^(byte - 238), 0 if that is too small.
template <class Element>
__device__ __forceinline__ uint32_t PowerOfTwo(uint32_t byte_in_halves) {
  if constexpr (std::is_same_v<Element, __half>) {
    constexpr int kBias = 223;
    const int exponent = min(max(static_cast<int>(byte_in_halves & 0xFF) - kBias, 0), 31);
    return static_cast<uint32_t>(exponent) * 0x04000400u;
  } else {
    return byte_in_halves << 7;
  }
}

// The eight e2m1 values of a word, times 2^-126 in bf16 and 2^-14 in fp16.
template <class Element>
__device__ __forceinline__ void DecodeE2m1(uint32_t word, uint32_t (&a)[4]) {
  constexpr uint32_t kValue = 0x81C081C0;  // sign, two bits of exponent, one of mantissa
  a[0] = word & kValue;
  a[1] = (word << 6) & kValue;
  a[2] = __funnelshift_l(word, word, 12) & kValue;
  a[3] = ((word >> 6) & 0x01000100) | ((word << 2) & 0x80C080C0);
  if constexpr (std::is_same_v<Element, __half>) {
#pragma unroll
    for (int j = 0; j < 4; ++j) a[j] = (a[j] & 0x80008000) | ((a[j] << 3) & 0x0E000E00);
  }
}

}  // namespace jaxmoe
