// Launches route for the number of experts and choices.
#include <algorithm>

#include "csrc/kernels/route.cuh"

namespace jaxmoe {

namespace {

RouteShape MakeShape(const RouteParams& p) {
  RouteShape shape{};
  shape.num_experts = static_cast<int>(p.num_experts);
  shape.top_k = static_cast<int>(p.top_k);
  shape.per_lane = static_cast<int>(CeilDiv(p.num_experts, kRouteLanes));
  shape.quads = shape.per_lane % 4 == 0 && p.num_experts % 4 == 0;
  bool whole = p.num_experts % kRouteLanes == 0 && kRouteLanes % p.rule.num_groups == 0;
  shape.lanes_per_group = whole ? kRouteLanes / p.rule.num_groups : 0;
  return shape;
}

template <int kPerLane, int kWidth>
cudaError_t LaunchRouteSized(const RouteParams& p, const RouteShape& shape, cudaStream_t stream) {
  int sm_count = 0;
  JAXMOE_RETURN_IF_CUDA_ERROR(GetSmCount(&sm_count));
  int64_t warps = std::clamp<int64_t>(CeilDiv(p.num_tokens, sm_count), 1, kRouteMaxWarps);
  int64_t blocks = CeilDiv(p.num_tokens, warps);
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  bool plain = !p.rule.by_score && p.rule.num_groups == 1;
  auto* kernel = plain ? RouteKernel<kPerLane, kWidth, true> : RouteKernel<kPerLane, kWidth, false>;
  return LaunchKernel(kernel,
                      dim3(static_cast<unsigned>(blocks)),
                      dim3(static_cast<unsigned>(warps * kRouteLanes)),
                      0,
                      stream,
                      p.pdl,
                      p,
                      shape);
}

}  // namespace

cudaError_t LaunchRoute(const RouteParams& params, cudaStream_t stream) {
  const RouteRule& rule = params.rule;
  bool known = params.num_experts >= 1 && params.num_experts <= kRouteMaxExperts &&
               params.top_k <= params.num_experts && rule.num_groups >= 1 &&
               params.num_experts % rule.num_groups == 0;
  if (!known) return cudaErrorInvalidValue;
  if (params.num_tokens == 0 || params.top_k == 0) return cudaSuccess;
  RouteShape shape = MakeShape(params);
  if (shape.per_lane <= 1) return LaunchRouteSized<1, 1>(params, shape, stream);
  if (shape.per_lane <= 2) return LaunchRouteSized<2, 2>(params, shape, stream);
  if (shape.per_lane <= 4) return LaunchRouteSized<4, 4>(params, shape, stream);
  if (shape.per_lane <= 8) {
    return shape.top_k <= 8 ? LaunchRouteSized<8, 2>(params, shape, stream)
                            : LaunchRouteSized<8, 8>(params, shape, stream);
  }
  return shape.top_k <= 16 ? LaunchRouteSized<16, 8>(params, shape, stream)
                           : LaunchRouteSized<16, 16>(params, shape, stream);
}

}  // namespace jaxmoe
