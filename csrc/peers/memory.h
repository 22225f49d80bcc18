// Memory of each GPU that the others of its host read and write, by the name it was opened under.
//
// Kernels of JAX's programs cannot reach another GPU's arrays, so what is sent lies here. A device
// has a header and two halves. Programs take steps, the same on all devices: in a step each writes
// what the others need, says so, waits until all have, and reads. Step e uses half e % 2: whoever
// writes in step e has seen all devices begin step e - 1, so they have finished step e - 2.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace jaxmoe {

inline constexpr int kMaxPeers = 16;
inline constexpr int64_t kPeerHeaderBytes = 4096;
inline constexpr int64_t kPeerAlignment = 256;  // of arrays in a half

struct PeerHeader {
  // In a line of its own, as each is another device's to write.
  struct alignas(128) Flag {
    uint32_t step;  // the last one that the device has come to
  };
  Flag flags[kMaxPeers];
  uint32_t step;      // the last one that this device has passed
  uint32_t arrivals;  // CTAs that have written what this step gives others
  uint32_t failed;    // not 0: nothing is waited for, and results are NaN
};
static_assert(sizeof(PeerHeader) <= kPeerHeaderBytes);

// Why a device gave up, in memory of the host.
struct PeerFailure {
  enum Code : int32_t { kNone = 0, kTimeout = 1, kOtherOrder = 2 };
  volatile int32_t code;
  int32_t waited_for;  // a device along the axis
  uint32_t step;
};

// What a kernel knows of the memory.
struct Peers {
  char* bases[kMaxPeers];  // of the devices along the axis
  int num_devices;
  int rank;  // this device's place among them
  int64_t half_bytes;
  uint64_t timeout_ns;
  PeerFailure* failure;
};

// A device's memory as another process can open it.
struct PeerAddress {
  int ordinal;  // of the device in this process, -1 if it is another's
  uint64_t address;
  cudaIpcMemHandle_t handle;
};

// Allocates and clears the memory of a device of this process. This and the next three throw
// std::runtime_error with CUDA's reason, and leave the current device as it was.
PeerAddress AllocatePeerMemory(const std::string& name, int ordinal, int64_t half_bytes);

// Opens the memory of all devices along the axis for device `ordinal`, which is one of them.
void ConnectPeers(const std::string& name,
                  int ordinal,
                  int rank,
                  double timeout_s,
                  const std::vector<PeerAddress>& addresses);

// Closes what other processes have under a name, after the devices of this one have finished.
void DisconnectPeers(const std::string& name);

// Frees what this process has under a name. No other process may have it open.
void FreePeerMemory(const std::string& name);

// Looks up the memory of a device of this process. Returns whether it is connected.
bool FindPeers(std::string_view name, int ordinal, Peers* peers);

}  // namespace jaxmoe
