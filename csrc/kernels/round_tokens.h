// Rounding of tokens to the numbers of a token format, which products of packed weights multiply.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/common/types.h"
#include "csrc/kernels/plan.h"

namespace jaxmoe {

// How tokens are quantized beside packed weights; `TokenRule.code` in jaxmoe/_formats/tokens.py.
enum class TokenRule : int { kNone, kE4M3, kMxfp4, kMxfp8, kNvfp4 };

template <>
struct EnumNames<TokenRule> {
  static constexpr const char* kAll[] = {"none", "e4m3", "mxfp4", "mxfp8", "nvfp4"};
};

// Whether each row of numbers has a scale that multiplies the sums it is in.
constexpr bool HasRowScales(TokenRule rule) {
  return rule == TokenRule::kE4M3 || rule == TokenRule::kNvfp4;
}

// Neighbours of a row that are rounded together.
constexpr int64_t RoundedTogether(TokenRule rule) {
  if (rule == TokenRule::kMxfp4 || rule == TokenRule::kMxfp8) return 32;
  return rule == TokenRule::kNvfp4 ? 16 : 8;
}

// Numbers of tokens x, in the dtype of x, and the scale s of each row, where max is that of the
// finite |x|:
//   kE4M3   e4m3(x * (1 / s)),  s = max(max of the row / 448, 2^-126) or static
//   kMxfp8  e4m3(x / p) * p,    p = 2^(floor(log2(max of 32)) - 8), at least 2^-127
//   kMxfp4  e2m1(x / p) * p,    p = 2^(floor(log2(max of 32)) - 2), at least 2^-127
//   kNvfp4  e2m1(x / (f * s)) * f,  f = e4m3(max of 16 / 6 / s),  s static; f * s is 1 if it is 0
// e4m3 and e2m1 round to nearest, ties to even, and what is too large becomes the largest. A group
// that holds NaN is NaN, of kE4M3 the NaN alone. Static scales outside [2^-126, 2^126] are NaN.
//   kNone   x, s given: tokens that are rounded already
// These are, to the bit, the rules by which the package rounds without the kernel, in
// jaxmoe/_formats: quantize_xla of quantization.py, Mx.coded and Mx.numbers of mx.py, Nvfp4.coded
// and Nvfp4.numbers of nvfp4.py (but that XLA's divisions on a GPU round otherwise, where divisor
// or quotient is not short).
struct RoundTokensParams {
  const void* x;  // [rows, cols]; whole groups, of 16-byte multiples, 16-byte aligned
  DType dtype;    // of x and of the numbers: bf16; with HasRowScales and kNone also fp16
  TokenRule rule;
  int64_t rows;
  int64_t cols;
  void* numbers;               // [rows, cols], may be x; if `scatters` [num_out_rows, cols]. Null,
                               // of kNone alone: nobody reads them
  float* scales;               // [num_out_rows] if HasRowScales, and of kNone
  const float* given_scales;   // of kNone: [num_given]
  int64_t num_given;           // 1 or rows
  const float* static_scales;  // [num_static]; null: dynamic, which kNvfp4 does not have
  int64_t num_static;          // 1, or num_groups: one of each group
  // Rows are those of these groups, others are left alone: [num_groups + 1]; null: all are.
  const int32_t* group_offsets;
  int64_t num_groups;
  // Scales, and if `scatters` numbers, of row r go to rows slot_to_row[r * top_k + k] for each
  // k < top_k, nowhere where that is negative or at least num_out_rows; null: to row r.
  const int32_t* slot_to_row;
  int64_t top_k;
  int64_t num_out_rows;
  bool scatters;
  // Of bf16, kE4M3 and cols of whole 128, at most kMaxCodedCols: rows of numbers begin with their
  // e4m3 bytes, of each 16 k in the order 0 8 1 9 2 10 .. 7 15, and then have for each 128 the sum
  // of what is too much where codes are multiplied by them: -8 * 2^-9 times those of the first 8 of
  // each 16, 7 * 2^-9 times the others. Sums are in two parts of bf16, the first parts of
  // kCodedSums of them before their second parts.
  bool codes;
  bool plans;  // scales go where `plan` of at most 32 slots says, which is made here
  PlanParams plan;
  bool pdl;
  bool early_x;     // the launch before did not write x; no group_offsets then
  bool lets_start;  // see GridDependency
};

// What a block has in registers, as bytes may take the place of x.
inline constexpr int64_t kMaxCodedCols = 8 * 4096;

// Sums whose parts lie side by side: see RoundTokensParams::codes.
inline constexpr int kCodedSums = 16;

cudaError_t LaunchRoundTokens(const RoundTokensParams& params, cudaStream_t stream);

}  // namespace jaxmoe
