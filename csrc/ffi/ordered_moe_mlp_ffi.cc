// FFI handler of the fused layer with its exchange: tokens come in the order of experts while the
// gate-up product runs, and the down product stores rows in the memory of their tokens' devices,
// which finalize.
#include <algorithm>

#include "csrc/ffi/moe_mlp_operands.h"
#include "csrc/ffi/of_all.h"
#include "csrc/ffi/peer_moe_mlp_attrs.h"
#include "csrc/gemm/ordered.h"

namespace jaxmoe {
namespace {

// T tokens of each of n devices; those of MoeMlpOperands are the n T of all, R = n T K.
ffi::Error OrderedMoeMlp(Stage stage,
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
                         Out y,        // [T,H]
                         Out all_ids,  // [n T,K]; from here on scratch
                         Out devices,  // [T,2], see PeerOrdered
                         Out words,    // [kMaxExpertParts + experts]
                         Out targets,  // [R,2], see PeerRows
                         Out rows,     // [MovedRows,H]
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
  Dim T, K, H;
  const Types dtype = Like(*act);
  PeerOrdered exchange{};
  exchange.peers = memory.on_device();
  exchange.place = take.Ints("place", place, {});
  exchange.slots = take.Ints("slots", slots, {T, K});
  exchange.arrays[exchange.num_arrays++].own =
      static_cast<const char*>(take.Any("x", x, {T, H}, Like(x)));
  if (take.failed()) return take.error();
  if (T == 0 || H == 0) return ffi::Error::Success();
  exchange.arrays[0].row_bytes = static_cast<int64_t>(x.size_bytes()) / T;
  if (x_scales.element_count() > 0) {
    take.Type("x_scales", x_scales, ffi::DataType::F32);
    const auto dims = x_scales.dimensions();
    const int64_t rows = dims.size() > 0 ? dims[0] : 0;
    take.Range("x_scales.shape[0]", rows, T, T);
    if (take.failed()) return take.error();
    OrderedArray& scales = exchange.arrays[exchange.num_arrays++];
    scales.own = static_cast<const char*>(x_scales.untyped_data());
    scales.row_bytes = static_cast<int64_t>(x_scales.size_bytes()) / T;
  }
  exchange.size = {T, K, attrs.peers.num_local, peers.num_devices};
  exchange.parts = PartsOfExperts(attrs.peers.num_local);
  if (take.failed()) return take.error();

  OfAll all_x(x, n, OrderedRows(exchange, peers, 0));
  OfAll all_scales(
      x_scales, n, exchange.num_arrays > 1 ? OrderedRows(exchange, peers, 1) : nullptr);
  const In no_map = x_scale;  // as absent as this one must be
  if (!Operands::IsAbsent(x_scale)) take.Refuse("x_scale must be absent: tokens are as they are.");
  const MoeMlpOperands operands{all_x.in(),
                                exchange.num_arrays > 1 ? all_scales.in() : x_scales,
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
  MoeMlpDims dims;
  MoeMlpParams layer = TakeMoeMlp(operands, attrs.layer, &dims, &take);
  if (take.failed()) return take.error();
  exchange.all_ids = take.Ints("all_ids", *all_ids, {dims.T, K});
  exchange.devices = reinterpret_cast<uint16_t*>(take.Ints("devices", *devices, {T, 2}));
  const int64_t ints = kMaxExpertParts + attrs.peers.num_local;
  exchange.pushed = reinterpret_cast<uint32_t*>(take.Ints("words", *words, {ints}));
  exchange.came = exchange.pushed + kMaxExpertParts;
  exchange.unit = UnitOfParts(exchange.parts);
  PeerRows home;
  home.peers = exchange.peers;
  home.place = exchange.place;
  home.slots = exchange.slots;
  home.weights = take.Floats("weights", weights, {T, K});
  home.residual = take.AnyOrNull("residual", residual, {T, H}, dtype);
  home.y = take.Any("y", *y, {T, H}, dtype);
  const int64_t num_rows = dims.T * dims.K;
  home.targets =
      static_cast<uint64_t*>(take.Any("targets", *targets, {num_rows, 2}, ffi::DataType::S32));
  layer.rows = take.Any("rows", *rows, {MovedRows(layer), H}, dtype);
  take.Range(
      "num_local_experts", layer.num_local_experts, attrs.peers.num_local, attrs.peers.num_local);
  take.Range("expert_offset", layer.expert_offset, 0, 0);
  if (take.failed()) return take.error();
  home.size = exchange.size;
  home.dtype = layer.dtype;
  home.hidden = H;
  home.size.bytes = PeerRowsBytes(home.size, H * ElementSize(layer.dtype));
  memory.Fits(std::max(home.size.bytes, PeerOrderedBytes(exchange)), &take);
  if (take.failed()) return take.error();
  if (!stage.stream) return ffi::Error::Success();
  layer.peers = &home;
  return take.Result(LaunchOrderedMoeMlp(exchange, memory.streams(), layer, *stage.stream));
}

// Not in CUDA graphs, which would hold where this device's part of the memory is.
const Registered<Checked<OrderedMoeMlp>::Execute, false> registered(
    "jaxmoe_peer_ordered_moe_mlp_v1", &Checked<OrderedMoeMlp>::HandleCheck);

}  // namespace
}  // namespace jaxmoe
