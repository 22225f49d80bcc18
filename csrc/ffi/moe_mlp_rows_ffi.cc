// FFI handler of the fused layer without finalize: plan, gate-up GEMM, down GEMM, one call.
#include "csrc/ffi/counters.h"
#include "csrc/ffi/moe_mlp_checks.h"

namespace jaxmoe {
namespace {

ffi::Error MoeMlpRows(cudaStream_t stream,
                      ffi::AnyBuffer x,
                      ffi::AnyBuffer expert_ids,
                      ffi::AnyBuffer w_gate_up,
                      ffi::AnyBuffer w_down,
                      ffi::AnyBuffer b_gate_up,
                      ffi::AnyBuffer b_down,
                      ffi::AnyBuffer expert_map,
                      ffi::Result<ffi::AnyBuffer> rows,
                      ffi::Result<ffi::AnyBuffer> slot_to_row,
                      ffi::Result<ffi::AnyBuffer> act,
                      ffi::Result<ffi::AnyBuffer> index,
                      int64_t num_experts,
                      int64_t num_local_experts,
                      int64_t expert_offset,
                      int64_t gate_up,
                      int64_t weight_layout,
                      ActivationAttrs activation,
                      TileAttrs gemm1,
                      TileAttrs gemm2) {
  CountExecution(Target::kMoeMlpRows);
  const MlpBuffers b{
      x, expert_ids, w_gate_up, w_down, b_gate_up, b_down, expert_map, *rows, *act, *index};
  const MlpAttrs attrs{num_experts, num_local_experts, expert_offset, gate_up, weight_layout};
  JAXMOE_RETURN_IF_ERROR(CheckBuffers(b, attrs, activation));
  MoeMlpParams p = MakeParams(b, attrs, activation, gemm1, gemm2);
  JAXMOE_RETURN_IF_ERROR(SetSlotToRow(*slot_to_row, &p));
  if (const char* error = LaunchMoeMlp(p, stream)) return InvalidArgument(kMoeMlp, error);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxmoe

XLA_FFI_DEFINE_HANDLER_SYMBOL(MoeMlpRowsFfi,
                              jaxmoe::MoeMlpRows,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Arg<xla::ffi::AnyBuffer>()  // expert_ids
                                  .Arg<xla::ffi::AnyBuffer>()  // w_gate_up
                                  .Arg<xla::ffi::AnyBuffer>()  // w_down
                                  .Arg<xla::ffi::AnyBuffer>()  // b_gate_up
                                  .Arg<xla::ffi::AnyBuffer>()  // b_down
                                  .Arg<xla::ffi::AnyBuffer>()  // expert_map
                                  .Ret<xla::ffi::AnyBuffer>()  // rows
                                  .Ret<xla::ffi::AnyBuffer>()  // slot_to_row
                                  .Ret<xla::ffi::AnyBuffer>()  // act
                                  .Ret<xla::ffi::AnyBuffer>()  // index
                                  .Attr<int64_t>("num_experts")
                                  .Attr<int64_t>("num_local_experts")
                                  .Attr<int64_t>("expert_offset")
                                  .Attr<int64_t>("gate_up")
                                  .Attr<int64_t>("weight_layout")
                                  .Attr<jaxmoe::ActivationAttrs>("activation")
                                  .Attr<jaxmoe::TileAttrs>("gemm1")
                                  .Attr<jaxmoe::TileAttrs>("gemm2"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
