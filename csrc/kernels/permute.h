// Launcher of permute: copies token rows into expert order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxmoe {

// rows[slot_to_row[t,k]] = x[t]; slots outside [0,R) are skipped, and rows that no slot names keep
// what they hold. With row_to_token instead rows[r] = x[row_to_token[r]], and rows whose index lies
// outside [0,T) become exactly 0; slot_to_row should be its inverse. Every row of x is read once.
struct PermuteParams {
  const void* x;                // [T,H]
  const int32_t* slot_to_row;   // [T,K]
  const int32_t* row_to_token;  // [R] or null
  void* rows;                   // [R,H]
  int64_t num_tokens;           // T < 2^31
  int64_t top_k;                // K < 2^31
  int64_t num_rows;             // R < 2^31
  int64_t row_bytes;            // H * element size; < 2^31
  bool pdl;
};

cudaError_t LaunchPermute(const PermuteParams& params, cudaStream_t stream);

}  // namespace jaxmoe
