// Launches route and plan: one kernel for few tokens, those of route and of plan for more.
#include <algorithm>

#include "csrc/kernels/route_dispatch.h"
#include "csrc/kernels/route_plan.cuh"
#include "csrc/kernels/route_plan.h"

namespace jaxmoe {

namespace {

constexpr int64_t kMaxClusterBlocks = 8;

// Blocks of the cluster of an entry: one takes 8 tokens as fast as several.
int64_t ClusterBlocks(int64_t num_tokens) {
  return num_tokens <= 8 ? 1 : num_tokens <= 16 ? 2 : num_tokens <= 32 ? 4 : kMaxClusterBlocks;
}

// One chunk a block. `fits` is false if a chunk is more than a tile, or the experts more than the
// threads.
PlanShape MakeClusterShape(const PlanParams& plan, bool* fits) {
  int64_t blocks = ClusterBlocks(plan.num_tokens);
  int64_t tokens = CeilDiv(plan.num_tokens, blocks);
  int64_t rows = tokens * plan.top_k;
  *fits = plan.num_tokens <= kRoutePlanClusterTokens &&
          rows <= kPlanTileIters * kRoutePlanThreads && plan.num_local_experts <= kRoutePlanThreads;
  int64_t iters = CeilDiv(rows, kRoutePlanThreads);
  int64_t row_threads = RoundUp(CeilDiv(rows, iters), kWarpSize);
  int64_t expert_threads = RoundUp(plan.num_local_experts, kWarpSize);
  PlanShape shape{};
  shape.chunks = static_cast<int>(blocks);
  shape.chunk_rows = static_cast<int>(rows);
  shape.cluster = static_cast<int>(blocks);
  shape.row_warps = static_cast<int>(row_threads / kWarpSize);
  shape.iters = static_cast<int>(iters);
  shape.width = static_cast<int>(plan.num_local_experts);
  int64_t threads = std::max({tokens * kRouteLanes, row_threads, expert_threads});
  shape.threads = static_cast<int>(std::min<int64_t>(threads, kRoutePlanThreads));
  return shape;
}

struct LaunchCluster {
  const RouteParams& route;
  const RouteShape& route_shape;
  const PlanParams& plan;
  const PlanShape& shape;
  cudaStream_t stream;

  template <int kPerLane, int kWidth, bool kPlain>
  cudaError_t Run() const {
    if constexpr (kPerLane * kRouteLanes > kRoutePlanExperts) {
      return cudaErrorInvalidValue;
    } else {
      int64_t warps = shape.threads / kRouteLanes;
      int64_t smem_bytes = warps * sizeof(RouteScratch<kPerLane, kWidth, kPlain>) +
                           PlanScratchBytes(PlanTotals::kCluster, shape) +
                           shape.chunk_rows * sizeof(int);
      return LaunchClusters(RoutePlanKernel<kPerLane, kWidth, kPlain>,
                            dim3(static_cast<unsigned>(plan.batch * shape.chunks)),
                            dim3(static_cast<unsigned>(shape.threads)),
                            shape.cluster,
                            smem_bytes,
                            stream,
                            route.pdl,
                            route,
                            route_shape,
                            plan,
                            shape);
    }
  }
};

}  // namespace

cudaError_t LaunchRoutePlan(const RouteParams& route, const PlanParams& plan, cudaStream_t stream) {
  int64_t rows = plan.num_tokens * plan.top_k;
  bool known = RouteIsKnown(route) && plan.top_k == route.top_k + route.num_shared_experts &&
               route.num_tokens == plan.batch * plan.num_tokens && rows <= kMaxInt &&
               plan.batch <= kMaxInt / kMaxClusterBlocks;
  if (!known) return cudaErrorInvalidValue;
  if (route.num_tokens == 0) return LaunchPlan(plan, stream);
  bool fits = false;
  PlanShape shape = MakeClusterShape(plan, &fits);
  if (fits && route.num_experts <= kRoutePlanExperts) {
    RouteShape route_shape = MakeRouteShape(route);
    return DispatchRoute(
        route, route_shape, LaunchCluster{route, route_shape, plan, shape, stream});
  }
  JAXMOE_RETURN_IF_CUDA_ERROR(LaunchRoute(route, stream));
  PlanParams behind = plan;
  behind.pdl = true;
  return LaunchPlan(behind, stream);
}

}  // namespace jaxmoe
