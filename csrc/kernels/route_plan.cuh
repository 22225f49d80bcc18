// Device code of route and plan in one kernel, for few tokens.
//
// Problem: that of route.cuh, up to 512 experts, then that of plan.cuh with its ids, for B entries
//   of T tokens.
// An entry is a cluster of 1 to 8 blocks, a block a chunk of its tokens. The block's warps route
//   one token after the other and leave the ids in shared memory. Then the block places them as
//   plan does, and tells the other blocks its count of each expert by 4-byte stores into their
//   shared memory. No id is read back, no slot is counted twice.
// Threads: a warp a token, at most 16 warps a block.
// Shared memory: at most 170 KiB (E = 512, K > 16); 18 KiB for 64 tokens by logit at E = 256, K
// = 8. Time and reason, and why not for more tokens: docs/notes.md#route-and-plan-in-one-call.
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

  BeginTelling<PlanTotals::kCluster>(shape, &told);
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

}  // namespace jaxmoe
