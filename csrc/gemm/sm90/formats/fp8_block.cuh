// Weights of FP8 with a scale for each block of 128 x 128, tokens of e4m3 with one for each 128 of
// k.
//
// FP8 tensor cores add up in about 14 bits. Here they do so only over the 128 elements of a step,
// whose sum is scaled and added in float32. So weights of formats without blocks can have more
// exact sums as well: the scales of their steps are 1, their own are applied in the epilogue.
#pragma once

#include "csrc/gemm/sm90/formats/fp8.cuh"

namespace jaxmoe {

template <class Element>
struct Fp8Block : Fp8<Element> {
  static constexpr Scaling kScaling = Scaling::kStep;
  // No registers: tokens are quantized in the order of the experts where a tile has too many for
  // boxes.
  static constexpr bool kGathersByThreads = false;
};

}  // namespace jaxmoe
