// Launches route for the logits' type and the number of experts.
#include <algorithm>

#include "csrc/kernels/route.cuh"

namespace jaxmoe {

namespace {

template <typename T, int kPerLane>
cudaError_t LaunchRouteSized(const RouteParams& p, cudaStream_t stream) {
  int sm_count = 0;
  JAXMOE_RETURN_IF_CUDA_ERROR(GetSmCount(&sm_count));
  int64_t block_tokens =
      std::clamp<int64_t>(CeilDiv(p.num_tokens, sm_count), 1, kRouteMaxTokensPerBlock);
  int64_t blocks = CeilDiv(p.num_tokens, block_tokens);
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  return LaunchKernel(RouteKernel<T, kPerLane>,
                      dim3(static_cast<unsigned>(blocks)),
                      dim3(static_cast<unsigned>(block_tokens * kRouteLanes)),
                      0,
                      stream,
                      p.pdl,
                      p);
}

template <typename T>
cudaError_t LaunchRouteType(const RouteParams& p, cudaStream_t stream) {
  int64_t per_lane = CeilDiv(p.num_experts, kRouteLanes);
  if (per_lane <= 1) return LaunchRouteSized<T, 1>(p, stream);
  if (per_lane <= 2) return LaunchRouteSized<T, 2>(p, stream);
  if (per_lane <= 4) return LaunchRouteSized<T, 4>(p, stream);
  if (per_lane <= 8) return LaunchRouteSized<T, 8>(p, stream);
  if (per_lane <= 12) return LaunchRouteSized<T, 12>(p, stream);
  return LaunchRouteSized<T, 16>(p, stream);
}

}  // namespace

cudaError_t LaunchRoute(const RouteParams& params, cudaStream_t stream) {
  if (params.num_experts > kRouteMaxExperts || params.top_k > params.num_experts) {
    return cudaErrorInvalidValue;
  }
  if (params.num_tokens == 0 || params.top_k == 0) return cudaSuccess;
  switch (params.dtype) {
    case DType::kBFloat16:
      return LaunchRouteType<__nv_bfloat16>(params, stream);
    case DType::kFloat16:
      return LaunchRouteType<__half>(params, stream);
    case DType::kFloat32:
      return LaunchRouteType<float>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jaxmoe
