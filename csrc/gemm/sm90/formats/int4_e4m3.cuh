// Weights of four bits without zero points as tensor cores multiply them by tokens of e4m3.
//
// The byte of a code, 0 to 15, is the e4m3 number 2^-9 of the code: those below 8 are subnormal,
// and the first exponent has the same step. So nothing is decoded, and nothing is rounded. The 8
// that codes are too large by are taken off the sums: RoundTokens leaves -8 * 2^-9 of the sum of
// each 128 numbers of a token beside them, in the order in which coded.cuh multiplies codes.
#pragma once

#include "csrc/gemm/sm90/formats/format.cuh"

namespace jaxmoe {

struct Int4E4M3 {
  using Weight = __nv_fp8_e4m3;
  using Token = __nv_fp8_e4m3;
  using Out = void;
  using Symmetric = void;
  static constexpr int kStepK = 128;  // what shares a scale
  static constexpr Scaling kScaling = Scaling::kWeight;
  static constexpr Packing kPacking = Packing::kInt4;
  static constexpr int kValueBytes = 2 * PackedLayout{Packing::kInt4}.value_bytes();
  static constexpr int kStripBytes = 128;
  static constexpr bool kGathersByThreads = false;
  static constexpr bool kQuantizesOut = false;
  static constexpr bool kRowScales = true;
  static constexpr bool kTokenSums = true;
  static constexpr float kFactor = 512.0f;
};

}  // namespace jaxmoe
