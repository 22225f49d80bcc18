// Weights of four bits, minus 8 or a zero point, times a 16-bit scale for each group of k. Their
// product is rounded once in bf16.
//
// In bf16 a code is the mantissa of a subnormal number, 2^-133 of it, so that it takes one mask,
// and scales are multiplied by 2^96 to keep the products normal: scales from 2^32 on become
// infinite, products below 2^-89 subnormal. In fp16 it is added to 1024.
#pragma once

#include "csrc/gemm/sm90/formats/decode.cuh"

namespace jaxmoe {

// With zero points where there are any, or without: then 8 is subtracted. A block takes whole lines
// of 128 bytes, so there is more room than strips need.
template <class Element, bool kZeros = true>
struct Int4 : PackedWeights<Element, Packing::kInt4, 384> {
  using Symmetric = std::conditional_t<kZeros, Int4<Element, false>, void>;

  static constexpr bool kHalf = std::is_same_v<Element, __half>;
  static constexpr float kFactor = SumFactor(Packing::kInt4, DTypeOf<Element>());
  static constexpr uint32_t k16th = kHalf ? 0x2C002C00 : 0x3D803D80;
  static constexpr uint32_t kOne = kHalf ? 0x6400 : 0;  // what codes are added to, as bits

  // Odd values of a thread lie four bits higher in their half of a word, so they are 16 times as
  // large: one shift serves two of them.
  struct Scales {
    uint32_t scale;  // of the rows
    uint32_t other;  // of the rows: -8 times the scale in symmetric bf16, else -kOne - zero point
    uint32_t odd;    // a 16th of the scale in symmetric bf16; in fp16 -64 - zero point
  };

  // Zero points are nibbles behind the scales. A word has those of four scales of a row: [row, 16
  // bits apart][site][half]. The bits of `zeros` in a constant are replaced by them.
  struct Site {
    int scale;   // bytes from the strip to the scales of the first half
    int second;  // and from there to those of the second, bits to their zero points
    int word;    // bytes to the word of the zero points
    int shift;   // bits to those of the first half
    uint32_t zeros;
    uint32_t one;

    __device__ __forceinline__ Site(const PackedArgs& packed, int thread)
        : second(packed.by_32 ? 4 : 0), zeros(packed.has_zeros ? 0x000F000F : 0) {
      const int first = StripSite(packed, thread).index * (packed.by_32 ? 2 : 1);
      scale = 4 * first;
      word = packed.has_zeros ? (packed.by_32 ? 256 : 128) + (first & ~3) : 0;
      shift = 4 * (first % 4);
      one = kOne * 0x10001;
      asm volatile("" : "+r"(one));  // an immediate would be a second one in LOP3
    }
  };

  static __device__ __forceinline__ Scales LoadScales(const uint8_t* strip,
                                                      const Site& site,
                                                      int half) {
    constexpr uint32_t kTwoTo96 = 0x6F806F80;
    constexpr uint32_t kMinusEight = 0x80088008;  // times 2^-133
    constexpr uint32_t kMiddle = kMinusEight | kOne * 0x10001;
    Scales scales{};
    scales.scale = *reinterpret_cast<const uint32_t*>(strip + site.scale + half * site.second);
    if constexpr (!kHalf) scales.scale = Multiply2<Element>(scales.scale, kTwoTo96);
    if constexpr (kZeros) {
      const uint32_t word = *reinterpret_cast<const uint32_t*>(strip + site.word);
      const uint32_t zeros = word >> (site.shift + half * site.second);
      scales.other = (zeros & site.zeros) | (kMiddle & ~site.zeros);
    } else if constexpr (kHalf) {
      scales.other = kMiddle;
    } else {
      scales.other = Multiply2<Element>(scales.scale, kMinusEight);
      scales.odd = Multiply2<Element>(scales.scale, k16th);
    }
    if constexpr (kHalf) scales.odd = Add2<Element>(scales.other, 0x63806380);  // 960
    return scales;
  }

  static __device__ __forceinline__ void Decode(const uint32_t* both,
                                                const Scales& scales,
                                                const Site& site,
                                                int,
                                                int part,
                                                uint32_t (&a)[4]) {
    const uint32_t words[] = {both[part], both[part] >> 8};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t mask = j % 2 == 0 ? 0x000F000F : 0x00F000F0;
      uint32_t q = words[j / 2] & mask;
      if constexpr (kHalf) {  // (word & mask) | one, which ptxas would make two
        asm("lop3.b32 %0, %1, %2, %3, 0xEA;"
            : "=r"(q)
            : "r"(words[j / 2]), "r"(mask), "r"(site.one));
      }
      const uint32_t scale = OfRow<Element>(scales.scale, j);
      const uint32_t other = OfRow<Element>(scales.other, j);
      const uint32_t odd = OfRow<Element>(scales.odd, j);
      if constexpr (kHalf || kZeros) {
        if (j % 2 == 0) {
          q = Add2<Element>(q, other);
        } else {
          q = MultiplyAdd2<Element>(q, k16th, kHalf ? odd : other);
        }
        a[j] = Multiply2<Element>(q, scale);
      } else {  // -8 times the scale is exact
        a[j] = MultiplyAdd2<Element>(q, j % 2 == 0 ? scale : odd, other);
      }
    }
  }
};

}  // namespace jaxmoe
