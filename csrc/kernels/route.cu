// Launches route for the number of experts and choices.
#include <algorithm>

#include "csrc/kernels/route.cuh"
#include "csrc/kernels/route_dispatch.h"

namespace jaxmoe {

namespace {

struct Launch {
  const RouteParams& params;
  const RouteShape& shape;
  cudaStream_t stream;

  template <int kPerLane, int kWidth, bool kPlain>
  cudaError_t Run() const {
    int sm_count = 0;
    JAXMOE_RETURN_IF_CUDA_ERROR(GetSmCount(&sm_count));
    int64_t warps =
        std::clamp<int64_t>(CeilDiv(params.num_tokens, sm_count), 1, kRouteMaxWarps<kPerLane>);
    int64_t blocks = CeilDiv(params.num_tokens, warps);
    if (blocks > kMaxInt) return cudaErrorInvalidConfiguration;
    return LaunchKernel(RouteKernel<kPerLane, kWidth, kPlain>,
                        dim3(static_cast<unsigned>(blocks)),
                        dim3(static_cast<unsigned>(warps * kRouteLanes)),
                        0,
                        stream,
                        params.pdl,
                        params,
                        shape);
  }
};

}  // namespace

cudaError_t LaunchRoute(const RouteParams& params, cudaStream_t stream) {
  if (!RouteIsKnown(params)) return cudaErrorInvalidValue;
  if (params.num_tokens == 0) return cudaSuccess;
  RouteShape shape = MakeRouteShape(params);
  return DispatchRoute(params, shape, Launch{params, shape, stream});
}

}  // namespace jaxmoe
