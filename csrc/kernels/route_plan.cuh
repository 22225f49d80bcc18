// Device code of route and plan in one kernel, or in two of which the first counts for the second.
//
// Problem: that of route.cuh, then that of plan.cuh with its ids, for B entries of T tokens.
// One kernel (RoutePlanKernel): an entry is a cluster of 1 to 8 blocks, a block a chunk of its
//   tokens. The block's warps route one token after the other and leave the ids in shared memory;
//   then it places them as plan does, and what it has of each expert it tells the other blocks by
//   4-byte stores into their shared memory. No id is read back, no slot is counted twice.
// Two (RouteCountKernel, then plan's placing kernel with programmatic dependent launch): at most
//   128 blocks an entry, each of which also counts the slots of its tokens into its row of a table.
//   The counts are integers added in shared memory, so their order does not show.
// Threads: a warp a token; at most 16 warps a block of a cluster, and 32 of the counting kernel
//   where 64 registers suffice.
// Shared memory: at most 172 KiB (E = 512, K > 16); at E = 256 and K = 8, by logit, 40 KiB for 32
//   warps that count, 20 KiB in a cluster of 64 tokens.
// Time and reason: see docs/notes.md.
#pragma once

#include <cstdint>

#include "csrc/kernels/plan_place.cuh"
#include "csrc/kernels/route.cuh"

namespace jaxmoe {

inline constexpr int kRoutePlanWarps = 16;
inline constexpr int kRoutePlanThreads = kRoutePlanWarps * kRouteLanes;

// Shared memory: RouteScratch[warps], then PlanScratch, then int ids[chunk_rows].
template <int kPerLane, int kWidth, bool kPlain>
__global__ void __launch_bounds__(kRoutePlanThreads)
    RoutePlanKernel(RouteParams route, RouteShape route_shape, PlanParams plan, PlanShape shape) {
  using Scratch = RouteScratch<kPerLane, kWidth, kPlain>;
  extern __shared__ __align__(16) unsigned char route_plan_smem[];
  __shared__ __align__(8) uint64_t told;
  int num_warps = blockDim.x / kRouteLanes;
  int warp = threadIdx.x / kRouteLanes;
  auto* scratches = reinterpret_cast<Scratch*>(route_plan_smem);
  PlanScratch scratch = MakePlanScratch(PlanTotals::kCluster, shape, scratches + num_warps);
  // Behind the counts, an even number of them.
  int counts = (shape.row_warps * shape.width + 1) / 2 * 2;
  int* ids = reinterpret_cast<int*>(scratch.counts + counts);

  BeginTelling(shape, &told);
  GridDependencyWait();
  GridDependencyLaunch();

  PlanChunk chunk = PlanBlockChunk(shape, static_cast<int>(plan.num_tokens * plan.top_k));
  int64_t entry = chunk.batch * plan.num_tokens;
  unsigned row = chunk.first_row + warp * route_shape.columns;
  for (; row < chunk.end_row; row += num_warps * route_shape.columns) {
    int* own = ids + (row - chunk.first_row);
    RouteToken(route,
               route_shape,
               entry + row / route_shape.columns,
               scratches[warp],
               [own](int column, int id) { own[column] = id; });
    __syncwarp();  // before the next token's keys take the place of this one's scores
  }
  __syncthreads();
  PlaceSlots<PlanTotals::kCluster>(plan, shape, scratch, {ids, &told});
}

// Warps of a block that counts: as many as an SM has registers for.
template <int kPerLane, int kWidth>
inline constexpr int kRouteCountWarps = kWidth <= 4 ? 32 : 16;

// Asks for the logits of a token, to L2. By a warp; at most 16 lines.
__device__ __forceinline__ void PrefetchToken(const RouteParams& params, int64_t token) {
  constexpr int kLine = 128;
  int64_t bytes = params.num_experts * (params.dtype == DType::kFloat32 ? 4 : 2);
  int64_t at = static_cast<int64_t>(threadIdx.x % kRouteLanes) * kLine;
  auto* line = static_cast<const char*>(params.logits) + token * bytes + at;
  if (at < bytes) asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

// How the tokens of an entry lie on the blocks of the counting kernel. Grid: batch * blocks.
struct RouteCountShape {
  int blocks;
  int block_tokens;
};

// Shared memory: RouteScratch[warps], then int counts[E_l].
template <int kPerLane, int kWidth, bool kPlain>
__global__ void __launch_bounds__(kRouteLanes* kRouteCountWarps<kPerLane, kWidth>, 1)
    RouteCountKernel(RouteParams route,
                     RouteShape route_shape,
                     PlanParams plan,
                     RouteCountShape shape) {
  using Scratch = RouteScratch<kPerLane, kWidth, kPlain>;
  extern __shared__ __align__(16) unsigned char route_count_smem[];
  int num_warps = blockDim.x / kRouteLanes;
  int warp = threadIdx.x / kRouteLanes;
  auto* scratches = reinterpret_cast<Scratch*>(route_count_smem);
  int* counts = reinterpret_cast<int*>(scratches + num_warps);

  GridDependencyWait();
  GridDependencyLaunch();

  int local_experts = static_cast<int>(plan.num_local_experts);
  for (int e = threadIdx.x; e < local_experts; e += blockDim.x) counts[e] = 0;
  __syncthreads();

  int64_t entry = blockIdx.x / static_cast<unsigned>(shape.blocks);
  int64_t first = static_cast<int64_t>(blockIdx.x - entry * shape.blocks) * shape.block_tokens;
  int64_t end = min(first + shape.block_tokens, plan.num_tokens);
  for (int64_t token = first + warp; token < end; token += num_warps) {
    if (token + num_warps < end) PrefetchToken(route, entry * plan.num_tokens + token + num_warps);
    RouteToken(route,
               route_shape,
               entry * plan.num_tokens + token,
               scratches[warp],
               [&plan, counts](int, int id) {
                 int expert = LocalExpert(plan, id);
                 if (expert != kPlanNoExpert) atomicAdd(counts + expert, 1);
               });
    __syncwarp();  // before the next token's keys take the place of this one's scores
  }
  __syncthreads();
  int32_t* table = plan.scratch + static_cast<int64_t>(blockIdx.x) * local_experts;
  for (int e = threadIdx.x; e < local_experts; e += blockDim.x) table[e] = counts[e];
}

}  // namespace jaxmoe
