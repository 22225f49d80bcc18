// Weights of FP8 with one scale for a whole weight or for each of its rows, tokens of e4m3
// likewise.
#pragma once

#include "csrc/gemm/sm90/formats/format.cuh"

namespace jaxmoe {

template <class Element>
struct Fp8 {
  using Weight = Element;
  using Token = __nv_fp8_e4m3;
  using Out = void;
  static constexpr int kStepK = 128;
  static constexpr Scaling kScaling = Scaling::kEpilogue;
  static constexpr bool kGathersByThreads = true;
  static constexpr Packing kPacking = Packing::kNone;
  static constexpr bool kQuantizesOut = true;
};

}  // namespace jaxmoe
