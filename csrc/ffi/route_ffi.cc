// FFI handler jaxmoe_route_v1: the experts of each token and their weights.
#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/ffi/checks.h"
#include "csrc/ffi/counters.h"
#include "csrc/kernels/route.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmoe {
namespace {

ffi::Error Route(cudaStream_t stream,
                 ffi::AnyBuffer logits,                     // [T,E]
                 ffi::ResultBufferR2<ffi::S32> expert_ids,  // [T,K]
                 ffi::ResultBufferR2<ffi::F32> weights,     // [T,K]
                 int64_t score,
                 int64_t normalize) {
  CountExecution(Target::kRoute);
  constexpr const char* kOp = "route";
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "logits", logits, 2));
  JAXMOE_RETURN_IF_ERROR(CheckFloatDtype(kOp, "logits", logits));
  int64_t num_tokens = logits.dimensions()[0];
  int64_t num_experts = logits.dimensions()[1];
  int64_t top_k = expert_ids->dimensions()[1];
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "logits.shape[1]", num_experts, 1, kRouteMaxExperts));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "top_k", top_k, 1, num_experts));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "expert_ids", *expert_ids, {num_tokens, top_k}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "weights", *weights, {num_tokens, top_k}));
  JAXMOE_RETURN_IF_ERROR(
      CheckRange(kOp, "score", score, 0, static_cast<int64_t>(RouteScore::kSigmoid)));
  JAXMOE_RETURN_IF_ERROR(CheckRange(
      kOp, "normalize", normalize, 0, static_cast<int64_t>(RouteNormalize::kDivideBySum)));

  RouteParams params{};
  params.logits = logits.untyped_data();
  params.expert_ids = expert_ids->typed_data();
  params.weights = weights->typed_data();
  params.dtype = ToDType(logits.element_type());
  params.score = static_cast<RouteScore>(score);
  params.normalize = static_cast<RouteNormalize>(normalize);
  params.num_tokens = num_tokens;
  params.num_experts = num_experts;
  params.top_k = top_k;
  return CudaStatus(kOp, LaunchRoute(params, stream));
}

}  // namespace
}  // namespace jaxmoe

XLA_FFI_DEFINE_HANDLER_SYMBOL(RouteFfi,
                              jaxmoe::Route,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::BufferR2<xla::ffi::S32>>()
                                  .Ret<xla::ffi::BufferR2<xla::ffi::F32>>()
                                  .Attr<int64_t>("score")
                                  .Attr<int64_t>("normalize"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
