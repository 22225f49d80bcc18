// FFI handler of the fused layer with FP8 weights without finalize: quantization, plan, GEMMs.
#include "csrc/ffi/counters.h"
#include "csrc/ffi/moe_mlp_fp8_checks.h"

namespace jaxmoe {
namespace {

ffi::Error MoeMlpFp8Rows(cudaStream_t stream,
                         ffi::AnyBuffer x,
                         Floats x_scales,
                         ffi::AnyBuffer expert_ids,
                         ffi::AnyBuffer w_gate_up,
                         Floats gate_up_scales,
                         ffi::AnyBuffer w_down,
                         Floats down_scales,
                         ffi::AnyBuffer b_gate_up,
                         ffi::AnyBuffer b_down,
                         ffi::AnyBuffer expert_map,
                         Floats static_x,
                         Floats static_act,
                         ffi::Result<ffi::AnyBuffer> rows,
                         ffi::Result<ffi::AnyBuffer> slot_to_row,
                         ffi::Result<ffi::AnyBuffer> act,
                         ffi::Result<ffi::AnyBuffer> xq,
                         ffi::Result<ffi::AnyBuffer> act_q,
                         ffi::Result<Floats> scratch,
                         ffi::Result<ffi::AnyBuffer> index,
                         int64_t num_experts,
                         int64_t num_local_experts,
                         int64_t expert_offset,
                         int64_t gate_up,
                         int64_t format,
                         int64_t promoted1,
                         int64_t promoted2,
                         ActivationAttrs activation,
                         TileAttrs gemm1,
                         TileAttrs gemm2) {
  CountExecution(Target::kMoeMlpFp8Rows);
  const MlpBuffers b{
      x, expert_ids, w_gate_up, w_down, b_gate_up, b_down, expert_map, *rows, *act, *index};
  constexpr auto kLayout = static_cast<int64_t>(WeightLayout::kNK);
  const MlpAttrs attrs{num_experts, num_local_experts, expert_offset, gate_up, kLayout, true};
  JAXMOE_RETURN_IF_ERROR(CheckBuffers(b, attrs, activation));
  MoeMlpParams p = MakeParams(b, attrs, activation, gemm1, gemm2);
  const Fp8Buffers q{
      x_scales, gate_up_scales, down_scales, static_x, static_act, *xq, *act_q, *scratch};
  Fp8Layer fp8;
  JAXMOE_RETURN_IF_ERROR(SetFp8(b, q, {format, promoted1, promoted2}, &p, &fp8));
  JAXMOE_RETURN_IF_ERROR(SetSlotToRow(*slot_to_row, &p));
  if (const char* error = LaunchMoeMlp(p, stream)) return InvalidArgument(kMoeMlp, error);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxmoe

XLA_FFI_DEFINE_HANDLER_SYMBOL(MoeMlpFp8RowsFfi,
                              jaxmoe::MoeMlpFp8Rows,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Arg<jaxmoe::Floats>()       // x_scales
                                  .Arg<xla::ffi::AnyBuffer>()  // expert_ids
                                  .Arg<xla::ffi::AnyBuffer>()  // w_gate_up
                                  .Arg<jaxmoe::Floats>()       // gate_up_scales
                                  .Arg<xla::ffi::AnyBuffer>()  // w_down
                                  .Arg<jaxmoe::Floats>()       // down_scales
                                  .Arg<xla::ffi::AnyBuffer>()  // b_gate_up
                                  .Arg<xla::ffi::AnyBuffer>()  // b_down
                                  .Arg<xla::ffi::AnyBuffer>()  // expert_map
                                  .Arg<jaxmoe::Floats>()       // static_x
                                  .Arg<jaxmoe::Floats>()       // static_act
                                  .Ret<xla::ffi::AnyBuffer>()  // rows
                                  .Ret<xla::ffi::AnyBuffer>()  // slot_to_row
                                  .Ret<xla::ffi::AnyBuffer>()  // act
                                  .Ret<xla::ffi::AnyBuffer>()  // xq
                                  .Ret<xla::ffi::AnyBuffer>()  // act_q
                                  .Ret<jaxmoe::Floats>()       // scratch
                                  .Ret<xla::ffi::AnyBuffer>()  // index
                                  .Attr<int64_t>("num_experts")
                                  .Attr<int64_t>("num_local_experts")
                                  .Attr<int64_t>("expert_offset")
                                  .Attr<int64_t>("gate_up")
                                  .Attr<int64_t>("format")
                                  .Attr<int64_t>("promoted1")
                                  .Attr<int64_t>("promoted2")
                                  .Attr<jaxmoe::ActivationAttrs>("activation")
                                  .Attr<jaxmoe::TileAttrs>("gemm1")
                                  .Attr<jaxmoe::TileAttrs>("gemm2"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
