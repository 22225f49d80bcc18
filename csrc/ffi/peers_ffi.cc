// FFI handlers jaxmoe_peer_dispatch_v1 and jaxmoe_peer_combine_v1: tokens to the devices of their
// experts and sums back, through memory that was opened under the name `memory`.
#include <optional>

#include "csrc/ffi/peers_call.h"
#include "csrc/peers/exchange.h"

namespace jaxmoe {
namespace {

// Of quantized tokens: as they are, or words of several.
constexpr Types kQuantized{ffi::DataType::F8E4M3FN, ffi::DataType::U8, ffi::DataType::U32};

ffi::Error PeerDispatch(Stage stage,
                        int32_t device,
                        In place,
                        In slots,
                        In tokens,
                        In small,
                        Out all_slots,
                        Out all_tokens,
                        Out all_small,
                        PeerAttrs attrs) {
  Operands take("expert_parallel.moe_mlp");
  Dim T, K, H, S;
  PeerDispatchParams params{};
  const PeersOfCall peers(attrs, stage, device, &take);
  params.peers = peers.on_device();
  const int64_t n = attrs.num_devices;
  params.place = take.Ints("place", place, {});
  params.slots = take.Ints("slots", slots, {T, K});
  const bool numbers = kFloats.Has(tokens.element_type());
  params.tokens = take.Any("tokens", tokens, {T, H}, numbers ? kFloats : kQuantized);
  params.small = take.FloatsOrNull("small", small, {T, S});
  params.small_floats = params.small == nullptr ? 0 : static_cast<int64_t>(S);
  params.all_slots = take.Ints("all_slots", *all_slots, {n * T, K});
  params.all_tokens = take.Any("all_tokens", *all_tokens, {n * T, H}, Like(tokens));
  if (params.small != nullptr) params.all_small = take.Floats("all_small", *all_small, {n * T, S});
  if (take.failed()) return take.error();
  params.size = {T, K, attrs.num_local, peers.known().num_devices};
  const bool words = tokens.element_type() == ffi::DataType::U32;
  params.token_bytes = H * (numbers ? ElementSize(TypeOf(tokens)) : words ? 4 : 1);
  if (params.token_bytes % 2 != 0) take.Refuse("tokens must have an even number of bytes.");
  peers.Fits(PeerDispatchBytes(params.size, params.token_bytes, params.small_floats), &take);
  if (take.failed()) return take.error();
  if (!stage.stream) return ffi::Error::Success();
  return take.Result(LaunchPeerDispatch(params, peers.known(), *stage.stream));
}

ffi::Error PeerCombine(Stage stage,
                       int32_t device,
                       In place,
                       In slots,
                       In all_slots,
                       In rows,
                       In residual,
                       In small,
                       Out y,
                       Out small_sum,
                       PeerAttrs attrs) {
  Operands take("expert_parallel.moe_mlp");
  Dim T, K, H, S;
  PeerCombineParams params{};
  const PeersOfCall peers(attrs, stage, device, &take);
  params.peers = peers.on_device();
  const int64_t n = attrs.num_devices;
  params.place = take.Ints("place", place, {});
  params.slots = take.Ints("slots", slots, {T, K});
  params.all_slots = take.Ints("all_slots", all_slots, {n * T, K});
  params.rows = take.Any("rows", rows, {n * T, H}, kFloats);
  params.residual = take.AnyOrNull("residual", residual, {T, H}, Like(rows));
  params.small = take.FloatsOrNull("small", small, {n * T, S});
  params.small_floats = params.small == nullptr ? 0 : static_cast<int64_t>(S);
  params.y = take.Any("y", *y, {T, H}, Like(rows));
  if (params.small != nullptr) params.small_sum = take.Floats("small_sum", *small_sum, {T, S});
  if (take.failed()) return take.error();
  params.size = {T, K, attrs.num_local, peers.known().num_devices};
  params.dtype = TypeOf(rows);
  params.hidden = H;
  const int64_t row_bytes = H * ElementSize(params.dtype);
  peers.Fits(PeerCombineBytes(params.size, row_bytes, params.small_floats), &take);
  if (take.failed()) return take.error();
  if (!stage.stream) return ffi::Error::Success();
  return take.Result(LaunchPeerCombine(params, peers.known(), *stage.stream));
}

// A CUDA graph does not run the handler; what is wrong with the memory is seen before it.
const Registered<Checked<PeerDispatch>::Execute> dispatch("jaxmoe_peer_dispatch_v1",
                                                          &Checked<PeerDispatch>::HandleCheck);
const Registered<Checked<PeerCombine>::Execute> combine("jaxmoe_peer_combine_v1",
                                                        &Checked<PeerCombine>::HandleCheck);

}  // namespace
}  // namespace jaxmoe
