// Memory of each GPU that the others of its host read and write, by the name it was opened under.
//
// Kernels of JAX's programs cannot reach another GPU's arrays, so what is sent lies here. A device
// has a header, two halves, and two halves more for few tokens, whose rows carry their own flags.
// Programs take steps, the same on all devices: in a step each writes what the others need, says
// so, waits until all have, and reads. Step e uses half e % 2: whoever writes to others in step e
// has seen all devices begin step e - 1, so they have finished step e - 2.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace jaxmoe {

inline constexpr int kMaxPeers = 16;
inline constexpr int64_t kPeerHeaderBytes = 8192;
inline constexpr int64_t kPeerAlignment = 256;  // of arrays in a half
inline constexpr int kPeerChunks = 16;          // of a step that has many tokens

struct PeerHeader {
  // In lines of its own, as each is another device's to write.
  struct alignas(128) Flag {
    // By step % 2 and chunk, the last step of which the device has given this one, and the step's
    // tag << 32. A step that is not in chunks has the first flag alone.
    uint64_t came[2][kPeerChunks];
  };
  Flag flags[kMaxPeers];
  uint32_t step;                   // the last one that this device has passed
  uint32_t finished;               // and the last one of which it has read all, or will before the
                                   // step after the next
  uint32_t begun;                  // and begun
  uint32_t arrivals[kPeerChunks];  // CTAs that have written their part of a chunk
  uint32_t departures;             // CTAs that need nothing more of this step
  uint32_t failed;  // 1 + a device that gave up: results are NaN, and kernels send nothing more
  uint32_t told;    // whether `PeerFailure` has been taken by one that says why
};
static_assert(sizeof(PeerHeader) <= kPeerHeaderBytes);

// Why a device gave up, in memory of the host.
struct PeerFailure {
  enum Code : int32_t {
    kNone = 0,
    kTimeout = 1,
    kOtherMesh = 2,
    kGaveUp = 3,
    kOtherStep = 4,
    kAtOnce = 5,
    kTooSmall = 6
  };
  volatile int32_t code;
  int32_t device;  // that was waited for, that gave up, that takes another step
  uint32_t step;
};

// What a kernel knows of the memory. Kernels find it behind an address that is the device's for
// ever: CUDA graphs hold that, and memory may be closed and opened again between two replays.
struct Peers {
  PeerHeader* own;
  char* bases[kMaxPeers];  // of the devices along the axis
  int num_devices;
  int rank;       // this device's place among them
  int32_t place;  // and among all of the mesh, as the program counts: group * num_devices + rank
  int64_t half_bytes;
  int64_t few_bytes;  // of half of the part where rows of few tokens carry their own flags
  uint64_t timeout_ns;
  PeerFailure* failure;
  // Of few_bytes, at their end, for rows in lines (lines.cuh); 0 where links may break these.
  int64_t line_bytes;
};

// A device's memory as another process can open it.
struct PeerAddress {
  int ordinal;  // of the device in this process, -1 if it is another's
  uint64_t address;
  cudaIpcMemHandle_t handle;
  std::string bus;  // where the device is, for `HasNativeAtomics`
};

// Whether a device of this process has native atomics in the memory of others, as over NVLink and
// not over PCIe. `buses`: of these; false if this process cannot see one.
bool HasNativeAtomics(int ordinal, const std::vector<std::string>& buses);

// Allocates and clears the memory of a device of this process; `shared`: with a handle for others.
// This and the next three throw std::runtime_error with CUDA's reason, and leave the current device
// as it was.
PeerAddress AllocatePeerMemory(
    const std::string& name, int ordinal, int64_t half_bytes, int64_t few_bytes, bool shared);

// Opens the memory of all devices along the axis for device `ordinal`, which is one of them.
// `line_bytes`: alike on all of them, see `Peers`.
void ConnectPeers(const std::string& name,
                  int ordinal,
                  int rank,
                  int group,
                  int64_t line_bytes,
                  double timeout_s,
                  const std::vector<PeerAddress>& addresses);

// Closes what other processes have under a name, after the devices of this one have finished.
void DisconnectPeers(const std::string& name);

// Frees what this process has under a name. No other process may have it open.
void FreePeerMemory(const std::string& name);

// Returns when all devices of this process that have memory under a name have come to the same
// execution of a program, or one has not for as long as a step waits, at most ten seconds. A device
// comes as often as it has steps there, and waits at the first. So each has its operands and room
// for its results, or copies and allocations that have them begun, before a kernel of the first
// waits for the last: a copy from one GPU to another that is queued behind such a kernel would keep
// the threads of both from allocating memory and loading kernels, and none would ever come.
void MeetPeersOfProcess(const std::string& name, int ordinal, int64_t execution);

// What an earlier step of a device has come to, if it failed: a sentence without its period.
std::string WhyFailed(const Peers& peers, const std::string& name);

// Of a device, for what copy engines do, and kernels that push, beside other kernels.
struct PeerStreams {
  cudaStream_t from_peers = nullptr;
  cudaStream_t to_peers = nullptr;
  // One for all that is waited for as soon as it is recorded: who waits has seen that one.
  cudaEvent_t met = nullptr;
  cudaEvent_t arrived[kMaxPeers] = {};

  // Lets `later` wait for what `earlier` has been given.
  cudaError_t Wait(cudaStream_t later, cudaStream_t earlier) const;
};

// The memory of a device of this process while a step is launched: nobody else launches one there,
// or closes it.
class PeersInUse {
 public:
  // Finds nothing if nothing is connected under that name.
  PeersInUse(std::string_view name, int ordinal);
  ~PeersInUse();
  PeersInUse(const PeersInUse&) = delete;
  PeersInUse& operator=(const PeersInUse&) = delete;

  // Null if there is none.
  const Peers* get() const { return peers_; }
  // The same in the device's memory, where it stays.
  const Peers* on_device() const;
  // Where there is memory.
  const PeerStreams& streams() const;

 private:
  std::shared_ptr<struct OpenedPeers> opened_;
  const Peers* peers_ = nullptr;
};

}  // namespace jaxmoe
