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
//   shared-memory atomics: up to 8 ids a thread, by 16-byte loads that are all in flight at once.
// Shared (R <= 262144, E_l <= 1024): one kernel of at most 128 chunks, of 256 slots or more. Each
//   cluster of 8 blocks counts all ids, a block an eighth of those outside the cluster. What it has
//   counted of an expert it tells the other seven by one 8-byte store into their memory.
// Table (larger): a first kernel counts each chunk into table[chunks][E_l]; the second loads and
//   ranks its slots while the first still runs (programmatic dependent launch), then sums the
//   table's columns, 128 KB from L2 at E = 256.
// Shared memory: 13 KiB at 512 slots and E = 128; at most 76 KiB, shared 132 (E_l = 1024). Experts
//   are handled in windows of 1024, so that any E_l works.
// Time is latency, traffic is 12 bytes a slot: a launch 2 us, a trip to memory 0.8 us, ranks and
//   scans 0.7 us, an eighth of the ids 0.1 us for every 1000. Predicted: 3.3 us at R <= 512, 4.2 at
//   4096, 5 at 8192; shared 5 at 16384 and 32768, 6.5 at 131072 (E = 256), inside a graph.
// Why this shape: ranks come from ballots and counts are integers added in any order, so the result
//   is the same on every run. One block with match.any took 8.4 us at R = 4096, growing by 1.5 us
//   per 1024 slots; a ballot per bit of the expert id is about 40 issue slots a warp. A table costs
//   a kernel, and a column of sums in every block. Blocks of different clusters that wait for each
//   other inside one kernel would need flags that somebody clears, and all blocks resident.
#pragma once

#include <cstdint>

#include "csrc/kernels/plan_place.cuh"

namespace jaxmoe {

inline constexpr int kPlanCountThreads = 512;

__device__ __forceinline__ void ZeroCounters(int32_t* counters, int64_t count) {
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) counters[i] = 0;
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
    CountSlots(params,
               v,
               nullptr,
               c.first_row,
               c.end_row,
               c.end_row,
               c.end_row,
               window,
               width,
               counts,
               counts);
    __syncthreads();
    for (int e = threadIdx.x; e < width; e += kPlanCountThreads) table[window + e] = counts[e];
    __syncthreads();
  }
}

// kTotals: kDirect, kShared or kTable.
template <PlanTotals kTotals>
__global__ void __launch_bounds__(kPlanMaxThreads)
    PlanPlaceKernel(PlanParams params, PlanShape shape) {
  extern __shared__ __align__(16) unsigned char plan_smem[];
  __shared__ __align__(8) uint64_t told;

  if constexpr (PlanTells(kTotals)) BeginTelling<kTotals>(shape, &told);
  // NOTE: the table form waits inside, when it needs the counts. The ids that it reads first are
  // older than the counting kernel, which lets this one start only after its own wait.
  if constexpr (kTotals != PlanTotals::kTable) {
    GridDependencyWait();
    GridDependencyLaunch();
    if (blockIdx.x == 0) ZeroCounters(params.zero_counters, params.num_zero_counters);
  }
  PlanScratch scratch = MakePlanScratch(kTotals, shape, plan_smem);
  PlaceSlots<kTotals>(params, shape, scratch, {nullptr, &told});
}

}  // namespace jaxmoe
