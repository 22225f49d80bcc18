// Weights of four bits, minus 8 or a zero point, times a 16-bit scale for each group of k. Their
// product is rounded once in bf16.
//
// In bf16 a code is the mantissa of a subnormal number, 2^-133 of it, so that it takes one mask,
// and scales are multiplied by 2^96 to keep the products normal: scales from 2^32 on become
// infinite, products below 2^-89 subnormal. In fp16 it is added to 1024.
#pragma once

#include "csrc/gemm/sm90/formats/decode.cuh"

namespace jaxmoe {

// With zero points, as bytes behind the scales, where there are any, or without: then 8 is
// subtracted.
template <class Element, bool kZeros = true>
struct Int4 : PackedWeights<Element, Packing::kInt4, 384> {
  using Symmetric = std::conditional_t<kZeros, Int4<Element, false>, void>;

  static constexpr bool kHalf = std::is_same_v<Element, __half>;
  static constexpr float kFactor = kHalf ? 1.0f : 0x1p37f;
  static constexpr uint32_t k16th = kHalf ? 0x2C002C00 : 0x3D803D80;
  static constexpr uint32_t kOne = kHalf ? 0x6400 : 0;  // what codes are added to, as bits

  // Odd values of a thread lie four bits higher in their half of a word, so they are 16 times as
  // large: one shift serves two of them.
  struct Scales {
    uint32_t scale;  // of the rows
    uint32_t other;  // of the rows: -8 times the scale in symmetric bf16, else -kOne - zero point
    uint32_t odd;    // a 16th of the scale in symmetric bf16; in fp16 -64 - zero point
  };

  // Zero points are bytes, by_32 [row][half], else [row]: 32 bits hold all of a thread's.
  struct Site {
    int scale;   // bytes from the strip to the scales of the first half
    int second;  // and from there to those of the second
    int zeros;
    uint32_t choose;  // which bytes of the zero points and of a constant make Scales::other
    uint32_t choose_second;
    uint32_t one;

    __device__ __forceinline__ Site(const PackedArgs& packed, int thread)
        : second(packed.by_32 ? 4 : 0), choose_second(packed.by_32 ? 0x0101 : 0) {
      const int site = StripSite(packed, thread).index;
      const int scale_bytes = packed.by_32 ? 256 : 128;
      scale = packed.by_32 ? 8 * site : 4 * site;
      choose = packed.by_32 ? 0x4240 : site % 2 == 0 ? 0x4140 : 0x4342;
      if (!packed.has_zeros) choose = 0x4545;
      if (!packed.has_zeros) choose_second = 0;
      zeros = !packed.has_zeros ? 0 : scale_bytes + (packed.by_32 ? 4 * site : 2 * site & ~3);
      one = kOne * 0x10001;
      asm volatile("" : "+r"(one));  // an immediate would be a second one in LOP3
    }
  };

  static __device__ __forceinline__ Scales LoadScales(const uint8_t* strip,
                                                      const Site& site,
                                                      int half) {
    constexpr uint32_t kTwoTo96 = 0x6F806F80;
    constexpr uint32_t kMinusEight = 0x80088008;  // times 2^-133
    Scales scales{};
    scales.scale = *reinterpret_cast<const uint32_t*>(strip + site.scale + half * site.second);
    if constexpr (!kHalf) scales.scale = Multiply2<Element>(scales.scale, kTwoTo96);
    if constexpr (kZeros) {
      const uint32_t zeros = *reinterpret_cast<const uint32_t*>(strip + site.zeros);
      scales.other =
          __byte_perm(zeros, 0x0880 | kOne >> 8, site.choose + half * site.choose_second);
    } else if constexpr (kHalf) {
      scales.other = (0x8008 | kOne) * 0x10001;
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
