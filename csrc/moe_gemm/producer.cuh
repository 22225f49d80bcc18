// Fills the pipeline: one thread loads weights, one or two warps load rows of X.
//
// All wait for the same empty slot and complete on the same full barrier. The weight thread's
// arrival announces the bytes of every bulk copy, so weights can start streaming while X is still
// being written by the previous kernel (programmatic dependent launch).
#pragma once

#include "csrc/common/launch.h"
#include "csrc/moe_gemm/tile.cuh"

namespace jaxmoe {

// First weight row of 64-row block `block` of weight tile `w_tile`.
template <class T>
__device__ __forceinline__ int WeightRow(const MoeGemmArgs& args, int w_tile, int block) {
  if constexpr (T::kGated) {
    if (!args.interleaved) {
      const int feature = w_tile * (T::kWeightTile / 2) + (block / 2) * 64;
      return feature + (block % 2 == 0 ? args.gate_base : args.up_base);
    }
  }
  return w_tile * T::kWeightTile + block * 64;
}

template <class T>
__device__ __forceinline__ int TokenBoxes(int rows) {
  return (rows + T::kBoxRows - 1) / T::kBoxRows;
}

template <class T>
__device__ void RunWeightProducer(const MoeGemmArgs& args, const SharedStorage<T>& smem) {
  // A weight that is read once must not push rows of X out of L2; one that several token tiles
  // share is kept like anything else.
  const uint64_t policy = args.stream_weights ? ptx::CreatePolicy<ptx::CachePolicy::kEvictFirst>()
                                              : ptx::CreatePolicy<ptx::CachePolicy::kEvictNormal>();
  PipelineState<T::kStages> stage;
  PipelineState<T::kRing> slot;
  while (true) {
    ptx::BarrierWait(smem.ring_full(slot.index), slot.parity);
    const TileInfo info = smem.ring()[slot.index];
    ptx::BarrierArrive(smem.ring_empty(slot.index));
    slot.Advance();
    if (info.rows == 0) break;

    uint32_t token_bytes = TokenBoxes<T>(info.rows) * T::kBoxRows * T::kStepBytes;
    if (args.gather) token_bytes = T::kGatherByThreads ? 0 : info.rows * T::kStepBytes;
    int row[T::kWeightBlocks];
#pragma unroll
    for (int b = 0; b < T::kWeightBlocks; ++b) row[b] = WeightRow<T>(args, info.w_tile, b);

    for (int step = 0; step < args.num_k_steps; ++step) {
      uint64_t* full = smem.full(stage.index);
      ptx::BarrierWait(smem.empty(stage.index), stage.parity ^ 1);
      ptx::BarrierArriveExpectTx(full, T::kWeightBytes + token_bytes);
      const int k = step * T::kStepK;
      uint8_t* dst = smem.weights(stage.index);
#pragma unroll
      for (int b = 0; b < T::kWeightBlocks; ++b) {
        const bool k_major = T::kMajor == cute::SM90::GMMA::Major::K;
        ptx::TmaLoad3D(dst + b * T::kBlockBytes,
                       &args.w_map,
                       full,
                       k_major ? k : row[b],
                       k_major ? row[b] : k,
                       info.weight,
                       policy);
      }
      stage.Advance();
    }
  }
}

// Rows of X by bulk copies: boxes of consecutive rows or, when gathering, of one row each.
//
// Rows past the group's end need neither loading nor zeroing: a garbage column of X changes only
// its own column of the accumulators, which is never stored.
template <class T>
__device__ void RunTokenProducer(const MoeGemmArgs& args, const SharedStorage<T>& smem, int lane) {
  constexpr int kRowsPerLane = T::kGatherByThreads ? 1 : (T::kTokenTile + 31) / 32;
  const uint64_t policy = ptx::CreatePolicy<ptx::CachePolicy::kEvictLast>();
  GridDependencyWait();  // X is the previous kernel's output
  PipelineState<T::kStages> stage;
  PipelineState<T::kRing> slot;
  while (true) {
    ptx::BarrierWait(smem.ring_full(slot.index), slot.parity);
    const TileInfo info = smem.ring()[slot.index];
    __syncwarp();
    if (lane == 0) ptx::BarrierArrive(smem.ring_empty(slot.index));
    slot.Advance();
    if (info.rows == 0) break;

    const bool one_row_boxes = args.gather && !T::kGatherByThreads;
    const int boxes = TokenBoxes<T>(info.rows);
    int source[kRowsPerLane];
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      const int r = lane + 32 * i;
      source[i] = one_row_boxes && r < info.rows ? args.row_index[info.row + r] : 0;
    }
    for (int step = 0; step < args.num_k_steps; ++step) {
      ptx::BarrierWait(smem.empty(stage.index), stage.parity ^ 1);
      uint64_t* full = smem.full(stage.index);
      uint8_t* dst = smem.tokens(stage.index);
      const int k = step * T::kStepK;
      if (one_row_boxes) {
#pragma unroll
        for (int i = 0; i < kRowsPerLane; ++i) {
          const int r = lane + 32 * i;
          // The swizzle follows the shared-memory address, so one-row boxes assemble a tile.
          if (r < info.rows) {
            ptx::TmaLoad2D(dst + r * T::kStepBytes, &args.x_map, full, k, source[i], policy);
          }
        }
      } else if (lane < boxes) {
        ptx::TmaLoad2D(dst + lane * T::kBoxRows * T::kStepBytes,
                       &args.x_map,
                       full,
                       k,
                       info.row + lane * T::kBoxRows,
                       policy);
      }
      stage.Advance();
    }
  }
}

// Rows of X by 16-byte copies of T::kGatherThreads threads: eight threads a row, swizzled by hand.
// Indices are read anew at every step, from L1: in registers they would not fit.
template <class T>
__device__ void RunGatherProducer(const MoeGemmArgs& args,
                                  const SharedStorage<T>& smem,
                                  int thread) {
  constexpr int kChunks = T::kStepBytes / 16;
  constexpr int kRowsPerPass = T::kGatherThreads / kChunks;
  static_assert(kRowsPerPass == 8, "a thread keeps its row's place in the swizzle pattern");
  constexpr int kBatch = 8;  // indices in flight before the copies that need them
  const int chunk = thread % kChunks;
  const int first_row = thread / kChunks;
  const uint32_t offset = first_row * T::kStepBytes + ((chunk ^ first_row) * 16);
  const uint8_t* x = static_cast<const uint8_t*>(args.x);
  const int64_t row_bytes = static_cast<int64_t>(args.k) * sizeof(typename T::Element);
  GridDependencyWait();
  PipelineState<T::kStages> stage;
  PipelineState<T::kRing> slot;
  while (true) {
    ptx::BarrierWait(smem.ring_full(slot.index), slot.parity);
    const TileInfo info = smem.ring()[slot.index];
    __syncwarp();
    if (thread % 32 == 0) ptx::BarrierArrive(smem.ring_empty(slot.index));
    slot.Advance();
    if (info.rows == 0) break;

    const int* const index = args.row_index + info.row;
    for (int step = 0; step < args.num_k_steps; ++step) {
      ptx::BarrierWait(smem.empty(stage.index), stage.parity ^ 1);
      const uint32_t dst = ptx::SmemAddress(smem.tokens(stage.index)) + offset;
      const int byte = step * T::kStepBytes + chunk * 16;
      const bool inside = byte < row_bytes;  // past the end of k: zeros
      for (int r0 = first_row; r0 < info.rows; r0 += kBatch * kRowsPerPass) {
        int source[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int r = r0 + i * kRowsPerPass;
          source[i] = r < info.rows ? index[r] : -1;
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (source[i] >= 0) {
            ptx::CopyAsync16(dst + (r0 - first_row + i * kRowsPerPass) * T::kStepBytes,
                             x + source[i] * row_bytes + (inside ? byte : 0),
                             inside);
          }
        }
      }
      ptx::CopyAsyncArrive(smem.full(stage.index));
      stage.Advance();
    }
  }
  ptx::CopyAsyncWaitAll();  // no copy outlives its thread
}

}  // namespace jaxmoe
