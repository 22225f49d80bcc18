// Device code of plan: stable counting sort of the R = T*K slots by local expert e.
//
// Problem, per batch entry b:
//   local(r)            = expert_map[ids[r]] or ids[r] - expert_offset; outside [0,E_l): no group
//   expert_offsets[e]   = number of slots r with local(r) < e
//   slot_to_row[r]      = expert_offsets[e] + number of r' < r with local(r') = e = local(r)
//   row_to_token[slot_to_row[r]] = r / K; -1 past expert_offsets[E_l]
//
// Small (R <= 4096, E_l <= 1024): one block per b. Warp w owns a contiguous run of at most 128
//   slots held in registers. Counts per (warp, expert) in shared memory, then one scan over warps
//   and experts. Shared memory: 2 * row_warps * E_l + 4 R bytes, 80 KiB at most, 10 KiB at R = 512
//   and E_l = 256. Traffic is 12 bytes a slot; the time is latency: load (and map), two block-wide
//   scans, store. Predicted 3 us at R <= 512, 4.5 us at R = 4096, inside a graph.
// Large: count per chunk, scan over chunks, place. One block of 8 warps per chunk of at least 1024
//   slots; each warp owns an eighth of the chunk. Static shared memory 32 KiB, a window of 1024
//   experts at a time, so that any E_l works. Bytes at R = 131072, E = 256: 12 R + 16 * 128 * E =
//   2.1 MB, 0.5 us; predicted 8 us for the three launches.
// Why this shape: slots are ranked with __match_any_sync and counts are integers added in any
// order, so the result is the same on every run. A single block would need 128 passes at R = 131072
// and atomics on a shared cursor would be shorter but lose the order inside an expert.
#pragma once

#include <cstdint>

#include "csrc/common/launch.h"
#include "csrc/kernels/plan.h"

namespace jaxmoe {

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kFullMask = 0xffffffffu;
inline constexpr int kPlanNoExpert = -1;

inline constexpr int kPlanSmallMaxThreads = 1024;
inline constexpr int kPlanSmallMaxWarps = kPlanSmallMaxThreads / kWarpSize;
inline constexpr int kPlanSmallIters =
    static_cast<int>(kPlanSmallRows) / kPlanSmallMaxThreads;  // slots per thread

inline constexpr int kPlanLargeThreads = 256;
inline constexpr int kPlanLargeWarps = kPlanLargeThreads / kWarpSize;
inline constexpr int kPlanWindow = 1024;  // experts counted in shared memory at a time
inline constexpr int kPlanWindowPerThread = kPlanWindow / kPlanLargeThreads;

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

// Local expert of a global id, kPlanNoExpert if it has none here.
__device__ __forceinline__ int LocalExpert(const PlanParams& p, int id) {
  if (id < 0 || id >= p.num_experts) return kPlanNoExpert;
  int64_t local = p.expert_map != nullptr ? p.expert_map[id] : id - p.expert_offset;
  return local >= 0 && local < p.num_local_experts ? static_cast<int>(local) : kPlanNoExpert;
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

// One block per batch entry. The first `row_warps` warps hold slots, `iters` per lane.
// Shared memory: counts uint16 [row_warps][E_l], from `tokens_offset` on tokens int32 [R].
__global__ void __launch_bounds__(kPlanSmallMaxThreads)
    PlanSmallKernel(PlanParams params, int row_warps, int iters, int tokens_offset) {
  extern __shared__ __align__(16) unsigned char plan_smem[];
  __shared__ int warp_sums[kWarpSize];
  uint16_t* counts = reinterpret_cast<uint16_t*>(plan_smem);
  int32_t* tokens = reinterpret_cast<int32_t*>(plan_smem + tokens_offset);

  GridDependencyWait();
  GridDependencyLaunch();

  PlanView v = PlanBatchEntry(params, blockIdx.x);
  int lane = threadIdx.x % kWarpSize;
  int warp = threadIdx.x / kWarpSize;
  bool has_rows = warp < row_warps;
  int first_row = warp * iters * kWarpSize + lane;

  int expert[kPlanSmallIters];  // local expert of slot first_row + 32 * i
  int rank[kPlanSmallIters];    // slots of that expert before it in this warp's run
  if (has_rows) {
#pragma unroll
    for (int i = 0; i < kPlanSmallIters; ++i) {
      int row = first_row + i * kWarpSize;
      expert[i] = i < iters && row < v.rows ? v.expert_ids[row] : -1;
    }
  }
  // Clear the counts while the ids are in flight.
  int count_words = static_cast<int>(CeilDiv(int64_t{row_warps} * v.local_experts, 2));
  for (int i = threadIdx.x; i < count_words; i += blockDim.x) {
    reinterpret_cast<uint32_t*>(plan_smem)[i] = 0;
  }
  if (blockIdx.x == 0) ZeroCounters(params.zero_counters, params.num_zero_counters);
  if (has_rows) {
#pragma unroll
    for (int i = 0; i < kPlanSmallIters; ++i) expert[i] = LocalExpert(params, expert[i]);
  }
  __syncthreads();

  if (has_rows) {
    uint16_t* own = counts + warp * v.local_experts;
#pragma unroll
    for (int i = 0; i < kPlanSmallIters; ++i) {
      if (i >= iters) break;
      unsigned peers = __match_any_sync(kFullMask, expert[i]);
      int before = __popc(peers & ((1u << lane) - 1));
      int seen = expert[i] >= 0 ? own[expert[i]] : 0;
      rank[i] = seen + before;
      __syncwarp();
      if (expert[i] >= 0 && before == 0) {
        own[expert[i]] = static_cast<uint16_t>(seen + __popc(peers));
      }
      __syncwarp();
    }
  }
  __syncthreads();

  // Thread e scans the warps' counts of expert e, then all threads scan over experts.
  int e = threadIdx.x;
  int expert_rows = 0;
  int warp_rows[kPlanSmallMaxWarps];
  if (e < v.local_experts) {
#pragma unroll
    for (int w = 0; w < kPlanSmallMaxWarps; ++w) {
      warp_rows[w] = w < row_warps ? counts[w * v.local_experts + e] : 0;
    }
#pragma unroll
    for (int w = 0; w < kPlanSmallMaxWarps; ++w) expert_rows += warp_rows[w];
  }
  int num_local_rows;
  int offset = BlockExclusiveScan(expert_rows, warp_sums, &num_local_rows);
  if (e < v.local_experts) {
    v.expert_offsets[e] = offset;
#pragma unroll
    for (int w = 0; w < kPlanSmallMaxWarps; ++w) {
      // First row of (warp w, expert e); at most 4096.
      if (w < row_warps) counts[w * v.local_experts + e] = static_cast<uint16_t>(offset);
      offset += warp_rows[w];
    }
  }
  if (e == 0) v.expert_offsets[v.local_experts] = num_local_rows;
  __syncthreads();

  // NOTE: through shared memory: one SM scatters 4-byte stores at a sector or two per clock, which
  // would be a microsecond at R = 4096.
  if (has_rows) {
#pragma unroll
    for (int i = 0; i < kPlanSmallIters; ++i) {
      int row = first_row + i * kWarpSize;
      if (i >= iters || row >= v.rows) break;
      int position = -1;
      if (expert[i] >= 0) {
        position = counts[warp * v.local_experts + expert[i]] + rank[i];
        tokens[position] = static_cast<int>(static_cast<unsigned>(row) / v.top_k);
      }
      v.slot_to_row[row] = position;
    }
  }
  __syncthreads();
  for (int row = threadIdx.x; row < v.rows; row += blockDim.x) {
    v.row_to_token[row] = row < num_local_rows ? tokens[row] : -1;
  }
}

// The scratch of the large path, per batch entry: int32 [chunks + 1][E_l]. Row c holds the count of
// chunk c, after the scan the count of all chunks before c; the last row holds the totals.
struct PlanChunk {
  int32_t* table;  // [chunks+1][E_l]
  int64_t batch;   // b
  int chunk;       // c
  int first_row;   // of this chunk
  int end_row;
  int warp_first_row;  // of the part that this warp owns
  int warp_end_row;
};

// `chunk_rows` is a multiple of 256. Grid: batch * chunks blocks, chunks fastest.
__device__ __forceinline__ PlanChunk PlanBlockChunk(const PlanParams& p,
                                                    int64_t rows,
                                                    int chunks,
                                                    int64_t chunk_rows) {
  PlanChunk c;
  c.batch = blockIdx.x / static_cast<unsigned>(chunks);
  c.chunk = static_cast<int>(blockIdx.x % static_cast<unsigned>(chunks));
  c.table = p.scratch + c.batch * (chunks + 1) * p.num_local_experts;
  int64_t first = c.chunk * chunk_rows;
  int64_t warp_rows = chunk_rows / kPlanLargeWarps;
  int64_t warp_first = first + threadIdx.x / kWarpSize * warp_rows;
  auto clip = [rows](int64_t row) { return static_cast<int>(row < rows ? row : rows); };
  c.first_row = clip(first);
  c.end_row = clip(first + chunk_rows);
  c.warp_first_row = clip(warp_first);
  c.warp_end_row = clip(warp_first + warp_rows);
  return c;
}

// Adds the experts [window, window + kPlanWindow) of this warp's slots to counts[kPlanWindow].
__device__ __forceinline__ void CountWarpSlots(
    const PlanParams& p, const PlanView& v, const PlanChunk& c, int window, int* counts) {
  int lane = threadIdx.x % kWarpSize;
  // Unsigned: the last step may pass 2^31.
  for (unsigned base = c.warp_first_row; base < static_cast<unsigned>(c.warp_end_row);
       base += kWarpSize) {
    unsigned row = base + lane;
    bool valid = row < static_cast<unsigned>(c.warp_end_row);
    int expert = valid ? LocalExpert(p, v.expert_ids[row]) : kPlanNoExpert;
    bool counted = expert >= window && expert - window < kPlanWindow;
    unsigned peers = __match_any_sync(kFullMask, counted ? expert : kPlanNoExpert);
    if (counted && (peers & ((1u << lane) - 1)) == 0) counts[expert - window] += __popc(peers);
    __syncwarp();
  }
}

// Step 1: table[c][e] = slots of expert e in chunk c.
__global__ void __launch_bounds__(kPlanLargeThreads)
    PlanCountKernel(PlanParams params, int chunks, int64_t chunk_rows) {
  __shared__ int counts[kPlanLargeWarps][kPlanWindow];

  GridDependencyWait();
  GridDependencyLaunch();

  PlanChunk c = PlanBlockChunk(params, params.num_tokens * params.top_k, chunks, chunk_rows);
  PlanView v = PlanBatchEntry(params, c.batch);
  if (blockIdx.x == 0) ZeroCounters(params.zero_counters, params.num_zero_counters);
  for (int window = 0; window < v.local_experts; window += kPlanWindow) {
    int width = min(kPlanWindow, v.local_experts - window);
    for (int e = threadIdx.x; e < width; e += kPlanLargeThreads) {
#pragma unroll
      for (int w = 0; w < kPlanLargeWarps; ++w) counts[w][e] = 0;
    }
    __syncthreads();
    CountWarpSlots(params, v, c, window, counts[threadIdx.x / kWarpSize]);
    __syncthreads();
    int32_t* out = c.table + static_cast<int64_t>(c.chunk) * v.local_experts + window;
    for (int e = threadIdx.x; e < width; e += kPlanLargeThreads) {
      int sum = 0;
#pragma unroll
      for (int w = 0; w < kPlanLargeWarps; ++w) sum += counts[w][e];
      out[e] = sum;
    }
    __syncthreads();
  }
}

// Step 2: exclusive scan of every column of the table; one block per (batch entry, 32 experts),
// lane = expert, warp = run of chunks.
__global__ void __launch_bounds__(kPlanSmallMaxThreads)
    PlanScanKernel(PlanParams params, int chunks, unsigned expert_blocks) {
  __shared__ int run_sums[kPlanSmallMaxWarps][kWarpSize];

  GridDependencyWait();
  GridDependencyLaunch();

  int lane = threadIdx.x % kWarpSize;
  int warp = threadIdx.x / kWarpSize;
  int64_t b = blockIdx.x / expert_blocks;
  int64_t e = static_cast<int64_t>(blockIdx.x % expert_blocks) * kWarpSize + lane;
  bool valid = e < params.num_local_experts;
  int32_t* column = params.scratch + b * (chunks + 1) * params.num_local_experts + e;

  constexpr int kMaxRun = static_cast<int>(kPlanMaxChunks) / kPlanSmallMaxWarps;
  int run = static_cast<int>(CeilDiv(chunks, kPlanSmallMaxWarps));  // <= kMaxRun
  int count[kMaxRun];
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kMaxRun; ++i) {
    int chunk = warp * run + i;
    bool read = valid && i < run && chunk < chunks;
    count[i] = read ? column[chunk * params.num_local_experts] : 0;
  }
#pragma unroll
  for (int i = 0; i < kMaxRun; ++i) sum += count[i];
  run_sums[warp][lane] = sum;
  __syncthreads();
  int before = 0;
  for (int w = 0; w < warp; ++w) before += run_sums[w][lane];
  if (!valid) return;
#pragma unroll
  for (int i = 0; i < kMaxRun; ++i) {
    int chunk = warp * run + i;
    if (i < run && chunk < chunks) column[chunk * params.num_local_experts] = before;
    before += count[i];
  }
  if (warp == kPlanSmallMaxWarps - 1) column[chunks * params.num_local_experts] = before;
}

// Step 3: positions. Every block repeats the scan over experts of the totals, which costs one read
// of E_l numbers from L2 and saves a launch.
__global__ void __launch_bounds__(kPlanLargeThreads)
    PlanPlaceKernel(PlanParams params, int chunks, int64_t chunk_rows) {
  __shared__ int next[kPlanLargeWarps][kPlanWindow];  // counts, then the next free row
  __shared__ int warp_sums[kWarpSize];

  GridDependencyWait();
  GridDependencyLaunch();

  PlanChunk c = PlanBlockChunk(params, params.num_tokens * params.top_k, chunks, chunk_rows);
  PlanView v = PlanBatchEntry(params, c.batch);
  int lane = threadIdx.x % kWarpSize;
  int warp = threadIdx.x / kWarpSize;
  const int32_t* before = c.table + static_cast<int64_t>(c.chunk) * v.local_experts;
  const int32_t* totals = c.table + static_cast<int64_t>(chunks) * v.local_experts;

  int window_offset = 0;  // rows of all experts before the window
  // NOTE: one round even without experts, for the slots of no group.
  for (int window = 0; window == 0 || window < v.local_experts; window += kPlanWindow) {
    int width = min(kPlanWindow, v.local_experts - window);
    for (int e = threadIdx.x; e < width; e += kPlanLargeThreads) {
#pragma unroll
      for (int w = 0; w < kPlanLargeWarps; ++w) next[w][e] = 0;
    }
    __syncthreads();
    CountWarpSlots(params, v, c, window, next[warp]);

    // Thread i scans experts window + 4 i .. + 3.
    int own[kPlanWindowPerThread];
    int own_sum = 0;
#pragma unroll
    for (int i = 0; i < kPlanWindowPerThread; ++i) {
      int e = threadIdx.x * kPlanWindowPerThread + i;
      own[i] = e < width ? totals[window + e] : 0;
      own_sum += own[i];
    }
    int window_rows;
    int offset = window_offset + BlockExclusiveScan(own_sum, warp_sums, &window_rows);
    // The barriers of the scan also order the counts above before the reads below.
#pragma unroll
    for (int i = 0; i < kPlanWindowPerThread; ++i) {
      int e = threadIdx.x * kPlanWindowPerThread + i;
      if (e < width) {
        if (c.chunk == 0) v.expert_offsets[window + e] = offset;
        int position = offset + before[window + e];
#pragma unroll
        for (int w = 0; w < kPlanLargeWarps; ++w) {
          int count = next[w][e];
          next[w][e] = position;
          position += count;
        }
      }
      offset += own[i];
    }
    window_offset += window_rows;
    __syncthreads();

    for (unsigned base = c.warp_first_row; base < static_cast<unsigned>(c.warp_end_row);
         base += kWarpSize) {
      unsigned row = base + lane;
      bool valid = row < static_cast<unsigned>(c.warp_end_row);
      int expert = valid ? LocalExpert(params, v.expert_ids[row]) : kPlanNoExpert;
      bool placed = expert >= window && expert - window < kPlanWindow;
      unsigned peers = __match_any_sync(kFullMask, placed ? expert : kPlanNoExpert);
      int rank = __popc(peers & ((1u << lane) - 1));
      int first = placed ? next[warp][expert - window] : 0;
      __syncwarp();
      if (placed && rank == 0) next[warp][expert - window] = first + __popc(peers);
      __syncwarp();
      if (placed) {
        v.row_to_token[first + rank] = static_cast<int>(row / v.top_k);
        v.slot_to_row[row] = first + rank;
      } else if (valid && expert == kPlanNoExpert && window == 0) {
        v.slot_to_row[row] = -1;
      }
    }
    __syncthreads();
  }

  if (c.chunk == 0 && threadIdx.x == 0) v.expert_offsets[v.local_experts] = window_offset;
  // All local rows of the batch entry are below window_offset, so these are nobody's.
  unsigned row = max(c.first_row, window_offset);
  for (row += threadIdx.x; row < static_cast<unsigned>(c.end_row); row += kPlanLargeThreads) {
    v.row_to_token[row] = -1;
  }
}

}  // namespace jaxmoe
