// FFI handler of the fused layer whose weights have adapters of low rank, with finalize.
#include <algorithm>

#include "csrc/ffi/moe_mlp_operands.h"

namespace jaxmoe {

struct AdaptedMoeMlpAttrs {
  MoeMlpAttrs layer;
  float scale;
};

}  // namespace jaxmoe

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jaxmoe::AdaptedMoeMlpAttrs,
                                      ::xla::ffi::StructMember<::jaxmoe::MoeMlpAttrs>("layer"),
                                      ::xla::ffi::StructMember<float>("scale"));

namespace jaxmoe {
namespace {

// See MoeMlpOperands for the operands that are not described here, and MlpAdapters.
ffi::Error AdaptedMoeMlp(cudaStream_t stream,
                         In x,
                         In x_scales,
                         In expert_ids,
                         In weights,  // [T,K]
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
                         In gate_up_a,  // [E_l,H,r1]
                         In gate_up_b,  // [E_l,r1,N]
                         In down_a,     // [E_l,I,r2]
                         In down_b,     // [E_l,r2,H]
                         Out y,         // [T,H]
                         Out rows,      // [R,H]
                         Out low,       // [R,max(r1,r2)]
                         Out act,
                         Out xq,
                         Out hq,
                         Out floats,
                         Out index,
                         AdaptedMoeMlpAttrs attrs) {
  Operands take("lora.moe_mlp");
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
  MoeMlpParams p = TakeMoeMlp(operands, attrs.layer, &dims, &take);
  if (take.failed()) return take.error();
  auto& [T, K, H] = dims;
  const Types dtype = Like(*act);
  p.rows = take.Any("rows", *rows, {T * K, H}, dtype);
  p.weights = take.Floats("weights", weights, {T, K});
  p.residual = take.AnyOrNull("residual", residual, {T, H}, dtype);
  p.y = take.Any("y", *y, {T, H}, dtype);
  const int64_t I = p.intermediate, N = p.gated ? 2 * I : I, E = p.num_local_experts;
  Dim r1, r2;
  MlpAdapters adapters;
  adapters.gate_up_a = take.Any("gate_up_a", gate_up_a, {E, H, r1}, dtype);
  adapters.gate_up_b = take.Any("gate_up_b", gate_up_b, {E, r1, N}, dtype);
  adapters.down_a = take.Any("down_a", down_a, {E, I, r2}, dtype);
  adapters.down_b = take.Any("down_b", down_b, {E, r2, H}, dtype);
  if (take.failed()) return take.error();
  // The kernel adds what belongs to a weight, not to a group.
  take.Range("w_gate_up.shape[0]", p.gate_up.count, E, E);
  take.Range("w_down.shape[0]", p.down.count, E, E);
  take.Range("gate_up_a.shape[2]", r1, 8, kMaxColumns);
  take.Range("down_a.shape[2]", r2, 8, kMaxColumns);
  take.Range("gate_up_a.shape[2] modulo 8", r1 % 8, 0, 0);
  take.Range("down_a.shape[2] modulo 8", r2 % 8, 0, 0);
  adapters.low = take.Any("low", *low, {T * K, std::max<int64_t>(r1, r2)}, dtype);
  if (take.failed()) return take.error();
  adapters.gate_up_rank = r1;
  adapters.down_rank = r2;
  adapters.scale = attrs.scale;
  p.adapters = &adapters;
  return take.Result(LaunchMoeMlp(p, stream));
}

const Registered<AdaptedMoeMlp> registered("jaxmoe_adapted_moe_mlp_v1");

}  // namespace
}  // namespace jaxmoe
