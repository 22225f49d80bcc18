// Checks of what the handlers of the fused layer have in common.
#include "csrc/ffi/moe_mlp_operands.h"

namespace jaxmoe {

MoeMlpParams TakeMoeMlp(const MoeMlpOperands& in,
                        const MoeMlpAttrs& attrs,
                        MoeMlpDims* dims,
                        Operands* take) {
  Dim& T = dims->T;
  Dim& K = dims->K;
  Dim& H = dims->H;
  Dim I, E1, E2, static_scales;
  const ActivationAttrs& activation = attrs.activation;
  CheckEnums(attrs.format, attrs.gate_up, activation, take);
  MoeMlpParams p;
  p.format = static_cast<WeightFormat>(attrs.format);
  CheckLayout("layout1", attrs.layout1, p.format, take);
  CheckLayout("layout2", attrs.layout2, p.format, take);
  const bool plain = !RowOf(p.format).scaled, packed = RowOf(p.format).is_packed();
  p.rule = CheckTokens(attrs.tokens, p.format, in.act.element_type(), take);
  const bool gated = activation.gated != 0, two_arrays = !take->IsAbsent(in.w_up);
  const Types dtype = Like(in.act), fp8 = ffi::DataType::F8E4M3FN;
  take->Type("act", in.act, kHalfs);

  const bool scaled = !plain && in.x.element_type() == ffi::DataType::F8E4M3FN;
  p.x = take->Any("x", in.x, {T, H}, scaled ? fp8 : dtype);
  p.expert_ids = take->Ints("expert_ids", in.expert_ids, {T, K});
  const int64_t R = T * K;
  take->Range("T*K", R, 0, kMaxInt);
  take->Range("top_k", K, 1, kMaxInt);
  take->Range("num_experts", attrs.num_experts, 0, kMaxInt);
  take->Range("expert_offset", attrs.expert_offset, 0, kMaxInt);
  p.act = take->Any("act", in.act, {R, I}, dtype);
  const int64_t N = gated ? 2 * I : I, n1 = two_arrays ? N / 2 : N;
  if (two_arrays && (!gated || attrs.gate_up != static_cast<int64_t>(GateUp::kGateUp))) {
    take->Refuse("w_up is the other half of a gated layer in the order gate, up.");
  }
  const auto stored = [](int64_t layout, const Size& e, const Size& n, const Size& k) {
    return layout == static_cast<int64_t>(WeightLayout::kKN) ? Shape{e, k, n} : Shape{e, n, k};
  };
  take->Range("hidden", H, 1, kMaxColumns);
  take->Range("intermediate", I, 1, kMaxColumns);
  if (take->failed()) return p;
  const Shape first =
      packed ? PackedShape(p.format, {E1}, n1, H) : stored(attrs.layout1, E1, n1, H);
  const Shape second = packed ? PackedShape(p.format, {E2}, H, I) : stored(attrs.layout2, E2, H, I);
  p.gate_up.values = take->Any("w_gate_up", in.w_gate_up, first, WeightTypes(p.format, dtype));
  p.gate_up.up = take->AnyOrNull("w_up", in.w_up, first, Like(in.w_gate_up));
  p.down.values = take->Any("w_down", in.w_down, second, Like(in.w_gate_up));
  p.gate_up.bias = take->AnyOrNull("b_gate_up", in.b_gate_up, {E1, N}, dtype);
  p.down.bias = take->AnyOrNull("b_down", in.b_down, {E2, H}, dtype);
  p.expert_map = take->IntsOrNull("expert_map", in.expert_map, {attrs.num_experts});
  const bool gathers = attrs.gemm1.gather != 0;
  p.gate_up.tile = attrs.gemm1.config();
  p.down.tile = attrs.gemm2.config();
  if (!RowOf(p.format).is_plain()) {
    p.gate_up.scales = take->Floats("gate_up_scales",
                                    in.gate_up_scales,
                                    WeightScales(p.format, {E1}, N, H, two_arrays ? 2 : 1));
    p.down.scales = take->Floats("down_scales", in.down_scales, WeightScales(p.format, {E2}, H, I));
  }
  if (!plain) {
    if (scaled) p.x_scales = take->Floats("x_scales", in.x_scales, TokenScales(p.format, {}, T, H));
    p.xq = take->Any("xq", in.xq, {!gathers ? R : scaled ? 0 : int64_t{T}, H}, fp8);
    p.act_q = take->Any("hq", in.hq, {R, I}, fp8);
  }
  if (p.rule != TokenRule::kNone && !take->IsAbsent(in.x_scales)) {
    const bool one = in.x_scales.dimensions().size() == 0;
    p.num_x_scales = one ? 1 : int64_t{T};
    p.x_scales = take->Floats("x_scales", in.x_scales, one ? Shape{} : Shape{T});
  }
  if (!plain || HasRowScales(p.rule)) {
    p.static_x = take->FloatsOrNull("x_scale", in.x_scale, {1});
    p.static_act = take->FloatsOrNull("h_scale", in.h_scale, {static_scales});
  }
  if (p.static_act != nullptr && static_scales != attrs.num_local_experts) {
    take->Range("h_scale.shape[0]", static_scales, 1, 1);
  }
  if (RowOf(p.format).tokens != Shared::kTensor &&
      (p.static_x != nullptr || p.static_act != nullptr)) {
    take->Refuse("static scales are for fp8_tensor.");
  }
  take->Range("num_local_experts", attrs.num_local_experts, 1, kMaxInt);
  take->Range("w_gate_up.shape[0]", E1, 1, kMaxInt);
  take->Range("w_down.shape[0]", E2, 1, kMaxInt);
  const int64_t unit = plain ? 8 : 16;
  take->Range("hidden modulo 16 bytes", H % unit, 0, 0);
  take->Range("intermediate modulo 16 bytes", I % unit, 0, 0);
  if (take->failed()) return p;
  take->Range("num_local_experts modulo w_gate_up.shape[0]", attrs.num_local_experts % E1, 0, 0);
  take->Range("num_local_experts modulo w_down.shape[0]", attrs.num_local_experts % E2, 0, 0);
  // Room for their sums says that a program wants slices: those that were saved before have none,
  // and the same attributes.
  const int64_t floats = MlpFloats(p.format, p.rule, T, R, H, I).size, sums = SliceSums(R, H, I);
  const bool sliced = packed && p.rule == TokenRule::kNone && T == 1 && R <= kMaxPlannedSlots &&
                      H >= kMinSlicedHidden && H <= kMaxSlicedHidden && sums > 0 &&
                      in.floats.element_count() == static_cast<size_t>(floats + sums);
  p.floats = take->Floats("floats", in.floats, {floats + (sliced ? sums : 0)});
  if (sliced) p.slice_sums = p.floats + floats;
  p.index = take->Ints(
      "index", in.index, {MlpIndex(R, attrs.num_local_experts, p.gate_up.tile.one_kernel).size});
  if (take->failed()) return p;

  p.dtype = TypeOf(in.act);
  p.weight_dtype = packed ? p.dtype : TypeOf(in.w_gate_up);
  p.num_static_act = p.static_act == nullptr ? 0 : int64_t{static_scales};
  p.num_tokens = T;
  p.top_k = K;
  p.hidden = H;
  p.intermediate = I;
  p.num_experts = attrs.num_experts;
  p.num_local_experts = attrs.num_local_experts;
  p.expert_offset = attrs.expert_offset;
  p.gate_up.count = E1;
  p.down.count = E2;
  p.gate_up.layout = static_cast<WeightLayout>(attrs.layout1);
  p.down.layout = static_cast<WeightLayout>(attrs.layout2);
  p.gate_up.promoted = attrs.promoted1 != 0;
  p.down.promoted = attrs.promoted2 != 0;
  p.gated = gated;
  p.order = static_cast<GateUp>(attrs.gate_up);
  p.activation = activation.params();
  return p;
}

}  // namespace jaxmoe
