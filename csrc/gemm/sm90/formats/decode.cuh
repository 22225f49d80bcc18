// Parts that decoders of packed weights share: two 16-bit numbers in each register.
//
// Values are not converted: their bits are moved to the place of exponent and mantissa in a 16-bit
// float, whose exponent is then too small by a constant. The scale, which has to multiply them
// anyway, and Decoder::kFactor make up for it. So subnormal values are exact as well.
#pragma once

#include "csrc/gemm/args.h"
#include "csrc/gemm/sm90/formats/plain.cuh"

namespace jaxmoe {

// Place of a thread's rows, 16 warp + lane / 4 and 8 more, in a strip of scales.
struct StripSite {
  int index;

  __device__ __forceinline__ StripSite(const PackedArgs&, int thread)
      : index(thread / 32 * 8 + thread % 32 / 4) {}
};

// What traits of packed weights share: tokens are plain, and so are weights once they are decoded.
template <class Element, Packing kPacking_, int kStripBytes_>
struct PackedWeights : Plain<Element> {
  static constexpr Scaling kScaling = Scaling::kWeight;
  static constexpr Packing kPacking = kPacking_;
  static constexpr int kValueBytes = PackedLayout{kPacking_}.value_bytes();
  static constexpr int kStripBytes = kStripBytes_;
  // Accumulators and decoding need the registers of warps that would fetch rows.
  static constexpr bool kGathersByThreads = false;
  // Rows of X may have scales, beside the formats that have such tokens.
  static constexpr bool kRowScales =
      kPacking_ == Packing::kMxfp4 || kPacking_ == Packing::kNvfp4 || kPacking_ == Packing::kInt4;
  using Symmetric = void;  // a faster Decoder where there are no zero points
  static constexpr bool kTokenSums = false;
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

// a * b + c, rounded once.
template <class Element>
__device__ __forceinline__ uint32_t MultiplyAdd2(uint32_t a, uint32_t b, uint32_t c) {
  Pair<Element> sum = __hfma2(AsPair<Element>(a), AsPair<Element>(b), AsPair<Element>(c));
  return reinterpret_cast<uint32_t&>(sum);
}

template <class Element>
__device__ __forceinline__ uint32_t Add2(uint32_t a, uint32_t b) {
  Pair<Element> sum = __hadd2(AsPair<Element>(a), AsPair<Element>(b));
  return reinterpret_cast<uint32_t&>(sum);
}

// Twice the number of the row that register `j` of an operand has; `rows` has one for each row of a
// thread. Takes no instruction: others read one half of a register twice.
template <class Element>
__device__ __forceinline__ uint32_t OfRow(uint32_t rows, int j) {
  Pair<Element> both;
  if constexpr (std::is_same_v<Element, __half>) {
    both = j % 2 == 0 ? __low2half2(AsPair<Element>(rows)) : __high2half2(AsPair<Element>(rows));
  } else {
    both = j % 2 == 0 ? __low2bfloat162(AsPair<Element>(rows))
                      : __high2bfloat162(AsPair<Element>(rows));
  }
  return reinterpret_cast<uint32_t&>(both);
}

// Scales of the rows of a thread for each 32 of k, whose bytes are [row][half a step]: 2^(byte -
// 127) in bf16. In fp16 2^(byte - 238), 0 if that is too small.
template <class Element>
__device__ __forceinline__ uint32_t PowersOfTwo(uint32_t bytes, int half) {
  if constexpr (std::is_same_v<Element, __half>) {
    constexpr int kBias = 223;
    uint32_t rows = 0;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int byte = bytes >> (16 * row + 8 * half) & 0xFF;
      rows |= static_cast<uint32_t>(min(max(byte - kBias, 0), 31)) << (16 * row + 10);
    }
    return rows;
  } else {
    return half == 0 ? (bytes & 0x00FF00FF) << 7 : (bytes >> 1) & 0x7F807F80;
  }
}

// A power of two for each 32 of k, so one a row in half a step.
template <class Element, Packing kPacking_>
struct PackedWithPowers : PackedWeights<Element, kPacking_, 128> {
  struct Scales {
    uint32_t bytes;  // [row][half]
  };

  using Site = StripSite;

  static __device__ __forceinline__ Scales LoadScales(const uint8_t* strip, const Site& site, int) {
    return {reinterpret_cast<const uint32_t*>(strip)[site.index]};
  }
};

// Eight of the sixteen e2m1 values of two words, times 2^-126 in bf16 and 2^-14 in fp16. Three
// times two of a word are a rotation and a mask away. The bits that are left, put together, are
// those of two values of the first word and of two of the second.
template <class Element>
__device__ __forceinline__ void DecodeE2m1(const uint32_t* words, int part, uint32_t (&a)[4]) {
  constexpr uint32_t kValue = 0x81C081C0;  // sign, two bits of exponent, one of mantissa
  constexpr uint32_t kLeft = 0x60306030;
  const uint32_t word = words[part];
  a[0] = word & kValue;
  a[1] = (word << 6) & kValue;
  a[2] = __funnelshift_l(word, word, 12) & kValue;
  uint32_t left;  // (words[0] & kLeft) | (the other & ~kLeft), which ptxas would make two
  asm("lop3.b32 %0, %1, %2, %3, 0xE4;"
      : "=r"(left)
      : "r"(words[0]), "r"(__funnelshift_l(words[1], words[1], 2)), "r"(kLeft));
  a[3] = (part == 0 ? left << 2 : __funnelshift_r(left, left, 8)) & kValue;
  if constexpr (std::is_same_v<Element, __half>) {
#pragma unroll
    for (int j = 0; j < 4; ++j) a[j] = (a[j] & 0x80008000) | ((a[j] << 3) & 0x0E000E00);
  }
}

}  // namespace jaxmoe
