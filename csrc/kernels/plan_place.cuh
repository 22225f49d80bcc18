// Device code that places the slots of one chunk: ranks, scans and stores, see plan.cuh.
#pragma once

#include <cstdint>

#include "csrc/common/launch.h"
#include "csrc/common/mbarrier.cuh"
#include "csrc/kernels/local_expert.cuh"

namespace jaxmoe {

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kFullMask = 0xffffffffu;

inline constexpr int kPlanMaxThreads = 1024;
inline constexpr int kPlanMaxWarps = kPlanMaxThreads / kWarpSize;
inline constexpr int kPlanTileIters = 2;  // slots a lane holds
inline constexpr int kPlanTileRows = kPlanTileIters * kPlanMaxThreads;
inline constexpr int kPlanWindow = 1024;  // experts at a time; thread e takes the e-th of them
static_assert(kPlanWindow <= kPlanMaxThreads, "one thread an expert");

// Where a block learns what other chunks have of each expert.
enum class PlanTotals {
  kDirect,   // it counts their ids
  kTable,    // from params.scratch, [B][chunks][E_l], which the kernel before has filled
  kCluster,  // the other blocks of its cluster tell it
};

// How a batch entry is cut. Grid: batch * chunks blocks, chunks fastest.
struct PlanShape {
  int chunks;
  int chunk_rows;
  int row_warps;  // warps that hold slots of a tile
  int iters;      // slots a lane holds, <= kPlanTileIters
  int width;      // experts in a window
  int threads;    // of a placing block
};

// How many ints PlanScratch::sums has.
inline constexpr int PlanSums(PlanTotals totals, const PlanShape& shape) {
  return totals == PlanTotals::kCluster ? shape.chunks * shape.width : 2 * kPlanWindow;
}

// Shared memory of PlaceSlots, carved in this order from PlanScratchBytes bytes.
struct PlanScratch {
  int* base;         // [width], next row of each expert of the window
  int* sums;         // [PlanSums]
  uint16_t* counts;  // [row_warps][width]
};

inline int64_t PlanScratchBytes(PlanTotals totals, const PlanShape& shape) {
  int64_t counts = int64_t{shape.row_warps} * shape.width;
  return (shape.width + PlanSums(totals, shape)) * int64_t{sizeof(int)} +
         RoundUp(counts * sizeof(uint16_t), sizeof(int));
}

__device__ __forceinline__ PlanScratch MakePlanScratch(PlanTotals totals,
                                                       const PlanShape& shape,
                                                       void* smem) {
  PlanScratch scratch;
  scratch.base = static_cast<int*>(smem);
  scratch.sums = scratch.base + shape.width;
  scratch.counts = reinterpret_cast<uint16_t*>(scratch.sums + PlanSums(totals, shape));
  return scratch;
}

// One batch entry with 32-bit sizes; R < 2^31.
struct PlanView {
  const int32_t* expert_ids;  // [R]
  const int32_t* expert_map;  // [E] or nullptr
  int32_t* expert_offsets;    // [E_l+1]
  int32_t* row_to_token;      // [R]
  int32_t* slot_to_row;       // [R]
  int rows;                   // R
  int local_experts;          // E_l
  unsigned top_k;             // K
};

__device__ __forceinline__ PlanView PlanBatchEntry(const PlanParams& p, int64_t b) {
  int64_t rows = p.num_tokens * p.top_k;
  PlanView v;
  v.expert_ids = p.expert_ids + b * rows;
  v.expert_map = p.expert_map;
  v.expert_offsets = p.expert_offsets + b * (p.num_local_experts + 1);
  v.row_to_token = p.row_to_token + b * rows;
  v.slot_to_row = p.slot_to_row + b * rows;
  v.rows = static_cast<int>(rows);
  v.local_experts = static_cast<int>(p.num_local_experts);
  v.top_k = static_cast<unsigned>(p.top_k);
  return v;
}

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

// The part of a batch entry that this block places.
struct PlanChunk {
  int64_t batch;  // b
  int chunk;
  unsigned first_row;
  unsigned end_row;
};

__device__ __forceinline__ PlanChunk PlanBlockChunk(const PlanShape& shape, int rows) {
  PlanChunk c;
  c.batch = blockIdx.x / static_cast<unsigned>(shape.chunks);
  c.chunk = static_cast<int>(blockIdx.x % static_cast<unsigned>(shape.chunks));
  // Unsigned: the end of the last chunk may pass 2^31.
  c.first_row = static_cast<unsigned>(c.chunk) * static_cast<unsigned>(shape.chunk_rows);
  c.end_row = min(c.first_row + shape.chunk_rows, static_cast<unsigned>(rows));
  return c;
}

// Adds the slots [begin, end) whose expert is in the window to `low`, those at or past `hole_end`
// to `high`; those in [hole_begin, hole_end) are left out. All threads of the block call it.
__device__ __forceinline__ void CountSlots(const PlanParams& p,
                                           const PlanView& v,
                                           unsigned begin,
                                           unsigned end,
                                           unsigned hole_begin,
                                           unsigned hole_end,
                                           int window,
                                           int width,
                                           int* low,
                                           int* high) {
  constexpr int kUnroll = 8;
  for (unsigned base = begin + threadIdx.x; base < end; base += kUnroll * blockDim.x) {
    int id[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      unsigned row = base + i * blockDim.x;
      bool counted = row < end && (row < hole_begin || row >= hole_end);
      id[i] = counted ? __ldcg(v.expert_ids + row) : kPlanNoExpert;
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      int expert = LocalExpert(p, id[i]);
      if (expert < window || expert - window >= width) continue;
      atomicAdd((base + i * blockDim.x < hole_begin ? low : high) + (expert - window), 1);
    }
  }
}

// Thread e gets the sums of the column window + e of the table: of the rows before those of
// `chunk`, and of all. `table` is this batch entry's, `sums` is shared [2][kPlanWindow].
__device__ __forceinline__ void SumTable(const int32_t* table,
                                         const PlanShape& shape,
                                         const PlanView& v,
                                         int chunk,
                                         int window,
                                         int width,
                                         int* sums,
                                         int* before,
                                         int* total) {
  constexpr int kUnroll = 16;
  // A warp sums 32 columns over every `parts`-th chunk.
  int lane = threadIdx.x % kWarpSize;
  int warp = threadIdx.x / kWarpSize;
  int column_groups = max(1, static_cast<int>(CeilDiv(width, kWarpSize)));
  int columns = column_groups * kWarpSize;
  int parts = static_cast<int>(blockDim.x / kWarpSize) / column_groups;
  int part = warp / column_groups;
  int column = warp % column_groups * kWarpSize + lane;
  if (part < parts && column < width) {
    int part_before = 0;
    int part_total = 0;
    for (int first = part; first < shape.chunks; first += kUnroll * parts) {
      int count[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        int c = first + i * parts;
        const int32_t* address = table + static_cast<int64_t>(c) * v.local_experts;
        count[i] = c < shape.chunks ? __ldcg(address + window + column) : 0;
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        part_total += count[i];
        if (first + i * parts < chunk) part_before += count[i];
      }
    }
    sums[part * columns + column] = part_before;
    sums[kPlanWindow + part * columns + column] = part_total;
  }
  __syncthreads();
  *before = 0;
  *total = 0;
  if (static_cast<int>(threadIdx.x) >= width) return;
  for (int i = 0; i < parts; ++i) {
    *before += sums[i * columns + threadIdx.x];
    *total += sums[kPlanWindow + i * columns + threadIdx.x];
  }
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

// What blocks of one cluster, a chunk each, tell each other.
struct PlanCluster {
  const int* ids;  // of the slots of this chunk, in shared memory
  uint64_t* told;  // barrier in shared memory: phase 0 ends when all others have told this block
};

// All threads of all blocks of the cluster, before anything else. shape.chunks is a power of two.
__device__ __forceinline__ void BeginTelling(const PlanShape& shape, uint64_t* told) {
  if (shape.chunks == 1) return;
  if (threadIdx.x == 0) {
    ptx::BarrierInit(told, 1);
    ptx::BarrierInitFence();
    ptx::BarrierArriveExpectTx(told, (shape.chunks - 1) * shape.width * int{sizeof(int)});
  }
  ptx::ClusterArriveInit();
}

// After BeginTelling: thread e tells the other blocks how many slots of expert e its chunk has, and
// gets the sums over the chunks before and over all. `sums` is shared, [chunks][width].
// NOTE: pushed, because the release that lets others read this block's memory costs a microsecond.
// A block ends only after it was told everything, so nobody writes to one that is gone.
__device__ __forceinline__ void TellCounts(const PlanShape& shape,
                                           int chunk,
                                           int own,
                                           int* sums,
                                           uint64_t* told,
                                           int* before,
                                           int* total) {
  *before = 0;
  *total = 0;
  int e = threadIdx.x;
  if (shape.chunks > 1) {
    ptx::ClusterWait();
    for (int i = 1; i < shape.chunks && e < shape.width; ++i) {
      int to = (chunk + i) & (shape.chunks - 1);
      ptx::StoreAsyncAt(sums + chunk * shape.width + e, told, to, own);
    }
    ptx::BarrierWait(told, 0);
  }
  if (e >= shape.width) return;
  for (int c = 0; c < shape.chunks; ++c) {
    int count = c == chunk ? own : sums[c * shape.width + e];
    if (c < chunk) *before += count;
    *total += count;
  }
}

// Places the slots of this block's chunk, and writes the expert offsets if it is the first one. All
// threads of the block call it, at least shape.width. kCluster: a chunk is one tile, and the
// experts are one window; otherwise `cluster` is not read.
template <PlanTotals kTotals>
__device__ __forceinline__ void PlaceSlots(const PlanParams& params,
                                           const PlanShape& shape,
                                           const PlanScratch& scratch,
                                           PlanCluster cluster) {
  constexpr bool kDirect = kTotals == PlanTotals::kDirect;
  constexpr bool kTable = kTotals == PlanTotals::kTable;
  constexpr bool kCluster = kTotals == PlanTotals::kCluster;
  __shared__ int warp_sums[kWarpSize];
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

  int window_offset = 0;  // rows of all experts before the window
  // NOTE: one round even without experts or slots, for the slots of no group and the offsets.
  for (int window = 0; window == 0 || window < v.local_experts; window += kPlanWindow) {
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
      if constexpr (kDirect) {
        if (e < width) sums[e] = sums[kPlanWindow + e] = 0;
      }
      __syncthreads();
      if (kDirect && shape.chunks > 1) {
        CountSlots(
            params, v, 0, v.rows, c.first_row, c.end_row, window, width, sums, sums + kPlanWindow);
      }
      if (has_rows) {
        int column[kPlanTileIters];
#pragma unroll
        for (int i = 0; i < kPlanTileIters; ++i) {
          expert[i] = LocalExpert(params, expert[i]);
          bool placed = expert[i] >= window && expert[i] - window < width;
          column[i] = placed ? expert[i] - window : width;
        }
        RankSlots(column, shape.iters, width, own_counts, rank);
      }
      __syncthreads();

      // Thread e scans the warps' counts of its expert.
      int own = 0;
      if (e < width) {
        int warp_rows[kPlanMaxWarps];
#pragma unroll
        for (int w = 0; w < kPlanMaxWarps; ++w) {
          warp_rows[w] = w < shape.row_warps ? counts[w * shape.width + e] : 0;
        }
#pragma unroll
        for (int w = 0; w < kPlanMaxWarps; ++w) {
          if (w < shape.row_warps) counts[w * shape.width + e] = static_cast<uint16_t>(own);
          own += warp_rows[w];
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
          TellCounts(shape, c.chunk, own, sums, cluster.told, &before, &total);
        } else if (e < width) {
          before = sums[e];
          total = before + own + sums[kPlanWindow + e];
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
      __syncthreads();  // before the next tile or window clears the counts
    } while (tile < c.end_row);
  }

  if (c.chunk == 0 && e == 0) v.expert_offsets[v.local_experts] = window_offset;
  // All local rows of the batch entry are below window_offset, so these are nobody's.
  unsigned row = max(c.first_row, static_cast<unsigned>(window_offset));
  for (row += threadIdx.x; row < c.end_row; row += blockDim.x) v.row_to_token[row] = -1;
}

}  // namespace jaxmoe
