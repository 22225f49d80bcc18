// FFI handler jaxmoe_route_plan_v1: the experts of each token, and the order of rows by expert.
#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/ffi/checks.h"
#include "csrc/ffi/counters.h"
#include "csrc/ffi/route_attrs.h"
#include "csrc/kernels/route_plan.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmoe {
namespace {

ffi::Error RoutePlan(cudaStream_t stream,
                     ffi::AnyBuffer logits,                         // [B,T,E]
                     ffi::AnyBuffer bias,                           // [E] or [0]
                     ffi::BufferR1<ffi::S32> expert_map,            // [E+S] or [0]
                     ffi::BufferR1<ffi::S32> num_valid,             // [B] or [0]
                     ffi::ResultBufferR3<ffi::S32> expert_ids,      // [B,T,C], C = K+S
                     ffi::ResultBufferR3<ffi::F32> weights,         // [B,T,C]
                     ffi::ResultBufferR2<ffi::S32> expert_offsets,  // [B,E_l+1]
                     ffi::ResultBufferR2<ffi::S32> row_to_token,    // [B,R], R = T*C
                     ffi::ResultBufferR3<ffi::S32> slot_to_row,     // [B,T,C]
                     ffi::ResultBufferR1<ffi::S32> scratch,         // [PlanScratchInts]
                     int64_t num_shared_experts,
                     int64_t expert_offset,
                     RuleAttrs rule,
                     GroupAttrs groups) {
  CountExecution(Target::kRoutePlan);
  constexpr const char* kOp = "route_and_plan";
  constexpr int64_t kMaxInt = 0x7fffffff;
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "logits", logits, 3));
  int64_t batch = logits.dimensions()[0];
  int64_t num_tokens = logits.dimensions()[1];
  int64_t num_experts = logits.dimensions()[2];
  int64_t columns = expert_ids->dimensions()[2];
  int64_t num_local_experts = expert_offsets->dimensions()[1] - 1;
  JAXMOE_RETURN_IF_ERROR(
      CheckRange(kOp, "num_shared_experts", num_shared_experts, 0, kMaxInt - num_experts));
  RouteParams route{};
  JAXMOE_RETURN_IF_ERROR(MakeRoute(
      kOp, logits, bias, batch * num_tokens, columns - num_shared_experts, rule, groups, &route));
  int64_t rows = num_tokens * columns;
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "T * K", rows, 0, kMaxInt));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "num_local_experts", num_local_experts, 0, kMaxInt - 1));
  JAXMOE_RETURN_IF_ERROR(
      CheckShapeOrAbsent(kOp, "expert_map", expert_map, {num_experts + num_shared_experts}));
  JAXMOE_RETURN_IF_ERROR(CheckShapeOrAbsent(kOp, "num_valid", num_valid, {batch}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "expert_ids", *expert_ids, {batch, num_tokens, columns}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "weights", *weights, {batch, num_tokens, columns}));
  JAXMOE_RETURN_IF_ERROR(
      CheckShape(kOp, "expert_offsets", *expert_offsets, {batch, num_local_experts + 1}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "row_to_token", *row_to_token, {batch, rows}));
  JAXMOE_RETURN_IF_ERROR(
      CheckShape(kOp, "slot_to_row", *slot_to_row, {batch, num_tokens, columns}));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp,
                                    "scratch.shape[0]",
                                    scratch->dimensions()[0],
                                    PlanScratchInts(batch, rows, num_local_experts),
                                    INT64_MAX));
  route.expert_ids = expert_ids->typed_data();
  route.weights = weights->typed_data();
  route.num_shared_experts = num_shared_experts;
  route.num_valid = IsAbsent(num_valid) ? nullptr : num_valid.typed_data();
  route.entry_tokens = num_tokens;
  PlanParams plan{};
  plan.expert_ids = expert_ids->typed_data();
  plan.expert_map = IsAbsent(expert_map) ? nullptr : expert_map.typed_data();
  plan.expert_offsets = expert_offsets->typed_data();
  plan.row_to_token = row_to_token->typed_data();
  plan.slot_to_row = slot_to_row->typed_data();
  plan.scratch = scratch->typed_data();
  plan.batch = batch;
  plan.num_tokens = num_tokens;
  plan.top_k = columns;
  plan.num_experts = num_experts + num_shared_experts;
  plan.expert_offset = expert_offset;
  plan.num_local_experts = num_local_experts;
  return CudaStatus(kOp, LaunchRoutePlan(route, plan, stream));
}

}  // namespace
}  // namespace jaxmoe

XLA_FFI_DEFINE_HANDLER_SYMBOL(RoutePlanFfi,
                              jaxmoe::RoutePlan,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::S32>>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::S32>>()
                                  .Ret<xla::ffi::BufferR3<xla::ffi::S32>>()
                                  .Ret<xla::ffi::BufferR3<xla::ffi::F32>>()
                                  .Ret<xla::ffi::BufferR2<xla::ffi::S32>>()
                                  .Ret<xla::ffi::BufferR2<xla::ffi::S32>>()
                                  .Ret<xla::ffi::BufferR3<xla::ffi::S32>>()
                                  .Ret<xla::ffi::BufferR1<xla::ffi::S32>>()
                                  .Attr<int64_t>("num_shared_experts")
                                  .Attr<int64_t>("expert_offset")
                                  .Attr<jaxmoe::RuleAttrs>("rule")
                                  .Attr<jaxmoe::GroupAttrs>("groups"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
