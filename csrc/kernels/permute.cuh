// Device code of permute: rows[r] = x[row_to_token[r]], zero where the index lies outside [0,T).
//
// Problem: R rows of row_units units (a unit is what one thread moves, 16 bytes where rows allow),
//   flattened to R * row_units and dealt to threads with a grid-wide stride.
// Threads: 256 (fewer for small problems), at most 6 blocks per SM, 4 loads in flight a thread:
//   96 KiB an SM, against the 26 KiB that 4.3 TB/s at 800 ns ask for. No shared memory.
// Bytes: 2 R H s + 4 R when x does not stay in L2 (R = 32768, H = 2048, bf16: 268 MB, 62 us; with
//   x in L2 151 MB, 35 us).
// Why this shape: a warp per row leaves lanes idle at H = 2880 or 512; a flat index needs a
// division
//   per unit, so (row, column) is carried along and advanced by a constant step instead.
#pragma once

#include <cstdint>

#include "csrc/common/launch.h"
#include "csrc/kernels/permute.h"

namespace jaxmoe {

inline constexpr int kPermuteMaxThreads = 256;
inline constexpr int kPermuteBlocksPerSm = 6;
inline constexpr int kPermuteUnroll = 4;
inline constexpr unsigned kPermuteNoToken = 0xffffffffu;

// Position of unit `index` in a matrix whose rows have `row_units` units.
struct RowColumn {
  unsigned row;
  unsigned column;

  __device__ __forceinline__ RowColumn(int64_t index, unsigned row_units)
      : row(static_cast<unsigned>(index / row_units)),
        column(static_cast<unsigned>(index % row_units)) {}

  __device__ __forceinline__ void Advance(const RowColumn& step, unsigned row_units) {
    row += step.row;
    column += step.column;
    if (column >= row_units) {
      column -= row_units;
      ++row;
    }
  }
};

// Unit: an unsigned integer or vector type of 1 to 16 bytes; its size divides row_bytes.
template <typename Unit>
__global__ void __launch_bounds__(kPermuteMaxThreads, kPermuteBlocksPerSm)
    PermuteKernel(PermuteParams params, unsigned row_units) {
  GridDependencyWait();
  GridDependencyLaunch();

  const Unit* x = static_cast<const Unit*>(params.x);  // [T,row_units]
  Unit* rows = static_cast<Unit*>(params.rows);        // [R,row_units]
  const unsigned num_rows = static_cast<unsigned>(params.num_rows);
  // Negative indices are large unsigned ones.
  const unsigned num_tokens = static_cast<unsigned>(params.num_tokens);
  RowColumn step(static_cast<int64_t>(gridDim.x) * blockDim.x, row_units);
  RowColumn at(static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, row_units);
  while (at.row < num_rows) {
    // All indices are on their way before the first is used, then all rows.
    unsigned token[kPermuteUnroll];
    unsigned column[kPermuteUnroll];
    int64_t target[kPermuteUnroll];  // -1 past the end
    Unit value[kPermuteUnroll];
#pragma unroll
    for (int i = 0; i < kPermuteUnroll; ++i) {
      bool valid = at.row < num_rows;
      column[i] = at.column;
      target[i] = valid ? static_cast<int64_t>(at.row) * row_units + at.column : -1;
      token[i] = valid ? static_cast<unsigned>(params.row_to_token[at.row]) : kPermuteNoToken;
      at.Advance(step, row_units);
    }
#pragma unroll
    for (int i = 0; i < kPermuteUnroll; ++i) {
      value[i] = Unit{};
      if (token[i] < num_tokens) {
        value[i] = x[static_cast<int64_t>(token[i]) * row_units + column[i]];
      }
    }
#pragma unroll
    for (int i = 0; i < kPermuteUnroll; ++i) {
      if (target[i] >= 0) rows[target[i]] = value[i];
    }
  }
}

}  // namespace jaxmoe
