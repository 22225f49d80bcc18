// FFI handler jaxmoe_route_v2: the experts of each token and their weights.
#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/ffi/checks.h"
#include "csrc/ffi/counters.h"
#include "csrc/ffi/route_attrs.h"
#include "csrc/kernels/route.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmoe {

namespace {

ffi::Error Route(cudaStream_t stream,
                 ffi::AnyBuffer logits,                     // [T,E]
                 ffi::AnyBuffer bias,                       // [E] or [0]
                 ffi::ResultBufferR2<ffi::S32> expert_ids,  // [T,K]
                 ffi::ResultBufferR2<ffi::F32> weights,     // [T,K]
                 int64_t score,
                 int64_t by_score,
                 int64_t normalize,
                 float epsilon,
                 float scale,
                 GroupAttrs groups) {
  CountExecution(Target::kRoute);
  constexpr const char* kOp = "route";
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "logits", logits, 2));
  int64_t num_tokens = logits.dimensions()[0];
  int64_t top_k = expert_ids->dimensions()[1];
  RuleAttrs rule{score, by_score, normalize, epsilon, scale};
  RouteParams params{};
  JAXMOE_RETURN_IF_ERROR(MakeRoute(kOp, logits, bias, num_tokens, top_k, rule, groups, &params));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "expert_ids", *expert_ids, {num_tokens, top_k}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "weights", *weights, {num_tokens, top_k}));
  params.expert_ids = expert_ids->typed_data();
  params.weights = weights->typed_data();
  return CudaStatus(kOp, LaunchRoute(params, stream));
}

}  // namespace
}  // namespace jaxmoe

XLA_FFI_DEFINE_HANDLER_SYMBOL(RouteFfi,
                              jaxmoe::Route,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::BufferR2<xla::ffi::S32>>()
                                  .Ret<xla::ffi::BufferR2<xla::ffi::F32>>()
                                  .Attr<int64_t>("score")
                                  .Attr<int64_t>("by_score")
                                  .Attr<int64_t>("normalize")
                                  .Attr<float>("epsilon")
                                  .Attr<float>("scale")
                                  .Attr<jaxmoe::GroupAttrs>("groups"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
