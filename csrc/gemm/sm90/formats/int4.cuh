// Weights of four bits, minus 8 or a zero point, times a 16-bit scale for each group of k. Their
// product is rounded once in bf16.
#pragma once

#include "csrc/gemm/sm90/formats/decode.cuh"

namespace jaxmoe {

template <class Element>
struct Int4 : PackedWeights<Element, Packing::kInt4, 384> {
  static constexpr float kFactor = 1.0f;

  // 128 or 1024: numbers whose last bit of mantissa is 1.
  static constexpr uint32_t kOne = std::is_same_v<Element, __half> ? 0x6400 : 0x4300;

  struct Scales {
    uint32_t scale;  // of the rows
    uint32_t zeros;  // -kOne less the zero point, of the rows
  };

  // Zero points are bytes, by_32 [row][half], else [row]: 32 bits hold all of a thread's.
  struct Site {
    int scale[2];  // bytes from the strip to the scales of a half
    int zeros;
    uint32_t choose[2];  // which bytes of the zero points and of `other` make Scales::zeros
    uint32_t one;

    __device__ __forceinline__ Site(const PackedArgs& packed, int thread) {
      const int site = StripSite(packed, thread).index;
      const int scale_bytes = packed.by_32 ? 256 : 128;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        scale[half] = 4 * (packed.by_32 ? 2 * site + half : site);
        const uint32_t bytes = half == 0 ? 0x5250 : 0x5351;
        const uint32_t neighbours = site % 2 == 0 ? 0x5150 : 0x5352;
        choose[half] = !packed.has_zeros ? 0x5454 : packed.by_32 ? bytes : neighbours;
      }
      zeros = !packed.has_zeros ? 0 : scale_bytes + (packed.by_32 ? 4 * site : 2 * site & ~3);
      one = kOne * 0x10001;
      asm volatile("" : "+r"(one));  // an immediate would be a second one in LOP3
    }
  };

  static __device__ __forceinline__ Scales LoadScales(const uint8_t* strip,
                                                      const Site& site,
                                                      int half) {
    constexpr uint32_t kOther = (0x80 | kOne >> 8) << 8 | 8;  // symmetric codes have 8 added
    const uint32_t zeros = *reinterpret_cast<const uint32_t*>(strip + site.zeros);
    return {*reinterpret_cast<const uint32_t*>(strip + site.scale[half]),
            __byte_perm(zeros, kOther, site.choose[half])};
  }

  static __device__ __forceinline__ void Decode(
      const uint32_t* word, const Scales& scales, const Site& site, int, int, uint32_t (&a)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t q;  // ((word >> 4 j) & 0x000F000F) | one, which ptxas would make two instructions
      asm("lop3.b32 %0, %1, %2, %3, 0xEA;"
          : "=r"(q)
          : "r"(*word >> (4 * j)), "n"(0x000F000F), "r"(site.one));
      a[j] = Multiply2<Element>(Add2<Element>(q, OfRow<Element>(scales.zeros, j)),
                                OfRow<Element>(scales.scale, j));
    }
  }
};

}  // namespace jaxmoe
