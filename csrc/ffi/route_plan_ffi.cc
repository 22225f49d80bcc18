// FFI handler jaxmoe_route_plan_v1: the experts of each token, and the order of rows by expert.
#include "csrc/ffi/plan_operands.h"
#include "csrc/ffi/route_attrs.h"
#include "csrc/kernels/route_plan.h"

namespace jaxmoe {

struct RoutePlanAttrs {
  int64_t num_shared_experts;
  int64_t expert_offset;
  RuleAttrs rule;
  GroupAttrs groups;
};

}  // namespace jaxmoe

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jaxmoe::RoutePlanAttrs,
                                      ::xla::ffi::StructMember<int64_t>("num_shared_experts"),
                                      ::xla::ffi::StructMember<int64_t>("expert_offset"),
                                      ::xla::ffi::StructMember<::jaxmoe::RuleAttrs>("rule"),
                                      ::xla::ffi::StructMember<::jaxmoe::GroupAttrs>("groups"));

namespace jaxmoe {
namespace {

// C = K + S columns: the choices, then the shared experts.
ffi::Error RoutePlan(cudaStream_t stream,
                     In logits,
                     In bias,
                     In expert_map,
                     In num_valid,
                     Out expert_ids,
                     Out weights,
                     Out expert_offsets,
                     Out row_to_token,
                     Out slot_to_row,
                     Out scratch,
                     RoutePlanAttrs attrs) {
  Operands take("route_and_plan");
  Dim B, T, E, C;
  RouteParams route = TakeRoute(logits, {B, T, E}, bias, E, attrs.rule, attrs.groups, &take);
  route.expert_ids = take.Ints("expert_ids", *expert_ids, {B, T, C});
  route.weights = take.Floats("weights", *weights, {B, T, C});
  route.num_valid = take.IntsOrNull("num_valid", num_valid, {B});
  route.num_tokens = B * T;
  route.entry_tokens = T;
  route.num_shared_experts = attrs.num_shared_experts;
  route.top_k = C - attrs.num_shared_experts;
  take.Range("num_shared_experts", attrs.num_shared_experts, 0, kMaxInt - E);
  take.Range("top_k", route.top_k, 1, E);
  const PlanParams plan =
      TakePlan({*expert_ids, expert_map, *expert_offsets, *row_to_token, *slot_to_row, *scratch},
               E + attrs.num_shared_experts,
               attrs.expert_offset,
               &take);
  if (take.failed()) return take.error();
  return take.Result(LaunchRoutePlan(route, plan, stream));
}

const Registered<RoutePlan> registered("jaxmoe_route_plan_v1");

}  // namespace
}  // namespace jaxmoe
