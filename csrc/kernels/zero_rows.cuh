// Device code of zero_rows: zeroes the rows of out[B,T,N] that no group covers.
//
// Problem: row t of entry b is covered if starts[b,e] <= t < starts[b,e] + sizes[b,e] for some e,
//   whatever the values (negative, overlapping, past the end, sums beyond 2^31).
// Blocks: one per (b, 128 rows, column part); parts > 1 only where B * T / 128 leaves SMs idle.
//   Threads: 256; first one per group, setting the covered rows of the block in a 128-bit map, then
//   all of them storing. Shared memory: 16 bytes.
// Bytes: 8 B E per block from L2, and the uncovered rows. Usually every row is covered, so the time
//   is that of a launch and two loads: predicted 2 us.
// Why this shape: a memset of the whole output would write what the GEMM is about to write.
#pragma once

#include <cstdint>

#include "csrc/common/launch.h"
#include "csrc/kernels/zero_rows.h"

namespace jaxmoe {

inline constexpr int kZeroRowsThreads = 256;
inline constexpr int kZeroRowsBlockRows = 128;
inline constexpr int kZeroRowsMapWords = kZeroRowsBlockRows / 32;

// Bits [low, high) of a 32-bit word, both clipped to [0,32].
__device__ __forceinline__ uint32_t BitRange(int low, int high) {
  low = max(low, 0);
  high = min(high, 32);
  if (low >= high) return 0;
  return (0xffffffffu >> (32 - (high - low))) << low;
}

// Units [first, end) of the block's rows that the map leaves open; out is its first row.
template <typename Unit>
__device__ __forceinline__ void ZeroOpenRows(Unit* out,
                                             int64_t row_units,
                                             int64_t first,
                                             int64_t end,
                                             const uint32_t* covered,
                                             int64_t block_rows) {
  for (int word = 0; word < kZeroRowsMapWords; ++word) {
    int word_rows = static_cast<int>(min(block_rows - 32 * word, int64_t{32}));
    uint32_t open = ~covered[word] & BitRange(0, word_rows);
    while (open != 0) {
      int row = 32 * word + __ffs(static_cast<int>(open)) - 1;
      open &= open - 1;
      for (int64_t i = first + threadIdx.x; i < end; i += kZeroRowsThreads) {
        out[row * row_units + i] = Unit{};
      }
    }
  }
}

// Unit: what one store writes; its size divides row_bytes. Grid: (B * row_blocks, parts).
template <typename Unit>
__global__ void __launch_bounds__(kZeroRowsThreads)
    ZeroRowsKernel(ZeroRowsParams params, unsigned row_blocks, unsigned part_units) {
  __shared__ uint32_t covered[kZeroRowsMapWords];
  if (threadIdx.x < kZeroRowsMapWords) covered[threadIdx.x] = 0;
  __syncthreads();

  GridDependencyWait();
  GridDependencyLaunch();

  if (blockIdx.x == 0 && blockIdx.y == 0) {
    for (int64_t i = threadIdx.x; i < params.num_zero_counters; i += kZeroRowsThreads) {
      params.zero_counters[i] = 0;
    }
  }
  const int64_t b = blockIdx.x / row_blocks;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x % row_blocks) * kZeroRowsBlockRows;
  const int64_t block_rows = params.num_rows - first_row;  // may exceed kZeroRowsBlockRows
  for (int64_t e = threadIdx.x; e < params.num_groups; e += kZeroRowsThreads) {
    int64_t start = params.starts[b * params.num_groups + e];
    int64_t size = params.sizes[b * params.num_groups + e];
    int64_t low = max(start - first_row, int64_t{0});
    int64_t high = min(start - first_row + size, int64_t{kZeroRowsBlockRows});
    if (low >= high) continue;
#pragma unroll
    for (int word = 0; word < kZeroRowsMapWords; ++word) {
      uint32_t bits =
          BitRange(static_cast<int>(low) - 32 * word, static_cast<int>(high) - 32 * word);
      if (bits != 0) atomicOr(&covered[word], bits);
    }
  }
  __syncthreads();

  const int64_t row_units = params.row_bytes / static_cast<int64_t>(sizeof(Unit));
  const int64_t first_unit = static_cast<int64_t>(blockIdx.y) * part_units;
  const int64_t end_unit = min(first_unit + part_units, row_units);
  const int64_t row = b * params.num_rows + first_row;
  ZeroOpenRows(static_cast<Unit*>(params.out) + row * row_units,
               row_units,
               first_unit,
               end_unit,
               covered,
               block_rows);
  if (blockIdx.y != 0 || params.other.out == nullptr) return;
  const int64_t units = params.other.row_bytes / static_cast<int64_t>(sizeof(Unit));
  Unit* other = static_cast<Unit*>(params.other.out) + row * units;
  ZeroOpenRows(other, units, 0, units, covered, block_rows);
}

}  // namespace jaxmoe
