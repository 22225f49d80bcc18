// FFI handler of the fused layer: plan, gate-up GEMM, down GEMM, finalize, one call.
#include "csrc/ffi/counters.h"
#include "csrc/ffi/moe_mlp_checks.h"

namespace jaxmoe {
namespace {

ffi::Error MoeMlp(cudaStream_t stream,
                  ffi::AnyBuffer x,
                  ffi::AnyBuffer expert_ids,
                  ffi::AnyBuffer weights,
                  ffi::AnyBuffer w_gate_up,
                  ffi::AnyBuffer w_down,
                  ffi::AnyBuffer b_gate_up,
                  ffi::AnyBuffer b_down,
                  ffi::AnyBuffer expert_map,
                  ffi::AnyBuffer residual,
                  ffi::Result<ffi::AnyBuffer> y,
                  ffi::Result<ffi::AnyBuffer> rows,
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
  CountExecution(Target::kMoeMlp);
  const MlpBuffers b{x,
                     expert_ids,
                     weights,
                     w_gate_up,
                     w_down,
                     b_gate_up,
                     b_down,
                     expert_map,
                     residual,
                     *y,
                     *rows,
                     *act,
                     *index};
  const MlpAttrs attrs{num_experts, num_local_experts, expert_offset, gate_up, weight_layout};
  JAXMOE_RETURN_IF_ERROR(CheckBuffers(b, attrs, activation));

  MoeMlpParams p;
  p.dtype = ToDType(x.element_type());
  p.x = x.untyped_data();
  p.expert_ids = expert_ids.typed_data<int32_t>();
  p.weights = weights.typed_data<float>();
  p.w_gate_up = w_gate_up.untyped_data();
  p.w_down = w_down.untyped_data();
  p.b_gate_up = IsAbsent(b_gate_up) ? nullptr : b_gate_up.untyped_data();
  p.b_down = IsAbsent(b_down) ? nullptr : b_down.untyped_data();
  p.expert_map = IsAbsent(expert_map) ? nullptr : expert_map.typed_data<int32_t>();
  p.residual = IsAbsent(residual) ? nullptr : residual.untyped_data();
  p.y = y->untyped_data();
  p.rows = rows->untyped_data();
  p.act = act->untyped_data();
  p.index = index->typed_data<int32_t>();
  p.num_tokens = x.dimensions()[0];
  p.top_k = expert_ids.dimensions()[1];
  p.hidden = x.dimensions()[1];
  p.intermediate = act->dimensions()[1];
  p.num_experts = num_experts;
  p.num_local_experts = num_local_experts;
  p.expert_offset = expert_offset;
  p.num_gate_up_weights = w_gate_up.dimensions()[0];
  p.num_down_weights = w_down.dimensions()[0];
  p.layout = static_cast<WeightLayout>(weight_layout);
  p.gated = activation.gated != 0;
  p.gate_up = static_cast<GateUp>(gate_up);
  p.activation = activation.params();
  p.gemm1 = gemm1.config();
  p.gemm2 = gemm2.config();
  if (const char* error = LaunchMoeMlp(p, stream)) return InvalidArgument(kMoeMlp, error);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxmoe

XLA_FFI_DEFINE_HANDLER_SYMBOL(MoeMlpFfi,
                              jaxmoe::MoeMlp,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Arg<xla::ffi::AnyBuffer>()  // expert_ids
                                  .Arg<xla::ffi::AnyBuffer>()  // weights
                                  .Arg<xla::ffi::AnyBuffer>()  // w_gate_up
                                  .Arg<xla::ffi::AnyBuffer>()  // w_down
                                  .Arg<xla::ffi::AnyBuffer>()  // b_gate_up
                                  .Arg<xla::ffi::AnyBuffer>()  // b_down
                                  .Arg<xla::ffi::AnyBuffer>()  // expert_map
                                  .Arg<xla::ffi::AnyBuffer>()  // residual
                                  .Ret<xla::ffi::AnyBuffer>()  // y
                                  .Ret<xla::ffi::AnyBuffer>()  // rows
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
