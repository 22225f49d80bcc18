// Device code of permute: token rows into expert order, in two forms.
//
// Problem: rows of row_units units (a unit is what one thread moves, 16 bytes where rows allow).
// By row (the public op): rows[r] = x[row_to_token[r]], zero where the index lies outside [0,T).
//   R * row_units units dealt to threads with a grid-wide stride; (row, column) is carried along
//   and advanced by a constant step, which saves a division per unit. 4 loads in flight a thread,
//   at most 6 blocks of 256 an SM. Bytes: R H s + T H s of memory, but 2 R H s through L2: qwen3
//   T = 4096 takes 49 us where memory alone would take 35.
// By slot (inside the fused layer): rows[slot_to_row[t,k]] = x[t], other rows untouched. One unit
//   of x a thread, read once and stored K times. Bytes: R H s + T H s, R H s of it stores, which
//   nobody waits for: 2048 threads an SM with K units each are far more than the 20 bytes a clock
//   an SM gets of memory. At 4.3 TB/s: qwen3 T = 4096 35 us, predicted 39; T = 16384 140 (150);
//   deepseek T = 4096 123 (130); gpt-oss 27 (31); mixtral 23 (27); qwen3 T = 1024 8.8 (8.5).
// Why these shapes: a warp per row leaves lanes idle at H = 2880 or 512. Stores are plain: the next
//   GEMM reads the rows, from L2 if they fit. Loads by slot are evict-first: x must not push the
//   rows out. No shared memory.
#pragma once

#include <cstdint>

#include "csrc/common/launch.h"
#include "csrc/kernels/permute.h"

namespace jaxmoe {

inline constexpr int kPermuteMaxThreads = 256;
inline constexpr int kPermuteBlocksPerSm = 6;
inline constexpr int kPermuteUnroll = 4;
inline constexpr unsigned kPermuteNoToken = 0xffffffffu;
inline constexpr unsigned kPermuteNoRow = 0xffffffffu;

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

// Unit: as above. Grid: one thread per unit of x.
template <typename Unit>
__global__ void __launch_bounds__(kPermuteMaxThreads)
    PermuteSlotsKernel(PermuteSlotsParams params, unsigned row_units) {
  GridDependencyWait();
  GridDependencyLaunch();

  constexpr int kSlots = 8;  // slots read at once
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t token = index / row_units;
  if (token >= params.num_tokens) return;
  const unsigned column = static_cast<unsigned>(index % row_units);
  const Unit value = __ldcs(static_cast<const Unit*>(params.x) + index);
  Unit* rows = static_cast<Unit*>(params.rows) + column;             // row stride: row_units
  const unsigned num_rows = static_cast<unsigned>(params.num_rows);  // negative slots are larger
  const int top_k = static_cast<int>(params.top_k);
  const int32_t* slots = params.slot_to_row + token * top_k;
  for (int k = 0; k < top_k; k += kSlots) {
    unsigned row[kSlots];
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      row[i] = k + i < top_k ? static_cast<unsigned>(slots[k + i]) : kPermuteNoRow;
    }
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (row[i] < num_rows) rows[static_cast<int64_t>(row[i]) * row_units] = value;
    }
  }
}

}  // namespace jaxmoe
