// Device code that places the slots of one chunk: ranks, scans and stores, see plan.cuh.
#pragma once

#include <cstdint>

#include "csrc/common/launch.h"
#include "csrc/common/mbarrier.cuh"
#include "csrc/kernels/local_expert.cuh"
#include "csrc/kernels/plan_count.cuh"
#include "csrc/kernels/plan_shape.cuh"

namespace jaxmoe {

__device__ __forceinline__ int WarpInclusiveScan(int value, int lane) {
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    int other = __shfl_up_sync(kFullMask, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// Exclusive sum of `value` over the threads of the block; `total` gets the sum of all of them.
// `warp_sums` is shared, [32]. All threads of the block call it.
__device__ __forceinline__ int BlockExclusiveScan(int value, int* warp_sums, int* total) {
  int lane = threadIdx.x % kWarpSize;
  int warp = threadIdx.x / kWarpSize;
  int num_warps = blockDim.x / kWarpSize;
  int inclusive = WarpInclusiveScan(value, lane);
  __syncthreads();  // warp_sums may still be read by an earlier call
  if (lane == kWarpSize - 1) warp_sums[warp] = inclusive;
  __syncthreads();
  // Every warp scans the few sums itself, which saves a third barrier.
  int sums = WarpInclusiveScan(lane < num_warps ? warp_sums[lane] : 0, lane);
  *total = __shfl_sync(kFullMask, sums, kWarpSize - 1);
  int before = __shfl_sync(kFullMask, sums, warp > 0 ? warp - 1 : 0);
  return inclusive - value + (warp > 0 ? before : 0);
}

// Ranks the slots of a warp's run among those of the same column of the window, and counts them.
// Column `width` stands for no expert of the window. `own` is this warp's [width], zero before.
__device__ __forceinline__ void RankSlots(const int (&column)[kPlanTileIters],
                                          int iters,
                                          int width,
                                          uint16_t* own,
                                          int (&rank)[kPlanTileIters]) {
  int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int i = 0; i < kPlanTileIters; ++i) {
    if (i >= iters) break;
    unsigned peers = kFullMask;  // lanes of the same column
    for (int rest = width, bit = 0; rest > 0; rest >>= 1, ++bit) {
      bool set = (column[i] >> bit & 1) != 0;
      unsigned with_bit = __ballot_sync(kFullMask, set);
      peers &= set ? with_bit : ~with_bit;
    }
    int before = __popc(peers & ((1u << lane) - 1));
    bool placed = column[i] < width;
    int seen = i > 0 && placed ? own[column[i]] : 0;
    rank[i] = seen + before;
    __syncwarp();
    if (placed && before == 0) own[column[i]] = static_cast<uint16_t>(seen + __popc(peers));
    __syncwarp();
  }
}

// Shared memory by which the blocks of a cluster, a chunk each, tell each other their counts.
struct PlanCluster {
  const int* ids;  // kCluster: of the slots of this chunk, in shared memory
  uint64_t* told;  // barrier in shared memory: phase 0 ends when all others have told this block
};

// All threads of all blocks of the cluster, before anything else.
template <PlanTotals kTotals>
__device__ __forceinline__ void BeginTelling(const PlanShape& shape, uint64_t* told) {
  if (shape.cluster == 1) return;
  if (threadIdx.x == 0) {
    int bytes = shape.width * PlanToldInts(kTotals) * int{sizeof(int)};
    ptx::BarrierInit(told, 1);
    ptx::BarrierInitFence();
    ptx::BarrierArriveExpectTx(told, (shape.cluster - 1) * bytes);
  }
  ptx::ClusterArriveInit();
}

// Slots of one expert, as a block knows them.
struct PlanKnown {
  int own;   // in its chunk
  int low;   // kShared: counted by this block, before the chunks of the cluster
  int high;  // kShared: counted by this block, behind them
};

// After BeginTelling: thread e tells the other blocks what this one knows of expert e, and gets the
// sums over the chunks before and over all. `sums` is shared, [cluster][width] of what is told.
// NOTE: pushed, because the release that lets others read this block's memory costs a microsecond.
// A block ends only after it was told everything, so nobody writes to one that is gone.
template <PlanTotals kTotals>
__device__ __forceinline__ void TellCounts(const PlanShape& shape,
                                           int member,
                                           const PlanKnown& known,
                                           int* sums,
                                           uint64_t* told,
                                           int* before,
                                           int* total) {
  constexpr bool kShared = kTotals == PlanTotals::kShared;
  auto* pairs = reinterpret_cast<int2*>(sums);  // kShared: of before and total
  int e = threadIdx.x;
  int all = known.low + known.own + known.high;
  if (shape.cluster > 1) {
    ptx::ClusterWait();
    for (int i = 1; i < shape.cluster && e < shape.width; ++i) {
      int to = (member + i) & (shape.cluster - 1);
      int at = member * shape.width + e;
      if constexpr (kShared) {
        int2 pair{known.low + (member < to ? known.own : 0), all};
        ptx::StoreAsyncAt(pairs + at, told, to, pair);
      } else {
        ptx::StoreAsyncAt(sums + at, told, to, known.own);
      }
    }
    ptx::BarrierWait(told, 0);
  }
  *before = known.low;
  *total = all;
  if (e >= shape.width) return;
  for (int c = 0; c < shape.cluster; ++c) {
    if (c == member) continue;
    if constexpr (kShared) {
      int2 pair = pairs[c * shape.width + e];
      *before += pair.x;
      *total += pair.y;
    } else {
      int count = sums[c * shape.width + e];
      if (c < member) *before += count;
      *total += count;
    }
  }
}

// Places the slots of this block's chunk, and writes the expert offsets if it is the first one. All
// threads of the block call it, at least shape.width. kShared, kCluster: a chunk is one tile, and
// the experts are one window; otherwise `cluster` is not read.
template <PlanTotals kTotals>
__device__ __forceinline__ void PlaceSlots(const PlanParams& params,
                                           const PlanShape& shape,
                                           const PlanScratch& scratch,
                                           PlanCluster cluster) {
  constexpr bool kDirect = kTotals == PlanTotals::kDirect;
  constexpr bool kTable = kTotals == PlanTotals::kTable;
  constexpr bool kShared = kTotals == PlanTotals::kShared;
  constexpr bool kCluster = kTotals == PlanTotals::kCluster;
  constexpr bool kOne = PlanTells(kTotals);  // tile, and window
  __shared__ int warp_sums[kWarpSize];
  __shared__ int staged_map[kShared ? kPlanStagedExperts : 1];
  const bool stages =
      kShared && params.expert_map != nullptr && params.num_experts <= kPlanStagedExperts;
  const int* staged = stages ? staged_map : nullptr;
  int* base = scratch.base;
  int* sums = scratch.sums;
  uint16_t* counts = scratch.counts;

  PlanChunk c = PlanBlockChunk(shape, static_cast<int>(params.num_tokens * params.top_k));
  PlanView v = PlanBatchEntry(params, c.batch);
  int lane = threadIdx.x % kWarpSize;
  int warp = threadIdx.x / kWarpSize;
  int e = threadIdx.x;
  bool has_rows = warp < shape.row_warps;
  uint16_t* own_counts = counts + warp * shape.width;
  // Counts of slots in other chunks. kShared: they lie where this block would tell itself.
  int member = PlanTells(kTotals) ? c.chunk & (shape.cluster - 1) : 0;
  int* low = kShared ? sums + member * PlanToldInts(kTotals) * shape.width : sums;
  int* high = low + (kShared ? shape.width : kPlanWindow);

  int window_offset = 0;  // rows of all experts before the window
  // NOTE: one round even without experts or slots, for the slots of no group and the offsets.
  for (int window = 0; window == 0 || (!kOne && window < v.local_experts); window += kPlanWindow) {
    int width = min(shape.width, v.local_experts - window);
    int next = 0;  // of thread e: the next row of expert window + e
    unsigned tile = c.first_row;
    do {
      unsigned first_row = tile + warp * shape.iters * kWarpSize + lane;
      int expert[kPlanTileIters];  // local expert of slot first_row + 32 * i
      int rank[kPlanTileIters];    // slots of that expert before it in this warp's run
      // NOTE: in the table form this may be before the wait, see PlanPlaceKernel.
#pragma unroll
      for (int i = 0; i < kPlanTileIters; ++i) {
        unsigned row = first_row + i * kWarpSize;
        bool valid = has_rows && i < shape.iters && row < c.end_row;
        if constexpr (kCluster) {
          expert[i] = valid ? cluster.ids[row - c.first_row] : kPlanNoExpert;
        } else {
          expert[i] = valid ? __ldcg(v.expert_ids + row) : kPlanNoExpert;
        }
      }
      // Clear while the ids are in flight.
      int count_words = (shape.row_warps * shape.width + 1) / 2;
      for (int i = threadIdx.x; i < count_words; i += blockDim.x) {
        reinterpret_cast<uint32_t*>(counts)[i] = 0;
      }
      if constexpr (kShared) {
        for (int i = threadIdx.x; stages && i < params.num_experts; i += blockDim.x) {
          staged_map[i] = __ldcg(params.expert_map + i);
        }
      }
      if constexpr (kDirect || kShared) {
        if (e < width) low[e] = high[e] = 0;
      }
      __syncthreads();
      if (kShared || (kDirect && shape.chunks > 1)) {
        constexpr unsigned kBlocks = kShared ? kPlanSharedBlocks : 1;
        CountShare<kBlocks>(params, v, shape, staged, c.chunk, member, window, width, low, high);
      }
      if (has_rows) {
        int column[kPlanTileIters];
#pragma unroll
        for (int i = 0; i < kPlanTileIters; ++i) {
          expert[i] = LocalExpert(params, expert[i], staged);
          bool placed = expert[i] >= window && expert[i] - window < width;
          column[i] = placed ? expert[i] - window : width;
        }
        RankSlots(column, shape.iters, width, own_counts, rank);
      }
      __syncthreads();

      // Thread e scans the warps' counts of its expert, some at a time: there may be one or 32.
      int own = 0;
      constexpr int kStep = 8;
      for (int first = 0; first < shape.row_warps && e < width; first += kStep) {
        int warp_rows[kStep];
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
          warp_rows[i] = first + i < shape.row_warps ? counts[(first + i) * shape.width + e] : 0;
        }
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
          if (first + i >= shape.row_warps) break;
          counts[(first + i) * shape.width + e] = static_cast<uint16_t>(own);
          own += warp_rows[i];
        }
      }
      if (tile == c.first_row) {
        int before = 0;  // slots of this expert in the chunks before, and in all
        int total = 0;
        if constexpr (kTable) {
          if (window == 0) {
            GridDependencyWait();
            GridDependencyLaunch();
          }
          const int32_t* table = params.scratch + c.batch * shape.chunks * params.num_local_experts;
          SumTable(table, shape, v, c.chunk, window, width, sums, &before, &total);
        } else if constexpr (kCluster) {
          TellCounts<kTotals>(shape, member, {own, 0, 0}, sums, cluster.told, &before, &total);
        } else if constexpr (kShared) {
          PlanKnown known{own, e < width ? low[e] : 0, e < width ? high[e] : 0};
          TellCounts<kTotals>(shape, member, known, sums, cluster.told, &before, &total);
        } else if (e < width) {
          before = low[e];
          total = before + own + high[e];
        }
        int window_rows;
        int offset = window_offset + BlockExclusiveScan(total, warp_sums, &window_rows);
        if (c.chunk == 0 && e < width) v.expert_offsets[window + e] = offset;
        next = offset + before;
        window_offset += window_rows;
      }
      if (e < width) base[e] = next;
      next += own;
      __syncthreads();

#pragma unroll
      for (int i = 0; i < kPlanTileIters; ++i) {
        unsigned row = first_row + i * kWarpSize;
        if (!has_rows || i >= shape.iters || row >= c.end_row) break;
        int column = expert[i] - window;
        if (expert[i] >= window && column < width) {
          int position = base[column] + own_counts[column] + rank[i];
          v.row_to_token[position] = static_cast<int>(row / v.top_k);
          v.slot_to_row[row] = position;
        } else if (expert[i] == kPlanNoExpert && window == 0) {
          v.slot_to_row[row] = -1;
        }
      }
      tile += kPlanTileRows;
      if constexpr (!kOne) __syncthreads();  // before the next tile or window clears the counts
    } while (!kOne && tile < c.end_row);
  }

  if (c.chunk == 0 && e == 0) v.expert_offsets[v.local_experts] = window_offset;
  // All local rows of the batch entry are below window_offset, so these are nobody's.
  unsigned row = max(c.first_row, static_cast<unsigned>(window_offset));
  for (row += threadIdx.x; row < c.end_row; row += blockDim.x) v.row_to_token[row] = -1;
}

}  // namespace jaxmoe
