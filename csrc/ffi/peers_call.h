// The peer memory of a call, and its attributes.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <string_view>

#include "csrc/ffi/checks.h"
#include "csrc/ffi/target.h"
#include "csrc/peers/memory.h"

namespace jaxmoe {

struct PeerAttrs {
  std::string_view memory;
  int64_t num_devices;
  int64_t num_local;
};

// The memory of a GPU of this process.
class PeersOfCall {
 public:
  PeersOfCall(const PeerAttrs& attrs, Stage stage, int32_t device, Operands* take)
      : name_(attrs.memory), in_use_(Met(name_, stage, device), device) {
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
  const PeerStreams& streams() const { return in_use_.streams(); }

 private:
  // Whatever is wrong with the call, the others must not wait for this device.
  static const std::string& Met(const std::string& name, Stage stage, int32_t device) {
    if (!stage.stream) MeetPeersOfProcess(name, device, stage.execution);
    return name;
  }

  const std::string name_;
  const PeersInUse in_use_;
};

}  // namespace jaxmoe

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jaxmoe::PeerAttrs,
                                      ::xla::ffi::StructMember<std::string_view>("memory"),
                                      ::xla::ffi::StructMember<int64_t>("num_devices"),
                                      ::xla::ffi::StructMember<int64_t>("num_local"));
