// Weights of e2m1 with a power of two for each 32 of k: exact in bf16.
#pragma once

#include "csrc/gemm/sm90/formats/decode.cuh"

namespace jaxmoe {

template <class Element>
struct Mxfp4 : PackedWithPowers<Element, Packing::kMxfp4> {
  // bf16: 2^-126 of the values, 2^126 of the scales. fp16: 2^-14 and 2^15, so that no scale is the
  // infinity; scales below 2^-29 of the largest of an expert are zero there.
  static constexpr float kFactor = SumFactor(Packing::kMxfp4, DTypeOf<Element>());

  using typename PackedWithPowers<Element, Packing::kMxfp4>::Scales;
  using typename PackedWithPowers<Element, Packing::kMxfp4>::Site;

  static __device__ __forceinline__ void Decode(const uint32_t* words,
                                                const Scales& scales,
                                                const Site&,
                                                int half,
                                                int part,
                                                uint32_t (&a)[4]) {
    DecodeE2m1<Element>(words, part, a);
    const uint32_t powers = PowersOfTwo<Element>(scales.bytes, half);
#pragma unroll
    for (int j = 0; j < 4; ++j) a[j] = Multiply2<Element>(a[j], OfRow<Element>(powers, j));
  }
};

}  // namespace jaxmoe
