// FFI handler of the fused layer: plan, both GEMMs and finalize, one call.
#include "csrc/ffi/moe_mlp_operands.h"

namespace jaxmoe {
namespace {

// See MoeMlpOperands for the operands that are not described here.
ffi::Error MoeMlp(cudaStream_t stream,
                  In x,
                  In x_scales,
                  In expert_ids,
                  In weights,  // [T,K], absent without finalize
                  In w_gate_up,
                  In gate_up_scales,
                  In w_up,
                  In w_down,
                  In down_scales,
                  In b_gate_up,
                  In b_down,
                  In expert_map,
                  In residual,  // [T,H] or absent
                  In x_scale,
                  In h_scale,
                  Out y,            // [T,H] with finalize
                  Out rows,         // [R,H]
                  Out slot_to_row,  // [T,K] without finalize
                  Out act,
                  Out xq,
                  Out hq,
                  Out floats,
                  Out index,
                  MoeMlpAttrs attrs) {
  Operands take("moe_mlp");
  MoeMlpDims dims;
  const MoeMlpOperands operands{x,
                                x_scales,
                                expert_ids,
                                w_gate_up,
                                gate_up_scales,
                                w_up,
                                w_down,
                                down_scales,
                                b_gate_up,
                                b_down,
                                expert_map,
                                x_scale,
                                h_scale,
                                *act,
                                *xq,
                                *hq,
                                *floats,
                                *index};
  MoeMlpParams p = TakeMoeMlp(operands, attrs, &dims, &take);
  auto& [T, K, H] = dims;
  const Types dtype = Like(*act);
  p.rows = take.Any("rows", *rows, {T * K, H}, dtype);
  if (attrs.finalize != 0) {
    p.weights = take.Floats("weights", weights, {T, K});
    p.residual = take.AnyOrNull("residual", residual, {T, H}, dtype);
    p.y = take.Any("y", *y, {T, H}, dtype);
  } else {
    p.slot_to_row = take.Ints("slot_to_row", *slot_to_row, {T, K});
  }
  if (take.failed()) return take.error();
  return take.Result(LaunchMoeMlp(p, stream));
}

const Registered<MoeMlp> registered("jaxmoe_moe_mlp_v1");

}  // namespace
}  // namespace jaxmoe
