// The rule of the handlers that route: its attributes, their checks, and what routing reads.
#pragma once

#include "csrc/ffi/checks.h"
#include "csrc/kernels/route.h"

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

// The rule over `num_experts` experts.
inline RouteRule TakeRule(const RuleAttrs& rule,
                          const GroupAttrs& groups,
                          int64_t num_experts,
                          Operands* take) {
  take->Range("num_experts", num_experts, 1, kRouteMaxExperts);
  take->Range("score", rule.score, 0, kNumOf<RouteScore> - 1);
  take->Range("normalize", rule.normalize, 0, kNumOf<RouteNormalize> - 1);
  take->Range("groups.value", groups.value, 0, kNumOf<RouteGroupValue> - 1);
  take->Range("groups.count", groups.count, 1, num_experts);
  take->Range("groups.kept", groups.kept, 1, groups.count);
  if (!take->failed() && num_experts % groups.count != 0) {
    take->Refuse("groups.count=" + std::to_string(groups.count) +
                 " must divide num_experts=" + std::to_string(num_experts) + ".");
  }
  RouteRule taken{};
  taken.score = static_cast<RouteScore>(rule.score);
  taken.by_score = rule.by_score != 0;
  taken.normalize = static_cast<RouteNormalize>(rule.normalize);
  taken.epsilon = rule.epsilon;
  taken.scale = rule.scale;
  taken.group_value = static_cast<RouteGroupValue>(groups.value);
  taken.num_groups = static_cast<int>(groups.count);
  taken.top_groups = static_cast<int>(groups.kept);
  taken.masked_value = groups.masked_value;
  return taken;
}

// Operands that routing reads: logits, whose last dimension is E, and bias [E] or absent. The
// results, and the numbers of tokens and choices, are left to the caller.
inline RouteParams TakeRoute(const In& logits,
                             const Shape& shape,
                             const In& bias,
                             Dim& E,
                             const RuleAttrs& rule,
                             const GroupAttrs& groups,
                             Operands* take) {
  RouteParams params{};
  params.logits = take->Any("logits", logits, shape, kFloats);
  params.bias = take->AnyOrNull("bias", bias, {E}, kFloats);
  params.rule = TakeRule(rule, groups, E, take);
  params.dtype = TypeOf(logits);
  params.bias_dtype = TypeOf(bias);
  params.num_experts = E;
  return params;
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
