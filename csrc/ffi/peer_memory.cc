// Opening and closing the memory of peers from Python, where processes find each other.
#include "csrc/ffi/peer_memory.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "csrc/peers/memory.h"

namespace nb = nanobind;

namespace jaxmoe {
namespace {

// NOTE: without the GIL, which a callback of another program may need before a GPU is idle.
template <class Work>
auto WithoutGil(const Work& work) {
  const nb::gil_scoped_release release;
  return work();
}

// Returns (address, handle), which `Connect` of this process and, if `shared`, of others takes, and
// where the device is.
nb::tuple Allocate(
    const std::string& name, int ordinal, int64_t half_bytes, int64_t few_bytes, bool shared) {
  const PeerAddress address =
      WithoutGil([&] { return AllocatePeerMemory(name, ordinal, half_bytes, few_bytes, shared); });
  return nb::make_tuple(
      address.address,
      nb::bytes(reinterpret_cast<const char*>(&address.handle), sizeof(address.handle)),
      address.bus);
}

// `devices`: (ordinal or -1 of another process, address, handle) of each along the axis.
void Connect(const std::string& name,
             int ordinal,
             int rank,
             int group,
             int64_t line_bytes,
             double timeout_s,
             const nb::list& devices) {
  const size_t count = nb::len(devices);
  if (count < 1 || count > kMaxPeers || rank < 0 || rank >= static_cast<int>(count)) {
    throw std::runtime_error(std::to_string(count) + " devices, rank " + std::to_string(rank));
  }
  std::vector<PeerAddress> addresses;
  for (const nb::handle device : devices) {
    PeerAddress address{};
    address.ordinal = nb::cast<int>(device[0]);
    address.address = nb::cast<uint64_t>(device[1]);
    const nb::bytes handle = nb::cast<nb::bytes>(device[2]);
    if (handle.size() != sizeof(address.handle)) throw std::runtime_error("size of a handle");
    std::memcpy(&address.handle, handle.c_str(), sizeof(address.handle));
    addresses.push_back(address);
  }
  WithoutGil([&] { ConnectPeers(name, ordinal, rank, group, line_bytes, timeout_s, addresses); });
}

}  // namespace

void AddPeerMemory(nb::module_& m) {
  m.def("peer_allocate", &Allocate);
  m.def("peer_connect", &Connect);
  m.def("peer_has_native_atomics", &HasNativeAtomics, nb::call_guard<nb::gil_scoped_release>());
  m.def("peer_disconnect", &DisconnectPeers, nb::call_guard<nb::gil_scoped_release>());
  m.def("peer_free", &FreePeerMemory, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace jaxmoe
