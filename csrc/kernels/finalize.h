// Launcher of finalize: weighted sum of each token's expert rows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/common/types.h"

namespace jaxmoe {

// y[t] = sum_k weights[t,k] * rows[slot_to_row[t,k]] + residual[t], fp32, k order, residual last,
// one rounding. Slots outside [0,R) are skipped: their weight and row are never read into the sum.
struct FinalizeParams {
  const void* rows;            // [R,H]
  const int32_t* slot_to_row;  // [T,K]
  const float* weights;        // [T,K]
  const void* residual;        // [T,H] or nullptr
  void* y;                     // [T,H]
  DType dtype;                 // of rows, residual and y
  int64_t num_tokens;          // T
  int64_t top_k;               // K
  int64_t num_rows;            // R < 2^31
  int64_t hidden;              // H < 2^31
  bool pdl;
  bool early_choices;  // slot_to_row and weights are older than the launch before this one
};

cudaError_t LaunchFinalize(const FinalizeParams& params, cudaStream_t stream);

}  // namespace jaxmoe
