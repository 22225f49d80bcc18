// Device code of permute: token rows into expert order, rows[slot_to_row[t,k]] = x[t].
//
// Problem: rows of row_units units (a unit is what one thread moves, 16 bytes where rows allow).
//   One unit of x a thread, read once and stored K times. Bytes: R H s + T H s, R H s of it stores,
//   which nobody waits for: 2048 threads an SM with K units each are far more than the 20 bytes a
//   clock an SM gets of memory. At 4.3 TB/s: qwen3 T = 4096 35 us, predicted 39; T = 16384 140
//   (150); deepseek T = 4096 123 (130); gpt-oss 27 (31); mixtral 23 (27); qwen3 T = 1024 8.8 (8.5).
// With row_to_token (the public op) every row is that of its token, zero where the index lies
//   outside [0,T): a slot stores only to a row that names its token, and further blocks look for
//   rows that no slot has stored, a lane a row, whose units a warp then writes. So what comes out
//   depends on row_to_token alone, and slot_to_row, its inverse in a plan, says where it is fast.
// Why these shapes: a warp per row leaves lanes idle at H = 2880 or 512; reading x by row takes
//   every row K times through L2, 276 us at qwen3 T = 16384, where x does not fit. Stores are
//   plain: the next GEMM reads the rows, from L2 if they fit. Loads are evict-first: x must not
//   push the rows out. No shared memory.
#pragma once

#include <cstdint>

#include "csrc/common/launch.h"
#include "csrc/kernels/permute.h"

namespace jaxmoe {

inline constexpr int kPermuteMaxThreads = 256;
inline constexpr unsigned kPermuteNoRow = 0xffffffffu;

// Writes the rows that no slot stores, as a warp: zeros, or the token that slots do not know.
template <typename Unit>
__device__ __forceinline__ void WriteOtherRows(const PermuteParams& params,
                                               unsigned first_row,
                                               unsigned row_units) {
  constexpr unsigned kNoToken = 0xffffffffu;
  constexpr unsigned kStored = 0xfffffffeu;
  const unsigned lane = threadIdx.x % 32;
  const unsigned num_tokens = static_cast<unsigned>(params.num_tokens);
  const unsigned top_k = static_cast<unsigned>(params.top_k);
  unsigned token = kStored;
  if (first_row + lane < params.num_rows) {
    token = static_cast<unsigned>(params.row_to_token[first_row + lane]);
    if (token >= num_tokens) {  // negative ones are larger
      token = kNoToken;
    } else {
      const int32_t* slots = params.slot_to_row + static_cast<int64_t>(token) * top_k;
      bool stored = false;
      for (unsigned k = 0; k < top_k; ++k) {
        stored |= static_cast<unsigned>(slots[k]) == first_row + lane;
      }
      if (stored) token = kStored;
    }
  }
  const Unit* x = static_cast<const Unit*>(params.x);
  Unit* rows = static_cast<Unit*>(params.rows);
  for (unsigned left = __ballot_sync(0xffffffffu, token != kStored); left != 0; left &= left - 1) {
    const int owner = __ffs(left) - 1;
    const unsigned of = __shfl_sync(0xffffffffu, token, owner);
    const int64_t to = static_cast<int64_t>(first_row + owner) * row_units;
    for (unsigned column = lane; column < row_units; column += 32) {
      Unit value{};
      if (of != kNoToken) value = x[static_cast<int64_t>(of) * row_units + column];
      rows[to + column] = value;
    }
  }
}

// Unit: an unsigned integer or vector type of 1 to 16 bytes; its size divides row_bytes. Grid: one
// thread per unit of x in the first `slot_blocks` blocks, and one per row in the others.
template <typename Unit>
__global__ void __launch_bounds__(kPermuteMaxThreads)
    PermuteKernel(PermuteParams params, unsigned row_units, unsigned slot_blocks) {
  GridDependencyWait();
  GridDependencyLaunch();

  if (blockIdx.x >= slot_blocks) {
    const unsigned thread = (blockIdx.x - slot_blocks) * blockDim.x + threadIdx.x;
    WriteOtherRows<Unit>(params, thread / 32 * 32, row_units);
    return;
  }
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
      if (params.row_to_token == nullptr || row[i] >= num_rows) continue;
      if (params.row_to_token[row[i]] != token) row[i] = kPermuteNoRow;
    }
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (row[i] < num_rows) rows[static_cast<int64_t>(row[i]) * row_units] = value;
    }
  }
}

}  // namespace jaxmoe
