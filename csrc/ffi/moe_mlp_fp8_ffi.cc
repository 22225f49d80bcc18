// FFI handler of the fused layer with FP8 weights: quantization, plan, both GEMMs, finalize.
#include "csrc/ffi/counters.h"
#include "csrc/ffi/fp8_checks.h"
#include "csrc/ffi/moe_mlp_checks.h"

namespace jaxmoe {
namespace {

ffi::Error MoeMlpFp8(cudaStream_t stream,
                     ffi::AnyBuffer x,
                     Floats x_scales,
                     ffi::AnyBuffer expert_ids,
                     Floats weights,
                     ffi::AnyBuffer w_gate_up,
                     Floats gate_up_scales,
                     ffi::AnyBuffer w_down,
                     Floats down_scales,
                     ffi::AnyBuffer b_gate_up,
                     ffi::AnyBuffer b_down,
                     ffi::AnyBuffer expert_map,
                     ffi::AnyBuffer residual,
                     Floats static_x,
                     Floats static_act,
                     ffi::Result<ffi::AnyBuffer> y,
                     ffi::Result<ffi::AnyBuffer> rows,
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
  CountExecution(Target::kMoeMlpFp8);
  const MlpBuffers b{
      x, expert_ids, w_gate_up, w_down, b_gate_up, b_down, expert_map, *rows, *act, *index};
  constexpr auto kLayout = static_cast<int64_t>(WeightLayout::kNK);
  const MlpAttrs attrs{num_experts, num_local_experts, expert_offset, gate_up, kLayout, true};
  JAXMOE_RETURN_IF_ERROR(CheckBuffers(b, attrs, activation));
  MoeMlpParams p = MakeParams(b, attrs, activation, gemm1, gemm2);
  const int64_t num_rows = p.num_tokens * p.top_k;
  const int64_t n1 = p.gated ? 2 * p.intermediate : p.intermediate;
  const bool x_is_fp8 = x.element_type() == ffi::DataType::F8E4M3FN;
  JAXMOE_RETURN_IF_ERROR(CheckRange(kMoeMlp, "format", format, 0, 2));
  Fp8Layer fp8;
  fp8.weight_dtype = ToDType(w_gate_up.element_type());
  fp8.format = static_cast<ScaleFormat>(format);
  fp8.promoted1 = promoted1 != 0;
  fp8.promoted2 = promoted2 != 0;
  JAXMOE_RETURN_IF_ERROR(CheckScales(kMoeMlp,
                                     "w_gate_up.scales",
                                     gate_up_scales,
                                     fp8.format,
                                     p.num_gate_up_weights,
                                     n1,
                                     p.hidden));
  JAXMOE_RETURN_IF_ERROR(CheckScales(kMoeMlp,
                                     "w_down.scales",
                                     down_scales,
                                     fp8.format,
                                     p.num_down_weights,
                                     p.hidden,
                                     p.intermediate));
  if (x_is_fp8) {
    JAXMOE_RETURN_IF_ERROR(
        CheckScales(kMoeMlp, "x.scales", x_scales, fp8.format, 0, p.num_tokens, p.hidden));
    fp8.x = x_scales.typed_data();
  }
  JAXMOE_RETURN_IF_ERROR(CheckShapeOrAbsent(kMoeMlp, "x_scale", static_x, {1}));
  const bool all_experts = static_act.element_count() == static_cast<size_t>(num_local_experts);
  JAXMOE_RETURN_IF_ERROR(CheckShapeOrAbsent(
      kMoeMlp, "intermediate_scale", static_act, {all_experts ? num_local_experts : 1}));
  if (fp8.format != ScaleFormat::kTensor && !(IsAbsent(static_x) && IsAbsent(static_act))) {
    return InvalidArgument(kMoeMlp, "static scales are for fp8_tensor");
  }
  const int64_t quantized_rows = !p.gemm1.gather ? num_rows : x_is_fp8 ? 0 : p.num_tokens;
  for (const ffi::AnyBuffer& values : {*xq, *act_q}) {
    JAXMOE_RETURN_IF_ERROR(CheckDtype(kMoeMlp, "scratch", values, {ffi::DataType::F8E4M3FN}));
  }
  JAXMOE_RETURN_IF_ERROR(CheckShape(kMoeMlp, "xq", *xq, {quantized_rows, p.hidden}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kMoeMlp, "act_q", *act_q, {num_rows, p.intermediate}));
  const Fp8Floats floats(fp8.format, p.num_tokens, num_rows, p.hidden, p.intermediate);
  JAXMOE_RETURN_IF_ERROR(CheckShape(kMoeMlp, "float scratch", *scratch, {floats.size}));
  JAXMOE_RETURN_IF_ERROR(CheckFinalize(weights, residual, *y, &p));
  fp8.w_gate_up = gate_up_scales.typed_data();
  fp8.w_down = down_scales.typed_data();
  fp8.static_x = IsAbsent(static_x) ? nullptr : static_x.typed_data();
  fp8.static_act = IsAbsent(static_act) ? nullptr : static_act.typed_data();
  fp8.num_static_act = static_cast<int64_t>(static_act.element_count());
  fp8.xq = xq->untyped_data();
  fp8.act_q = act_q->untyped_data();
  fp8.scratch = scratch->typed_data();
  p.fp8 = &fp8;
  if (const char* error = LaunchMoeMlp(p, stream)) return InvalidArgument(kMoeMlp, error);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxmoe

XLA_FFI_DEFINE_HANDLER_SYMBOL(MoeMlpFp8Ffi,
                              jaxmoe::MoeMlpFp8,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Arg<jaxmoe::Floats>()       // x_scales
                                  .Arg<xla::ffi::AnyBuffer>()  // expert_ids
                                  .Arg<jaxmoe::Floats>()       // weights
                                  .Arg<xla::ffi::AnyBuffer>()  // w_gate_up
                                  .Arg<jaxmoe::Floats>()       // gate_up_scales
                                  .Arg<xla::ffi::AnyBuffer>()  // w_down
                                  .Arg<jaxmoe::Floats>()       // down_scales
                                  .Arg<xla::ffi::AnyBuffer>()  // b_gate_up
                                  .Arg<xla::ffi::AnyBuffer>()  // b_down
                                  .Arg<xla::ffi::AnyBuffer>()  // expert_map
                                  .Arg<xla::ffi::AnyBuffer>()  // residual
                                  .Arg<jaxmoe::Floats>()       // static_x
                                  .Arg<jaxmoe::Floats>()       // static_act
                                  .Ret<xla::ffi::AnyBuffer>()  // y
                                  .Ret<xla::ffi::AnyBuffer>()  // rows
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
