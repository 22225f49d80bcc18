// Weights of bf16 or fp16: multiplied as they are.
#pragma once

#include "csrc/gemm/sm90/formats/format.cuh"

namespace jaxmoe {

template <class Element>
struct Plain {
  using Weight = Element;
  using Token = Element;
  using Out = Element;
  static constexpr int kStepK = 64;
  static constexpr Scaling kScaling = Scaling::kNone;
  static constexpr bool kGathersByThreads = true;
  static constexpr Packing kPacking = Packing::kNone;
  static constexpr bool kQuantizesOut = false;
};

}  // namespace jaxmoe
