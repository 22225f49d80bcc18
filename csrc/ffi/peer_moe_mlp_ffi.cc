// FFI handler of the fused layer between dispatch and results: the down product stores rows in the
// memory of their tokens' devices, which finalize. All of it is one call, as no other step of the
// memory may come between.
#include <optional>

#include "csrc/ffi/moe_mlp_operands.h"
#include "csrc/ffi/peer_moe_mlp_attrs.h"
#include "csrc/peers/rows.h"

namespace jaxmoe {
namespace {

// T tokens of this device; those of MoeMlpOperands are the n T of all devices, R = n T K.
ffi::Error PeerMoeMlp(Stage stage,
                      int32_t device,
                      In place,     // [], see PeerDispatchParams
                      In slots,     // [T,K], of this device's tokens
                      In weights,   // [T,K], of these
                      In residual,  // [T,H] or absent
                      In x,
                      In x_scales,
                      In expert_ids,
                      In w_gate_up,
                      In gate_up_scales,
                      In w_up,
                      In w_down,
                      In down_scales,
                      In b_gate_up,
                      In b_down,
                      In expert_map,
                      In x_scale,
                      In h_scale,
                      Out y,        // [T,H]
                      Out targets,  // [R,2], see PeerRows
                      Out rows,     // [MovedRows,H]
                      Out act,
                      Out xq,
                      Out hq,
                      Out floats,
                      Out index,
                      PeerMoeMlpAttrs attrs) {
  Operands take("expert_parallel.moe_mlp");
  const PeersOfCall peers(attrs.peers, stage, device, &take);
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
  auto& [all_tokens, K, H] = dims;
  Dim T;
  const Types dtype = Like(*act);
  PeerRows own;
  own.peers = peers.on_device();
  own.place = take.Ints("place", place, {});
  own.slots = take.Ints("slots", slots, {T, K});
  own.weights = take.Floats("weights", weights, {T, K});
  own.residual = take.AnyOrNull("residual", residual, {T, H}, dtype);
  own.y = take.Any("y", *y, {T, H}, dtype);
  const int64_t num_rows = all_tokens * K;
  own.targets =
      static_cast<uint64_t*>(take.Any("targets", *targets, {num_rows, 2}, ffi::DataType::S32));
  p.rows = take.Any("rows", *rows, {MovedRows(p), H}, dtype);
  if (take.failed()) return take.error();
  const int64_t sent = attrs.peers.num_devices * T;
  take.Range("x.shape[0]", all_tokens, sent, sent);
  take.Range("num_local", attrs.peers.num_local, p.num_local_experts, p.num_local_experts);
  own.size = {T, K, attrs.peers.num_local, peers.known().num_devices};
  own.dtype = p.dtype;
  own.hidden = H;
  own.size.bytes = PeerRowsBytes(own.size, H * ElementSize(p.dtype));
  peers.Fits(own.size.bytes, &take);
  if (take.failed()) return take.error();
  if (!stage.stream) return ffi::Error::Success();
  p.peers = &own;
  return take.Result(LaunchMoeMlp(p, *stage.stream));
}

const Registered<Checked<PeerMoeMlp>::Execute> registered("jaxmoe_peer_moe_mlp_v1",
                                                          &Checked<PeerMoeMlp>::HandleCheck);

}  // namespace
}  // namespace jaxmoe
