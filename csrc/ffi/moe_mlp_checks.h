// Operands of the fused layer's handlers: their checks, and the parameters they become.
#pragma once

#include "csrc/ffi/checks.h"
#include "csrc/ffi/gemm_attrs.h"
#include "csrc/gemm/moe_mlp.h"

namespace jaxmoe {

inline constexpr char kMoeMlp[] = "moe_mlp";

struct MlpAttrs {
  int64_t num_experts;
  int64_t num_local_experts;
  int64_t expert_offset;
  int64_t gate_up;
  int64_t weight_layout;
  bool fp8 = false;  // weights are FP8, x perhaps
};

// Every operand but those of finalize.
struct MlpBuffers {
  ffi::AnyBuffer x;                  // [T,H]
  ffi::AnyBuffer expert_ids;         // [T,K]
  ffi::AnyBuffer w_gate_up, w_down;  // [E1,...], [E2,...]
  ffi::AnyBuffer b_gate_up, b_down;  // [E1,N1] and [E2,H], or absent
  ffi::AnyBuffer expert_map;         // [E] or absent
  ffi::AnyBuffer rows, act;          // [R,H], [R,I]
  ffi::AnyBuffer index;              // [MlpIndex::size]
};

inline ffi::Error CheckBuffers(const MlpBuffers& b,
                               const MlpAttrs& attrs,
                               const ActivationAttrs& act) {
  JAXMOE_RETURN_IF_ERROR(CheckRank(kMoeMlp, "x", b.x, 2));
  JAXMOE_RETURN_IF_ERROR(CheckRank(kMoeMlp, "expert_ids", b.expert_ids, 2));
  JAXMOE_RETURN_IF_ERROR(CheckRank(kMoeMlp, "act", b.act, 2));
  JAXMOE_RETURN_IF_ERROR(CheckRank(kMoeMlp, "w_gate_up", b.w_gate_up, 3));
  JAXMOE_RETURN_IF_ERROR(CheckRank(kMoeMlp, "w_down", b.w_down, 3));
  const int64_t tokens = b.x.dimensions()[0];
  const int64_t hidden = b.x.dimensions()[1];
  const int64_t top_k = b.expert_ids.dimensions()[1];
  const int64_t rows = tokens * top_k;
  const int64_t intermediate = b.act.dimensions()[1];
  const int64_t n1 = act.gated ? 2 * intermediate : intermediate;
  const int64_t e1 = b.w_gate_up.dimensions()[0];
  const int64_t e2 = b.w_down.dimensions()[0];
  const bool kn = attrs.weight_layout == static_cast<int64_t>(WeightLayout::kKN);
  JAXMOE_RETURN_IF_ERROR(CheckRange(kMoeMlp, "weight_layout", attrs.weight_layout, 0, 1));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kMoeMlp, "gate_up", attrs.gate_up, 0, 2));
  const ffi::DataType dtype = b.act.element_type();
  const ffi::DataType weights = attrs.fp8 ? b.w_gate_up.element_type() : dtype;
  const ffi::DataType fp8_or_dtype = attrs.fp8 ? ffi::DataType::F8E4M3FN : dtype;
  JAXMOE_RETURN_IF_ERROR(CheckDtype(kMoeMlp, "x", b.x, {dtype, fp8_or_dtype}));
  JAXMOE_RETURN_IF_ERROR(
      CheckDtype(kMoeMlp, "act", b.act, {ffi::DataType::BF16, ffi::DataType::F16}));
  if (attrs.fp8) {
    JAXMOE_RETURN_IF_ERROR(CheckDtype(
        kMoeMlp, "w_gate_up", b.w_gate_up, {ffi::DataType::F8E4M3FN, ffi::DataType::F8E5M2}));
  }
  for (const ffi::AnyBuffer& other : {b.w_gate_up, b.w_down}) {
    JAXMOE_RETURN_IF_ERROR(CheckDtype(kMoeMlp, "weights", other, {weights}));
  }
  for (const ffi::AnyBuffer& other : {b.b_gate_up, b.b_down, b.rows}) {
    JAXMOE_RETURN_IF_ERROR(CheckDtype(kMoeMlp, "operand", other, {dtype}));
  }
  for (const ffi::AnyBuffer& integers : {b.expert_ids, b.expert_map, b.index}) {
    JAXMOE_RETURN_IF_ERROR(CheckDtype(kMoeMlp, "index operand", integers, {ffi::DataType::S32}));
  }
  JAXMOE_RETURN_IF_ERROR(CheckShape(kMoeMlp, "expert_ids", b.expert_ids, {tokens, top_k}));
  JAXMOE_RETURN_IF_ERROR(
      CheckShape(kMoeMlp, "w_gate_up", b.w_gate_up, {e1, kn ? hidden : n1, kn ? n1 : hidden}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(
      kMoeMlp, "w_down", b.w_down, {e2, kn ? intermediate : hidden, kn ? hidden : intermediate}));
  JAXMOE_RETURN_IF_ERROR(CheckShapeOrAbsent(kMoeMlp, "b_gate_up", b.b_gate_up, {e1, n1}));
  JAXMOE_RETURN_IF_ERROR(CheckShapeOrAbsent(kMoeMlp, "b_down", b.b_down, {e2, hidden}));
  JAXMOE_RETURN_IF_ERROR(
      CheckShapeOrAbsent(kMoeMlp, "expert_map", b.expert_map, {attrs.num_experts}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kMoeMlp, "rows", b.rows, {rows, hidden}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kMoeMlp, "act", b.act, {rows, intermediate}));
  constexpr int64_t kMaxInt = (int64_t{1} << 31) - 1;
  JAXMOE_RETURN_IF_ERROR(CheckRange(kMoeMlp, "T*K", rows, 0, kMaxInt));
  JAXMOE_RETURN_IF_ERROR(
      CheckRange(kMoeMlp, "num_local_experts", attrs.num_local_experts, 1, kMaxInt));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kMoeMlp, "w_gate_up.shape[0]", e1, 1, kMaxInt));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kMoeMlp, "w_down.shape[0]", e2, 1, kMaxInt));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kMoeMlp, "hidden", hidden, 1, kMaxInt / 4));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kMoeMlp, "intermediate", intermediate, 1, kMaxInt / 4));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kMoeMlp, "activation kind", act.kind, 0, 4));
  if (attrs.num_local_experts % e1 != 0 || attrs.num_local_experts % e2 != 0) {
    return InvalidArgument(kMoeMlp,
                           "num_local_experts must be a multiple of both weights' experts");
  }
  const int64_t unit = attrs.fp8 ? 16 : 8;
  if (hidden % unit != 0 || intermediate % unit != 0) {
    return InvalidArgument(kMoeMlp, "rows must be multiples of 16 bytes");
  }
  return CheckShape(kMoeMlp, "index", b.index, {MlpIndex(rows, attrs.num_local_experts).size});
}

// Of operands that passed CheckBuffers; the results are left to the caller.
inline MoeMlpParams MakeParams(const MlpBuffers& b,
                               const MlpAttrs& attrs,
                               const ActivationAttrs& activation,
                               const TileAttrs& gemm1,
                               const TileAttrs& gemm2) {
  MoeMlpParams p;
  p.dtype = ToDType(b.act.element_type());
  p.x = b.x.untyped_data();
  p.expert_ids = b.expert_ids.typed_data<int32_t>();
  p.w_gate_up = b.w_gate_up.untyped_data();
  p.w_down = b.w_down.untyped_data();
  p.b_gate_up = IsAbsent(b.b_gate_up) ? nullptr : b.b_gate_up.untyped_data();
  p.b_down = IsAbsent(b.b_down) ? nullptr : b.b_down.untyped_data();
  p.expert_map = IsAbsent(b.expert_map) ? nullptr : b.expert_map.typed_data<int32_t>();
  p.rows = b.rows.untyped_data();
  p.act = b.act.untyped_data();
  p.index = b.index.typed_data<int32_t>();
  p.num_tokens = b.x.dimensions()[0];
  p.top_k = b.expert_ids.dimensions()[1];
  p.hidden = b.x.dimensions()[1];
  p.intermediate = b.act.dimensions()[1];
  p.num_experts = attrs.num_experts;
  p.num_local_experts = attrs.num_local_experts;
  p.expert_offset = attrs.expert_offset;
  p.num_gate_up_weights = b.w_gate_up.dimensions()[0];
  p.num_down_weights = b.w_down.dimensions()[0];
  p.layout = static_cast<WeightLayout>(attrs.weight_layout);
  p.gated = activation.gated != 0;
  p.gate_up = static_cast<GateUp>(attrs.gate_up);
  p.activation = activation.params();
  p.gemm1 = gemm1.config();
  p.gemm2 = gemm2.config();
  return p;
}

// The operands and the result of finalize.
template <class Weights>
ffi::Error CheckFinalize(const Weights& weights,
                         const ffi::AnyBuffer& residual,
                         const ffi::AnyBuffer& y,
                         MoeMlpParams* p) {
  const ffi::DataType dtype =
      p->dtype == DType::kBFloat16 ? ffi::DataType::BF16 : ffi::DataType::F16;
  JAXMOE_RETURN_IF_ERROR(CheckDtype(kMoeMlp, "weights", weights, {ffi::DataType::F32}));
  JAXMOE_RETURN_IF_ERROR(CheckDtype(kMoeMlp, "residual", residual, {dtype}));
  JAXMOE_RETURN_IF_ERROR(CheckDtype(kMoeMlp, "y", y, {dtype}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kMoeMlp, "weights", weights, {p->num_tokens, p->top_k}));
  JAXMOE_RETURN_IF_ERROR(
      CheckShapeOrAbsent(kMoeMlp, "residual", residual, {p->num_tokens, p->hidden}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kMoeMlp, "y", y, {p->num_tokens, p->hidden}));
  p->weights = static_cast<const float*>(weights.untyped_data());
  p->residual = IsAbsent(residual) ? nullptr : residual.untyped_data();
  p->y = y.untyped_data();
  return ffi::Error::Success();
}

// The map of slots to rows, a result of the layer without finalize.
inline ffi::Error SetSlotToRow(const ffi::AnyBuffer& slot_to_row, MoeMlpParams* p) {
  JAXMOE_RETURN_IF_ERROR(CheckDtype(kMoeMlp, "slot_to_row", slot_to_row, {ffi::DataType::S32}));
  JAXMOE_RETURN_IF_ERROR(
      CheckShape(kMoeMlp, "slot_to_row", slot_to_row, {p->num_tokens, p->top_k}));
  p->slot_to_row = slot_to_row.typed_data<int32_t>();
  return ffi::Error::Success();
}

}  // namespace jaxmoe
