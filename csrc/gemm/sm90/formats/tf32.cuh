// Weights and tokens of float32, multiplied in TF32.
//
// Bulk copies round them to TF32 on their way to shared memory (see MapType of tensor_map.cc), as
// wgmma would cut off the bits that it does not read. Copies by threads would not.
#pragma once

#include "csrc/common/ptx.cuh"
#include "csrc/gemm/sm90/formats/format.cuh"

namespace jaxmoe {

struct Tf32 {
  using Weight = float;
  using Token = float;
  using Out = float;
  static constexpr int kStepK = 32;
  static constexpr Scaling kScaling = Scaling::kNone;
  static constexpr bool kGathersByThreads = false;
  static constexpr Packing kPacking = Packing::kNone;
  static constexpr bool kQuantizesOut = false;
};

}  // namespace jaxmoe

namespace jaxmoe::ptx {

// No transposed operands.
#define JAXMOE_TF32_ATOM(N, ATOM)                                                      \
  template <>                                                                          \
  struct WgmmaAtom<float, N, cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K> { \
    using type = ATOM;                                                                 \
  }
#define JAXMOE_CUTLASS_ATOM(N) \
  JAXMOE_TF32_ATOM(N, cute::SM90::GMMA::MMA_64x##N##x8_F32TF32TF32_SS_TN<>)
#define JAXMOE_OWN_ATOM(N) JAXMOE_TF32_ATOM(N, Mma64x##N##x8F32TF32TF32)
JAXMOE_CUTLASS_ATOM(8);
JAXMOE_CUTLASS_ATOM(16);
JAXMOE_CUTLASS_ATOM(32);
JAXMOE_OWN_ATOM(48);
JAXMOE_CUTLASS_ATOM(64);
JAXMOE_OWN_ATOM(80);
JAXMOE_CUTLASS_ATOM(96);
JAXMOE_OWN_ATOM(112);
JAXMOE_CUTLASS_ATOM(128);
JAXMOE_OWN_ATOM(144);
JAXMOE_OWN_ATOM(160);
#undef JAXMOE_OWN_ATOM
#undef JAXMOE_CUTLASS_ATOM
#undef JAXMOE_TF32_ATOM

}  // namespace jaxmoe::ptx
