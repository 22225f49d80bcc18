// Device code of finalize: the weighted sum of each token's expert rows.
//
// Problem: y[t,h] = sum_k weights[t,k] * rows[slot_to_row[t,k], h] + residual[t,h]; fp32, k = 0
//   first, residual last, one rounding. Slots outside [0,R) are skipped, so that whatever their row
//   or weight would be (NaN too) cannot reach the sum.
// Threads: one per 16-byte piece of a row of y (one per element where rows are not such multiples),
//   flattened over (t, piece). Row loads in flight a thread: 2 or 4 by K, with fewer registers and
//   so more threads for 2: 48 to 96 KiB an SM; 8 while all threads run at once. A device with a
//   part of the experts has few rows of a token, and more threads count then more than loads of
//   one: with 2 of 8, T = 16384 and qwen3 86 us with 8 loads, 68 with 4. No shared memory.
// Bytes: (R + T) H s plus T H s of a residual; at 4.3 TB/s qwen3 T = 4096 35 us (measured 41; 44
//   with 8 loads), T = 16384 140 (150; 162), deepseek 123 (131; 140), gpt-oss 27 (33). At T <= 64
//   the time is dependent trips to memory: 2 us, less one where choices are early.
// Why this shape: a block per token leaves most SMs idle at T = 1; scatter with atomics would save
//   the read of rows and lose the order of the sum.
#pragma once

#include <cstdint>

#include "csrc/common/launch.h"
#include "csrc/common/piece.cuh"
#include "csrc/kernels/finalize.h"

namespace jaxmoe {

inline constexpr int kFinalizeMaxThreads = 256;
inline constexpr int kFewTokensUnroll = 8;  // while all threads run at once

// Blocks that registers must leave room for: 40, 48 or 80 registers.
constexpr int FinalizeBlocksPerSm(int unroll) { return unroll <= 2 ? 6 : unroll <= 4 ? 5 : 3; }

// Slots and weights of `kCount` choices of a token; past its last one a slot that no row has.
template <int kCount>
struct Choices {
  int slot[kCount];
  float weight[kCount];

  __device__ __forceinline__ void Load(const int32_t* slots,
                                       const float* weights,
                                       int k,
                                       int top_k) {
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      slot[u] = k + u < top_k ? slots[k + u] : -1;
      weight[u] = k + u < top_k ? weights[k + u] : 0.0f;
    }
  }
};

// Adds a piece of each row of a token times its weight to `sum`, float32 in k order. Choices whose
// slot is not below `num_slots` have none. The row of a choice is its slot or, if kInOrder, its
// number, so many times `stride` after `rows`. `first` has the first choices, or is null.
// T: element type. kSize: elements a thread sums. kUnroll: row loads in flight.
template <typename T, int kSize, int kUnroll, bool kInOrder>
__device__ __forceinline__ void AddRows(const typename Piece<T, kSize>::Bits* rows,
                                        unsigned stride,
                                        const Choices<kUnroll>* first,
                                        const int32_t* slots,
                                        unsigned num_slots,  // negative slots are larger
                                        const float* weights,
                                        int top_k,
                                        float (&sum)[kSize]) {
  using P = Piece<T, kSize>;
  using Bits = typename P::Bits;
  float term[kSize];
  for (int k = 0; k < top_k; k += kUnroll) {
    Choices<kUnroll> choices;
    if (k == 0 && first != nullptr) {
      choices = *first;
    } else {
      choices.Load(slots, weights, k, top_k);
    }
    bool valid[kUnroll];
    Bits bits[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int row = kInOrder ? k + u : choices.slot[u];
      valid[u] = static_cast<unsigned>(choices.slot[u]) < num_slots;
      bits[u] = Bits{};
      if (valid[u]) bits[u] = P::Load(rows + static_cast<int64_t>(row) * stride);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (!valid[u]) continue;
      P::Unpack(bits[u], term);
#pragma unroll
      for (int i = 0; i < kSize; ++i) sum[i] = fmaf(choices.weight[u], term[i], sum[i]);
    }
  }
}

template <typename T, int kSize, int kUnroll>
__global__ void __launch_bounds__(kFinalizeMaxThreads, FinalizeBlocksPerSm(kUnroll))
    FinalizeKernel(FinalizeParams params, unsigned row_pieces) {
  using P = Piece<T, kSize>;
  using Bits = typename P::Bits;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t token = index / row_pieces;
  const unsigned column = static_cast<unsigned>(index % row_pieces);
  const Bits* rows = static_cast<const Bits*>(params.rows) + column;  // row stride: row_pieces
  const int top_k = static_cast<int>(params.top_k);
  const unsigned num_rows = static_cast<unsigned>(params.num_rows);
  const int32_t* slots = params.slot_to_row + token * top_k;
  const float* weights = params.weights + token * top_k;
  const bool exists = token < params.num_tokens;

  // Of few tokens a trip to memory less behind the product's end. Of many, others hide it, and
  // there are no registers for it.
  constexpr bool kLoadsFirst = kUnroll == kFewTokensUnroll;
  Choices<kUnroll> first;
  if (kLoadsFirst && exists && params.early_choices) first.Load(slots, weights, 0, top_k);
  GridDependencyWait();
  GridDependencyLaunch();
  if (!exists) return;
  if (kLoadsFirst && !params.early_choices) first.Load(slots, weights, 0, top_k);

  Bits residual{};  // read early, added last
  if (params.residual != nullptr) {
    residual = P::Load(static_cast<const Bits*>(params.residual) + index);
  }
  float sum[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) sum[i] = 0.0f;
  AddRows<T, kSize, kUnroll, false>(
      rows, row_pieces, kLoadsFirst ? &first : nullptr, slots, num_rows, weights, top_k, sum);
  if (params.residual != nullptr) {
    float term[kSize];
    P::Unpack(residual, term);
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum[i] += term[i];
  }
  static_cast<Bits*>(params.y)[index] = P::Pack(sum);
}

}  // namespace jaxmoe
