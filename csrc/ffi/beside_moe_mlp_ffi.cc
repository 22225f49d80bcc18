// FFI handler of the fused layer with its exchange: the gate-up product begins with this device's
// tokens while those of others come, and sums of a device's tokens go home while the down product
// of the next is computed.
#include "csrc/ffi/moe_mlp_operands.h"
#include "csrc/ffi/peer_moe_mlp_attrs.h"
#include "csrc/gemm/beside.h"

namespace jaxmoe {
namespace {

// T tokens of each of n devices; those of MoeMlpOperands are the n T of all, and its local experts
// n times those of a device, see MlpSources.
ffi::Error BesideMoeMlp(Stage stage,
                        int32_t device,
                        In place,     // [], see PeerDispatchParams
                        In slots,     // [T,K]
                        In weights,   // [T,K]
                        In residual,  // [T,H] or absent
                        In x,         // [T,H]
                        In x_scales,  // of x, [T,...], or absent
                        In w_gate_up,
                        In gate_up_scales,
                        In w_up,
                        In w_down,
                        In down_scales,
                        In b_gate_up,
                        In b_down,
                        In x_scale,
                        In h_scale,
                        Out y,            // [T,H]
                        Out sums,         // [n T,H]; from here on scratch
                        Out all_ids,      // [n T,K]
                        Out all_weights,  // [n T,K]
                        Out all_x,        // [n T,H]
                        Out all_scales,   // as x_scales, of n T
                        Out words,        // [3 n], then SourceGroupInts
                        Out rows,         // [n T K,H]
                        Out act,
                        Out xq,
                        Out hq,
                        Out floats,
                        Out index,
                        PeerMoeMlpAttrs attrs) {
  Operands take("expert_parallel.moe_mlp");
  const PeersOfCall memory(attrs.peers, stage, device, &take);
  if (take.failed()) return take.error();
  const Peers& peers = memory.known();
  const int64_t n = attrs.peers.num_devices;
  MoeMlpDims dims;
  const In no_map = x_scale;  // as absent as this one must be
  const MoeMlpOperands operands{*all_x,
                                *all_scales,
                                *all_ids,
                                w_gate_up,
                                gate_up_scales,
                                w_up,
                                w_down,
                                down_scales,
                                b_gate_up,
                                b_down,
                                no_map,
                                x_scale,
                                h_scale,
                                *act,
                                *xq,
                                *hq,
                                *floats,
                                *index};
  if (!Operands::IsAbsent(x_scale)) take.Refuse("x_scale must be absent: tokens are as they are.");
  MoeMlpParams layer = TakeMoeMlp(operands, attrs.layer, &dims, &take);
  if (take.failed()) return take.error();
  auto& [all_tokens, K, H] = dims;
  Dim T;
  const Types dtype = Like(*act);
  PeerBeside exchange{};
  exchange.peers = memory.on_device();
  exchange.place = take.Ints("place", place, {});
  exchange.slots = take.Ints("slots", slots, {T, K});
  exchange.weights = take.Floats("weights", weights, {T, K});
  exchange.all_ids = take.Ints("all_ids", *all_ids, {all_tokens, K});
  exchange.all_weights = take.Floats("all_weights", *all_weights, {all_tokens, K});
  const int64_t ints = SourceGroupInts(n, attrs.peers.num_local);
  exchange.came = reinterpret_cast<uint32_t*>(take.Ints("words", *words, {3 * n + ints}));
  exchange.counters = reinterpret_cast<int32_t*>(exchange.came) + n;
  exchange.sum.slots = exchange.slots;
  exchange.sum.residual = take.AnyOrNull("residual", residual, {T, H}, dtype);
  exchange.sum.y = take.Any("y", *y, {T, H}, dtype);
  exchange.sum.own = layer.y = take.Any("sums", *sums, {all_tokens, H}, dtype);
  exchange.sum.dtype = layer.dtype;
  exchange.sum.hidden = H;
  layer.weights = exchange.all_weights;
  layer.rows = take.Any("rows", *rows, {all_tokens * K, H}, dtype);
  take.Any("x", x, {T, H}, Like(*all_x));
  if (take.failed()) return take.error();
  take.Range("all_x.shape[0]", all_tokens, n * T, n * T);
  const int64_t groups = n * attrs.peers.num_local;
  take.Range("num_local_experts", layer.num_local_experts, groups, groups);
  take.Range("expert_offset", layer.expert_offset, 0, 0);
  const int64_t scales = static_cast<int64_t>(x_scales.element_count());
  const int64_t all = static_cast<int64_t>(all_scales->element_count());
  take.Range("elements of all_scales", all, n * scales, n * scales);
  take.Type("x_scales", x_scales, ffi::DataType::F32);
  if (take.failed() || T == 0) return take.error();
  const auto add = [&](const In& own, const In& of_all) {
    exchange.arrays[exchange.num_arrays++] = {static_cast<const char*>(own.untyped_data()),
                                              static_cast<char*>(of_all.untyped_data()),
                                              static_cast<int64_t>(own.size_bytes()) / T};
  };
  if (scales > 0) add(x_scales, *all_scales);
  add(x, *all_x);
  exchange.size = {T, K, attrs.peers.num_local, peers.num_devices};
  memory.Fits(PeerBesideBytes(exchange), &take);
  if (take.failed()) return take.error();
  if (!stage.stream) return ffi::Error::Success();
  return take.Result(LaunchBesideMoeMlp(exchange, peers, memory.streams(), layer, *stage.stream));
}

// Not in CUDA graphs, which would hold where the memory of other devices is.
const Registered<Checked<BesideMoeMlp>::Execute, false> registered(
    "jaxmoe_peer_beside_moe_mlp_v1", &Checked<BesideMoeMlp>::HandleCheck);

}  // namespace
}  // namespace jaxmoe
