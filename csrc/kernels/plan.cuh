// Device code of plan: stable counting sort of the R = T*K slots by local expert e.
//
// Problem, per batch entry b:
//   local(r)            = expert_map[ids[r]] or ids[r] - expert_offset; outside [0,E_l): no group
//   expert_offsets[e]   = number of slots r with local(r) < e
//   slot_to_row[r]      = expert_offsets[e] + number of r' < r with local(r') = e = local(r)
//   row_to_token[slot_to_row[r]] = r / K; -1 past expert_offsets[E_l]
//
// Shape: the slots of b are cut into chunks, one block each: 512 slots, more only to keep the
//   number of chunks down (PlanChunkRows). A block ranks its slots in tiles of at most 2048: warp w
//   owns a contiguous run of 32 or 64 of them in registers and counts it per expert in shared
//   memory (uint16 [warps][experts]); the counts are scanned over warps, then over experts. What
//   the block needs to know of other chunks is, per expert, the slots before its own and the total.
// Direct (R <= 8192): one kernel; each block counts the ids of the other chunks itself, with
//   shared-memory atomics: up to 8 ids a thread, all in flight at once.
// Table (larger): a first kernel counts each chunk into table[chunks][E_l]; the second loads and
//   ranks its slots while the first still runs (programmatic dependent launch), then sums the
//   table's columns, 64 KB from L2 at E = 256.
// Shared memory: at most 76 KiB (E_l >= 1024), 13 KiB at 512 slots and E = 128. Experts are handled
//   in windows of 1024, so that any E_l works.
// Time is latency, traffic is 12 bytes a slot: a launch 2 us, a trip to memory 0.8 us, ranks and
//   scans 0.7 us. Predicted: 3.3 us at R <= 512, 4.2 at 4096, 5 at 8192; 7 at 16384 and 32768, 8 at
//   131072 (E = 256), inside a graph.
// Why this shape: ranks come from ballots and counts are integers added in any order, so the result
//   is the same on every run. One block with match.any took 8.4 us at R = 4096, growing by 1.5 us
//   per 1024 slots; a ballot per bit of the expert id is about 40 issue slots a warp. Blocks that
//   wait for each other inside one kernel would need flags that somebody clears, and all blocks
//   resident.
#pragma once

#include <cstdint>

#include "csrc/common/launch.h"
#include "csrc/kernels/local_expert.cuh"

namespace jaxmoe {

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kFullMask = 0xffffffffu;

inline constexpr int kPlanMaxThreads = 1024;
inline constexpr int kPlanMaxWarps = kPlanMaxThreads / kWarpSize;
inline constexpr int kPlanTileIters = 2;  // slots a lane holds
inline constexpr int kPlanTileRows = kPlanTileIters * kPlanMaxThreads;
inline constexpr int kPlanCountThreads = 512;
inline constexpr int kPlanWindow = 1024;  // experts at a time; thread e takes the e-th of them
static_assert(kPlanWindow <= kPlanMaxThreads, "one thread an expert");

// How a batch entry is cut. Grid: batch * chunks blocks, chunks fastest.
struct PlanShape {
  int chunks;
  int chunk_rows;
  int row_warps;  // warps that hold slots of a tile
  int iters;      // slots a lane holds, <= kPlanTileIters
  int width;      // experts in a window
  int threads;    // of a placing block
};

// Shared memory of the placing kernel: int base[width], int sums[2][kPlanWindow],
// uint16_t counts[row_warps][width].
inline int64_t PlanPlaceSmemBytes(const PlanShape& shape) {
  int64_t counts = int64_t{shape.row_warps} * shape.width;
  return (shape.width + 2 * kPlanWindow) * int64_t{sizeof(int)} +
         RoundUp(counts * sizeof(uint16_t), sizeof(int));
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

__device__ __forceinline__ void ZeroCounters(int32_t* counters, int64_t count) {
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) counters[i] = 0;
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

// First kernel of the table form: table[c][e] = slots of expert e in chunk c.
__global__ void __launch_bounds__(kPlanCountThreads)
    PlanCountKernel(PlanParams params, PlanShape shape) {
  __shared__ int counts[kPlanWindow];

  GridDependencyWait();
  GridDependencyLaunch();

  if (blockIdx.x == 0) ZeroCounters(params.zero_counters, params.num_zero_counters);
  PlanChunk c = PlanBlockChunk(shape, static_cast<int>(params.num_tokens * params.top_k));
  PlanView v = PlanBatchEntry(params, c.batch);
  int32_t* table = params.scratch + static_cast<int64_t>(blockIdx.x) * v.local_experts;
  for (int window = 0; window < v.local_experts; window += kPlanWindow) {
    int width = min(kPlanWindow, v.local_experts - window);
    for (int e = threadIdx.x; e < width; e += kPlanCountThreads) counts[e] = 0;
    __syncthreads();
    CountSlots(
        params, v, c.first_row, c.end_row, c.end_row, c.end_row, window, width, counts, counts);
    __syncthreads();
    for (int e = threadIdx.x; e < width; e += kPlanCountThreads) table[window + e] = counts[e];
    __syncthreads();
  }
}

// Thread e gets the sums over chunks of the column window + e of the table: those before `chunk`
// and all. `table` is this batch entry's, `sums` is shared [2][kPlanWindow].
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

// kTable: the counts of all chunks are in params.scratch, otherwise they are counted here.
template <bool kTable>
__global__ void __launch_bounds__(kPlanMaxThreads)
    PlanPlaceKernel(PlanParams params, PlanShape shape) {
  extern __shared__ __align__(16) unsigned char plan_smem[];
  __shared__ int warp_sums[kWarpSize];
  int* base = reinterpret_cast<int*>(plan_smem);  // next row of each expert of the window
  int* sums = base + shape.width;
  uint16_t* counts = reinterpret_cast<uint16_t*>(sums + 2 * kPlanWindow);

  if constexpr (!kTable) {
    GridDependencyWait();
    GridDependencyLaunch();
    if (blockIdx.x == 0) ZeroCounters(params.zero_counters, params.num_zero_counters);
  }

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
      // NOTE: in the table form this is before the wait. The ids are older than the counting
      // kernel, which lets this one start only after its own wait.
#pragma unroll
      for (int i = 0; i < kPlanTileIters; ++i) {
        unsigned row = first_row + i * kWarpSize;
        bool valid = has_rows && i < shape.iters && row < c.end_row;
        expert[i] = valid ? __ldcg(v.expert_ids + row) : kPlanNoExpert;
      }
      // Clear while the ids are in flight.
      int count_words = (shape.row_warps * shape.width + 1) / 2;
      for (int i = threadIdx.x; i < count_words; i += blockDim.x) {
        reinterpret_cast<uint32_t*>(counts)[i] = 0;
      }
      if constexpr (!kTable) {
        if (e < width) sums[e] = sums[kPlanWindow + e] = 0;
      }
      __syncthreads();
      if (!kTable && shape.chunks > 1) {
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
