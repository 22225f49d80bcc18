// FFI handler jaxmoe_plan_v1: which row of the expert-ordered arrays belongs to which slot.
#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/ffi/checks.h"
#include "csrc/ffi/counters.h"
#include "csrc/kernels/plan.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmoe {
namespace {

ffi::Error Plan(cudaStream_t stream,
                ffi::BufferR3<ffi::S32> expert_ids,            // [B,T,K]
                ffi::BufferR1<ffi::S32> expert_map,            // [E] or [0]
                ffi::ResultBufferR2<ffi::S32> expert_offsets,  // [B,E_l+1]
                ffi::ResultBufferR2<ffi::S32> row_to_token,    // [B,R]
                ffi::ResultBufferR3<ffi::S32> slot_to_row,     // [B,T,K]
                ffi::ResultBufferR1<ffi::S32> scratch,         // [S]
                int64_t num_experts,
                int64_t expert_offset) {
  CountExecution(Target::kPlan);
  constexpr const char* kOp = "plan";
  constexpr int64_t kMaxInt = 0x7fffffff;
  auto ids = expert_ids.dimensions();
  int64_t batch = ids[0];
  int64_t num_tokens = ids[1];
  int64_t top_k = ids[2];
  int64_t rows = num_tokens * top_k;
  int64_t num_local_experts = expert_offsets->dimensions()[1] - 1;
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "T * K", rows, 0, kMaxInt));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "num_experts", num_experts, 0, kMaxInt));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "num_local_experts", num_local_experts, 0, kMaxInt - 1));
  JAXMOE_RETURN_IF_ERROR(CheckShapeOrAbsent(kOp, "expert_map", expert_map, {num_experts}));
  JAXMOE_RETURN_IF_ERROR(
      CheckShape(kOp, "expert_offsets", *expert_offsets, {batch, num_local_experts + 1}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "row_to_token", *row_to_token, {batch, rows}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "slot_to_row", *slot_to_row, {batch, num_tokens, top_k}));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp,
                                    "scratch.shape[0]",
                                    scratch->dimensions()[0],
                                    PlanScratchInts(batch, rows, num_local_experts),
                                    INT64_MAX));
  PlanParams params{};
  params.expert_ids = expert_ids.typed_data();
  params.expert_map = IsAbsent(expert_map) ? nullptr : expert_map.typed_data();
  params.expert_offsets = expert_offsets->typed_data();
  params.row_to_token = row_to_token->typed_data();
  params.slot_to_row = slot_to_row->typed_data();
  params.scratch = scratch->typed_data();
  params.batch = batch;
  params.num_tokens = num_tokens;
  params.top_k = top_k;
  params.num_experts = num_experts;
  params.expert_offset = expert_offset;
  params.num_local_experts = num_local_experts;
  return CudaStatus(kOp, LaunchPlan(params, stream));
}

}  // namespace
}  // namespace jaxmoe

XLA_FFI_DEFINE_HANDLER_SYMBOL(PlanFfi,
                              jaxmoe::Plan,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::BufferR3<xla::ffi::S32>>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::S32>>()
                                  .Ret<xla::ffi::BufferR2<xla::ffi::S32>>()
                                  .Ret<xla::ffi::BufferR2<xla::ffi::S32>>()
                                  .Ret<xla::ffi::BufferR3<xla::ffi::S32>>()
                                  .Ret<xla::ffi::BufferR1<xla::ffi::S32>>()
                                  .Attr<int64_t>("num_experts")
                                  .Attr<int64_t>("expert_offset"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
