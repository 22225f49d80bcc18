// Launchers of permute: copy token rows into expert order, by row or by token.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxmoe {

// rows[r] = x[row_to_token[r]]; rows whose index lies outside [0,T) become exactly 0.
struct PermuteParams {
  const void* x;                // [T,H]
  const int32_t* row_to_token;  // [R]
  void* rows;                   // [R,H]
  int64_t num_tokens;           // T < 2^31
  int64_t num_rows;             // R < 2^31
  int64_t row_bytes;            // H * element size; < 2^31
  bool pdl;
};

cudaError_t LaunchPermute(const PermuteParams& params, cudaStream_t stream);

// rows[slot_to_row[t,k]] = x[t]; slots outside [0,R) are skipped. Rows that no slot names keep what
// they hold. Every row of x is read once.
struct PermuteSlotsParams {
  const void* x;               // [T,H]
  const int32_t* slot_to_row;  // [T,K]
  void* rows;                  // [R,H]
  int64_t num_tokens;          // T < 2^31
  int64_t top_k;               // K < 2^31
  int64_t num_rows;            // R < 2^31
  int64_t row_bytes;           // H * element size; < 2^31
  bool pdl;
};

cudaError_t LaunchPermuteSlots(const PermuteSlotsParams& params, cudaStream_t stream);

}  // namespace jaxmoe
