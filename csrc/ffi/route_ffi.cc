// FFI handler jaxmoe_route_v2: the experts of each token and their weights.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "csrc/ffi/checks.h"
#include "csrc/ffi/counters.h"
#include "csrc/kernels/route.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmoe {

// The groups of a Rule of jaxmoe/_route.py.
struct GroupAttrs {
  int64_t value;
  int64_t count;
  int64_t kept;
  float masked_value;
};

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
  JAXMOE_RETURN_IF_ERROR(CheckFloatDtype(kOp, "logits", logits));
  JAXMOE_RETURN_IF_ERROR(CheckFloatDtype(kOp, "bias", bias));
  int64_t num_tokens = logits.dimensions()[0];
  int64_t num_experts = logits.dimensions()[1];
  int64_t top_k = expert_ids->dimensions()[1];
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "logits.shape[1]", num_experts, 1, kRouteMaxExperts));
  JAXMOE_RETURN_IF_ERROR(CheckShapeOrAbsent(kOp, "bias", bias, {num_experts}));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "top_k", top_k, 1, num_experts));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "expert_ids", *expert_ids, {num_tokens, top_k}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "weights", *weights, {num_tokens, top_k}));
  JAXMOE_RETURN_IF_ERROR(
      CheckRange(kOp, "score", score, 0, static_cast<int64_t>(RouteScore::kSqrtSoftplus)));
  JAXMOE_RETURN_IF_ERROR(CheckRange(
      kOp, "normalize", normalize, 0, static_cast<int64_t>(RouteNormalize::kClampedSum)));
  JAXMOE_RETURN_IF_ERROR(CheckRange(
      kOp, "groups.value", groups.value, 0, static_cast<int64_t>(RouteGroupValue::kMax)));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "groups.count", groups.count, 1, num_experts));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "groups.kept", groups.kept, 1, groups.count));
  if (num_experts % groups.count != 0) {
    return InvalidArgument(kOp,
                           "groups.count=" + std::to_string(groups.count) +
                               " must divide logits.shape[1]. Got " + Describe(logits) + ".");
  }

  RouteParams params{};
  params.logits = logits.untyped_data();
  params.bias = by_score == 0 || IsAbsent(bias) ? nullptr : bias.untyped_data();
  params.expert_ids = expert_ids->typed_data();
  params.weights = weights->typed_data();
  params.dtype = ToDType(logits.element_type());
  params.bias_dtype = ToDType(bias.element_type());
  params.rule.score = static_cast<RouteScore>(score);
  params.rule.by_score = by_score != 0;
  params.rule.normalize = static_cast<RouteNormalize>(normalize);
  params.rule.epsilon = epsilon;
  params.rule.scale = scale;
  params.rule.group_value = static_cast<RouteGroupValue>(groups.value);
  params.rule.num_groups = static_cast<int>(groups.count);
  params.rule.top_groups = static_cast<int>(groups.kept);
  params.rule.masked_value = groups.masked_value;
  params.num_tokens = num_tokens;
  params.num_experts = num_experts;
  params.top_k = top_k;
  return CudaStatus(kOp, LaunchRoute(params, stream));
}

}  // namespace
}  // namespace jaxmoe

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jaxmoe::GroupAttrs,
                                      ::xla::ffi::StructMember<int64_t>("value"),
                                      ::xla::ffi::StructMember<int64_t>("count"),
                                      ::xla::ffi::StructMember<int64_t>("kept"),
                                      ::xla::ffi::StructMember<float>("masked_value"));

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
