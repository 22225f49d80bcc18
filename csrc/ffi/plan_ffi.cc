// FFI handler jaxmoe_plan_v1: which row of the expert-ordered arrays belongs to which slot.
#include "csrc/ffi/plan_operands.h"

namespace jaxmoe {

struct PlanAttrs {
  int64_t num_experts;
  int64_t expert_offset;
};

}  // namespace jaxmoe

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jaxmoe::PlanAttrs,
                                      ::xla::ffi::StructMember<int64_t>("num_experts"),
                                      ::xla::ffi::StructMember<int64_t>("expert_offset"));

namespace jaxmoe {
namespace {

ffi::Error Plan(cudaStream_t stream,
                In expert_ids,
                In expert_map,
                Out expert_offsets,
                Out row_to_token,
                Out slot_to_row,
                Out scratch,
                PlanAttrs attrs) {
  Operands take("plan");
  const PlanParams params =
      TakePlan({expert_ids, expert_map, *expert_offsets, *row_to_token, *slot_to_row, *scratch},
               attrs.num_experts,
               attrs.expert_offset,
               &take);
  if (take.failed()) return take.error();
  return take.Result(LaunchPlan(params, stream));
}

const Registered<Plan> registered("jaxmoe_plan_v1");

}  // namespace
}  // namespace jaxmoe
