// Launcher of zero_rows: zeroes the output rows that no group covers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxmoe {

// out[b,t,:] = 0 for every t in no [starts[b,e], starts[b,e] + sizes[b,e]). Groups may hold any
// values: negative sizes cover nothing, the rest is clipped to [0,T).
struct ZeroRowsParams {
  // Another result with rows of the same groups; null if there is none.
  struct Other {
    void* out;  // [B,T,row_bytes]
    int64_t row_bytes;
  };

  void* out;              // [B,T,N]
  const int32_t* starts;  // [B,E]
  const int32_t* sizes;   // [B,E]
  int64_t batch;
  int64_t num_rows;   // T
  int64_t row_bytes;  // N * element size
  Other other;
  int64_t num_groups;      // E
  int32_t* zero_counters;  // nullable; [num_zero_counters] set to 0
  int64_t num_zero_counters;
  bool pdl;
};

cudaError_t LaunchZeroRows(const ZeroRowsParams& params, cudaStream_t stream);

}  // namespace jaxmoe
