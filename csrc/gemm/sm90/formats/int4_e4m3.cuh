// Weights of four bits without zero points as tensor cores multiply them by tokens of e4m3.
//
// The byte of a code c, 0 to 15, is the e4m3 number 2^-9 c: those below 8 are subnormal, and the
// first exponent has the same step. So nothing is decoded, and nothing is rounded. Weights are
// c - 8; one half of them is multiplied as c, the other as c - 15, and what that is too much is
// taken off the sums: RoundTokens leaves 2^-9 of the sum of -8 and 7 times the numbers beside each
// 128 of a token. With c alone sums of tokens of one sign would be many times as large as what
// stays of them, and tensor cores keep 13 bits of FP8 sums.
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
