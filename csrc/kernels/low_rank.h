// Host contract of a product of low rank: bf16 rows in groups by matrices of few columns.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxmoe {

// out[r] = scale / divisors[g] * x[row_index[r]] a[g], r a row of group g of `num_groups`, rounded
// once. Rows of no group are not written.
struct LowRankParams {
  const void* x = nullptr;                 // [x_rows, k]
  const void* a = nullptr;                 // [num_groups, k, rank]
  void* out = nullptr;                     // [rows, rank]
  const int32_t* group_offsets = nullptr;  // [num_groups + 1], at most `rows`
  const int32_t* row_index = nullptr;      // [rows], others than rows of x are zeros; null: r
  int64_t x_rows = 0;
  int64_t rows = 0;
  int64_t k = 0;     // a multiple of 8
  int64_t rank = 0;  // a multiple of 8, not 0
  int64_t num_groups = 0;
  float scale = 1.0f;
  const float* divisors = nullptr;  // [num_groups]; null: ones
  bool pdl = false;
  bool early_groups = false;  // groups were written before the previous launch began
  bool early_x = false;       // so were x and row_index, which early_groups alone does not allow
};

cudaError_t LaunchLowRank(const LowRankParams& params, cudaStream_t stream);

}  // namespace jaxmoe
