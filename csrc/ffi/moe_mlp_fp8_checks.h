// Operands of FP8 that the fused layer's handlers share: their checks, and the layer they become.
#pragma once

#include "csrc/ffi/fp8_checks.h"
#include "csrc/ffi/moe_mlp_checks.h"

namespace jaxmoe {

struct Fp8Attrs {
  int64_t format;
  int64_t promoted1;
  int64_t promoted2;
};

// What a layer with FP8 weights has beside MlpBuffers.
struct Fp8Buffers {
  Floats x_scales;                     // of MlpBuffers::x if that is e4m3, else absent
  Floats gate_up_scales, down_scales;  // see CheckScales
  Floats static_x, static_act;         // [1] and [1] or [E_l], or absent
  ffi::AnyBuffer xq, act_q;            // [T,H] or [R,H] or [0,H], [R,I]
  Floats scratch;                      // [Fp8Floats::size]
};

// `p` is from MakeParams; it gets `fp8`, which must live as long.
inline ffi::Error SetFp8(const MlpBuffers& b,
                         const Fp8Buffers& q,
                         const Fp8Attrs& attrs,
                         MoeMlpParams* p,
                         Fp8Layer* fp8) {
  const int64_t num_rows = p->num_tokens * p->top_k;
  const int64_t n1 = p->gated ? 2 * p->intermediate : p->intermediate;
  const bool x_is_fp8 = b.x.element_type() == ffi::DataType::F8E4M3FN;
  JAXMOE_RETURN_IF_ERROR(CheckRange(kMoeMlp, "format", attrs.format, 0, 2));
  fp8->weight_dtype = ToDType(b.w_gate_up.element_type());
  fp8->format = static_cast<ScaleFormat>(attrs.format);
  fp8->promoted1 = attrs.promoted1 != 0;
  fp8->promoted2 = attrs.promoted2 != 0;
  JAXMOE_RETURN_IF_ERROR(CheckScales(kMoeMlp,
                                     "w_gate_up.scales",
                                     q.gate_up_scales,
                                     fp8->format,
                                     p->num_gate_up_weights,
                                     n1,
                                     p->hidden));
  JAXMOE_RETURN_IF_ERROR(CheckScales(kMoeMlp,
                                     "w_down.scales",
                                     q.down_scales,
                                     fp8->format,
                                     p->num_down_weights,
                                     p->hidden,
                                     p->intermediate));
  if (x_is_fp8) {
    JAXMOE_RETURN_IF_ERROR(
        CheckScales(kMoeMlp, "x.scales", q.x_scales, fp8->format, 0, p->num_tokens, p->hidden));
    fp8->x = q.x_scales.typed_data();
  }
  JAXMOE_RETURN_IF_ERROR(CheckShapeOrAbsent(kMoeMlp, "x_scale", q.static_x, {1}));
  const auto num_static_act = static_cast<int64_t>(q.static_act.element_count());
  const bool all_experts = num_static_act == p->num_local_experts;
  JAXMOE_RETURN_IF_ERROR(CheckShapeOrAbsent(
      kMoeMlp, "intermediate_scale", q.static_act, {all_experts ? p->num_local_experts : 1}));
  if (fp8->format != ScaleFormat::kTensor && !(IsAbsent(q.static_x) && IsAbsent(q.static_act))) {
    return InvalidArgument(kMoeMlp, "static scales are for fp8_tensor");
  }
  const int64_t quantized_rows = !p->gemm1.gather ? num_rows : x_is_fp8 ? 0 : p->num_tokens;
  for (const ffi::AnyBuffer& values : {q.xq, q.act_q}) {
    JAXMOE_RETURN_IF_ERROR(CheckDtype(kMoeMlp, "scratch", values, {ffi::DataType::F8E4M3FN}));
  }
  JAXMOE_RETURN_IF_ERROR(CheckShape(kMoeMlp, "xq", q.xq, {quantized_rows, p->hidden}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kMoeMlp, "act_q", q.act_q, {num_rows, p->intermediate}));
  const Fp8Floats floats(fp8->format, p->num_tokens, num_rows, p->hidden, p->intermediate);
  JAXMOE_RETURN_IF_ERROR(CheckShape(kMoeMlp, "float scratch", q.scratch, {floats.size}));
  fp8->w_gate_up = q.gate_up_scales.typed_data();
  fp8->w_down = q.down_scales.typed_data();
  fp8->static_x = IsAbsent(q.static_x) ? nullptr : q.static_x.typed_data();
  fp8->static_act = IsAbsent(q.static_act) ? nullptr : q.static_act.typed_data();
  fp8->num_static_act = num_static_act;
  fp8->xq = q.xq.untyped_data();
  fp8->act_q = q.act_q.untyped_data();
  fp8->scratch = q.scratch.typed_data();
  p->fp8 = fp8;
  return ffi::Error::Success();
}

}  // namespace jaxmoe
