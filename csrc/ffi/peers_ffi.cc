// FFI handlers jaxmoe_peer_dispatch_v1 and jaxmoe_peer_combine_v1: tokens to the devices of their
// experts and sums back, through memory that was opened under the name `memory`.
#include <cuda_runtime_api.h>

#include <optional>
#include <string>
#include <string_view>

#include "csrc/ffi/checks.h"
#include "csrc/peers/exchange.h"

namespace jaxmoe {

struct PeerAttrs {
  std::string_view memory;
  int64_t num_devices;
  int64_t num_local;
};

}  // namespace jaxmoe

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jaxmoe::PeerAttrs,
                                      ::xla::ffi::StructMember<std::string_view>("memory"),
                                      ::xla::ffi::StructMember<int64_t>("num_devices"),
                                      ::xla::ffi::StructMember<int64_t>("num_local"));

namespace jaxmoe {
namespace {

// Of quantized tokens: as they are, or words of several.
constexpr Types kQuantized{ffi::DataType::F8E4M3FN, ffi::DataType::U8, ffi::DataType::U32};

// The current device's memory.
class PeersOfCall {
 public:
  PeersOfCall(const PeerAttrs& attrs, int32_t device, Operands* take)
      : name_(attrs.memory), in_use_(name_, device) {
    if (in_use_.get() == nullptr) {
      take->Refuse("no peer memory '" + name_ + "' is open on GPU " + std::to_string(device) + ".");
      return;
    }
    const Peers& peers = *in_use_.get();
    if (const std::string why = WhyFailed(peers, name_); !why.empty()) take->Refuse(why + ".");
    take->Range("devices of the memory", peers.num_devices, attrs.num_devices, attrs.num_devices);
    take->Range("num_local", attrs.num_local, 1, kMaxInt);
  }

  // Refuses sizes that take more of a half than there is.
  void Fits(int64_t needed, Operands* take) const {
    if (in_use_.get() == nullptr || take->failed()) return;
    take->Range("bytes in half of the peer memory", needed, 0, in_use_.get()->half_bytes);
  }

  // Where there is memory.
  const Peers& known() const { return *in_use_.get(); }
  const Peers* on_device() const { return in_use_.on_device(); }

 private:
  const std::string name_;
  const PeersInUse in_use_;
};

ffi::Error PeerDispatch(std::optional<cudaStream_t> stream,
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
  const PeersOfCall peers(attrs, device, &take);
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
  if (!stream) return ffi::Error::Success();
  return take.Result(LaunchPeerDispatch(params, peers.known(), *stream));
}

ffi::Error PeerCombine(std::optional<cudaStream_t> stream,
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
  const PeersOfCall peers(attrs, device, &take);
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
  if (!stream) return ffi::Error::Success();
  return take.Result(LaunchPeerCombine(params, peers.known(), *stream));
}

// A CUDA graph does not run the handler; what is wrong with the memory is seen before it.
const Registered<Checked<PeerDispatch>::Execute> dispatch("jaxmoe_peer_dispatch_v1",
                                                          &Checked<PeerDispatch>::HandleCheck);
const Registered<Checked<PeerCombine>::Execute> combine("jaxmoe_peer_combine_v1",
                                                        &Checked<PeerCombine>::HandleCheck);

}  // namespace
}  // namespace jaxmoe
