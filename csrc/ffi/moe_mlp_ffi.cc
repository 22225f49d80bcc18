// FFI handler of the fused layer: plan, gate-up GEMM, down GEMM, finalize, one call.
#include "csrc/ffi/checks.h"
#include "csrc/ffi/counters.h"
#include "csrc/ffi/gemm_attrs.h"
#include "csrc/moe_gemm/moe_mlp.h"

namespace jaxmoe {
namespace {

constexpr char kOp[] = "moe_mlp";

struct MlpAttrs {
  int64_t num_experts;
  int64_t num_local_experts;
  int64_t expert_offset;
  int64_t gate_up;
  int64_t weight_layout;
};

struct MlpBuffers {
  ffi::AnyBuffer x;                             // [T,H]
  ffi::AnyBuffer expert_ids;           // [T,K]
  ffi::AnyBuffer weights;              // [T,K]
  ffi::AnyBuffer w_gate_up, w_down;             // [E1,...], [E2,...]
  ffi::AnyBuffer b_gate_up, b_down;             // [E1,N1] and [E2,H], or absent
  ffi::AnyBuffer expert_map;           // [E] or absent
  ffi::AnyBuffer residual;                      // [T,H] or absent
  ffi::AnyBuffer y, rows, act;                  // [T,H], [R,H], [R,I]
  ffi::AnyBuffer index;                // [IndexLayout::size]
};

ffi::Error CheckBuffers(const MlpBuffers& b, const MlpAttrs& attrs, const ActivationAttrs& act) {
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "x", b.x, 2));
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "expert_ids", b.expert_ids, 2));
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "act", b.act, 2));
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "w_gate_up", b.w_gate_up, 3));
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "w_down", b.w_down, 3));
  const int64_t tokens = b.x.dimensions()[0];
  const int64_t hidden = b.x.dimensions()[1];
  const int64_t top_k = b.expert_ids.dimensions()[1];
  const int64_t rows = tokens * top_k;
  const int64_t intermediate = b.act.dimensions()[1];
  const int64_t n1 = act.gated ? 2 * intermediate : intermediate;
  const int64_t e1 = b.w_gate_up.dimensions()[0];
  const int64_t e2 = b.w_down.dimensions()[0];
  const bool kn = attrs.weight_layout == static_cast<int64_t>(WeightLayout::kKN);
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "weight_layout", attrs.weight_layout, 0, 1));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "gate_up", attrs.gate_up, 0, 2));
  JAXMOE_RETURN_IF_ERROR(CheckDtype(kOp, "x", b.x, {ffi::DataType::BF16, ffi::DataType::F16}));
  for (const ffi::AnyBuffer& other :
       {b.w_gate_up, b.w_down, b.b_gate_up, b.b_down, b.residual, b.y, b.rows, b.act}) {
    JAXMOE_RETURN_IF_ERROR(CheckDtype(kOp, "operand", other, {b.x.element_type()}));
  }
  for (const ffi::AnyBuffer& integers : {b.expert_ids, b.expert_map, b.index}) {
    JAXMOE_RETURN_IF_ERROR(CheckDtype(kOp, "index operand", integers, {ffi::DataType::S32}));
  }
  JAXMOE_RETURN_IF_ERROR(CheckDtype(kOp, "weights", b.weights, {ffi::DataType::F32}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "expert_ids", b.expert_ids, {tokens, top_k}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "weights", b.weights, {tokens, top_k}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(
      kOp, "w_gate_up", b.w_gate_up, {e1, kn ? hidden : n1, kn ? n1 : hidden}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(
      kOp, "w_down", b.w_down, {e2, kn ? intermediate : hidden, kn ? hidden : intermediate}));
  JAXMOE_RETURN_IF_ERROR(CheckShapeOrAbsent(kOp, "b_gate_up", b.b_gate_up, {e1, n1}));
  JAXMOE_RETURN_IF_ERROR(CheckShapeOrAbsent(kOp, "b_down", b.b_down, {e2, hidden}));
  JAXMOE_RETURN_IF_ERROR(
      CheckShapeOrAbsent(kOp, "expert_map", b.expert_map, {attrs.num_experts}));
  JAXMOE_RETURN_IF_ERROR(CheckShapeOrAbsent(kOp, "residual", b.residual, {tokens, hidden}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "y", b.y, {tokens, hidden}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "rows", b.rows, {rows, hidden}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "act", b.act, {rows, intermediate}));
  constexpr int64_t kMaxInt = (int64_t{1} << 31) - 1;
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "T*K", rows, 0, kMaxInt));
  JAXMOE_RETURN_IF_ERROR(
      CheckRange(kOp, "num_local_experts", attrs.num_local_experts, 1, kMaxInt));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "w_gate_up.shape[0]", e1, 1, kMaxInt));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "w_down.shape[0]", e2, 1, kMaxInt));
  return CheckShape(kOp, "index", b.index, {MlpIndex(rows, attrs.num_local_experts).size});
}

ffi::Error MoeMlp(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer expert_ids,
                  ffi::AnyBuffer weights, ffi::AnyBuffer w_gate_up,
                  ffi::AnyBuffer w_down, ffi::AnyBuffer b_gate_up, ffi::AnyBuffer b_down,
                  ffi::AnyBuffer expert_map, ffi::AnyBuffer residual,
                  ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> rows,
                  ffi::Result<ffi::AnyBuffer> act, ffi::Result<ffi::AnyBuffer> index,
                  int64_t num_experts, int64_t num_local_experts, int64_t expert_offset,
                  int64_t gate_up, int64_t weight_layout, ActivationAttrs activation,
                  TileAttrs gemm1, TileAttrs gemm2) {
  CountExecution(Target::kMoeMlp);
  const MlpBuffers b{x,      expert_ids, weights,    w_gate_up, w_down, b_gate_up, b_down,
                     expert_map, residual, *y, *rows, *act, *index};
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
  if (const char* error = LaunchMoeMlp(p, stream)) return InvalidArgument(kOp, error);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxmoe

XLA_FFI_DEFINE_HANDLER_SYMBOL(MoeMlpFfi,
                              jaxmoe::MoeMlp,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()                // x
                                  .Arg<xla::ffi::AnyBuffer>()  // expert_ids
                                  .Arg<xla::ffi::AnyBuffer>()  // weights
                                  .Arg<xla::ffi::AnyBuffer>()                // w_gate_up
                                  .Arg<xla::ffi::AnyBuffer>()                // w_down
                                  .Arg<xla::ffi::AnyBuffer>()                // b_gate_up
                                  .Arg<xla::ffi::AnyBuffer>()                // b_down
                                  .Arg<xla::ffi::AnyBuffer>()  // expert_map
                                  .Arg<xla::ffi::AnyBuffer>()                // residual
                                  .Ret<xla::ffi::AnyBuffer>()                // y
                                  .Ret<xla::ffi::AnyBuffer>()                // rows
                                  .Ret<xla::ffi::AnyBuffer>()                // act
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
