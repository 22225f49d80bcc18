// The rule of the handlers that route: attributes, and the checks of what they say.
#pragma once

#include <string>

#include "csrc/ffi/checks.h"
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

// The rest of a Rule.
struct RuleAttrs {
  int64_t score;
  int64_t by_score;
  int64_t normalize;
  float epsilon;
  float scale;
};

// Fills what routing needs of `logits` [..,E], of which there are `num_tokens`, `bias`, [E] or [0],
// and the rule.
inline ffi::Error MakeRoute(const char* op,
                            ffi::AnyBuffer logits,
                            ffi::AnyBuffer bias,
                            int64_t num_tokens,
                            int64_t top_k,
                            const RuleAttrs& rule,
                            const GroupAttrs& groups,
                            RouteParams* params) {
  JAXMOE_RETURN_IF_ERROR(CheckFloatDtype(op, "logits", logits));
  JAXMOE_RETURN_IF_ERROR(CheckFloatDtype(op, "bias", bias));
  int64_t num_experts = logits.dimensions().back();
  JAXMOE_RETURN_IF_ERROR(CheckRange(op, "num_experts", num_experts, 1, kRouteMaxExperts));
  JAXMOE_RETURN_IF_ERROR(CheckShapeOrAbsent(op, "bias", bias, {num_experts}));
  JAXMOE_RETURN_IF_ERROR(CheckRange(op, "top_k", top_k, 1, num_experts));
  JAXMOE_RETURN_IF_ERROR(
      CheckRange(op, "score", rule.score, 0, static_cast<int64_t>(RouteScore::kSqrtSoftplus)));
  JAXMOE_RETURN_IF_ERROR(CheckRange(
      op, "normalize", rule.normalize, 0, static_cast<int64_t>(RouteNormalize::kClampedSum)));
  JAXMOE_RETURN_IF_ERROR(
      CheckRange(op, "groups.value", groups.value, 0, static_cast<int64_t>(RouteGroupValue::kMax)));
  JAXMOE_RETURN_IF_ERROR(CheckRange(op, "groups.count", groups.count, 1, num_experts));
  JAXMOE_RETURN_IF_ERROR(CheckRange(op, "groups.kept", groups.kept, 1, groups.count));
  if (num_experts % groups.count != 0) {
    return InvalidArgument(op,
                           "groups.count=" + std::to_string(groups.count) +
                               " must divide the experts. Got " + Describe(logits) + ".");
  }
  params->logits = logits.untyped_data();
  params->bias = rule.by_score == 0 || IsAbsent(bias) ? nullptr : bias.untyped_data();
  params->dtype = ToDType(logits.element_type());
  params->bias_dtype = ToDType(bias.element_type());
  params->rule.score = static_cast<RouteScore>(rule.score);
  params->rule.by_score = rule.by_score != 0;
  params->rule.normalize = static_cast<RouteNormalize>(rule.normalize);
  params->rule.epsilon = rule.epsilon;
  params->rule.scale = rule.scale;
  params->rule.group_value = static_cast<RouteGroupValue>(groups.value);
  params->rule.num_groups = static_cast<int>(groups.count);
  params->rule.top_groups = static_cast<int>(groups.kept);
  params->rule.masked_value = groups.masked_value;
  params->num_tokens = num_tokens;
  params->num_experts = num_experts;
  params->top_k = top_k;
  return ffi::Error::Success();
}

}  // namespace jaxmoe

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jaxmoe::GroupAttrs,
                                      ::xla::ffi::StructMember<int64_t>("value"),
                                      ::xla::ffi::StructMember<int64_t>("count"),
                                      ::xla::ffi::StructMember<int64_t>("kept"),
                                      ::xla::ffi::StructMember<float>("masked_value"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jaxmoe::RuleAttrs,
                                      ::xla::ffi::StructMember<int64_t>("score"),
                                      ::xla::ffi::StructMember<int64_t>("by_score"),
                                      ::xla::ffi::StructMember<int64_t>("normalize"),
                                      ::xla::ffi::StructMember<float>("epsilon"),
                                      ::xla::ffi::StructMember<float>("scale"));
