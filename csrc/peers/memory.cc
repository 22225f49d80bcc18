// Allocates the memory of peers, opens that of other devices and processes, and remembers it.
#include "csrc/peers/memory.h"

#include <map>
#include <mutex>
#include <new>
#include <stdexcept>
#include <utility>

#include "csrc/peers/exchange.h"

namespace jaxmoe {
namespace {

struct Opened {
  void* own = nullptr;
  Peers peers{};
  std::vector<void*> foreign;  // memory of other processes
  bool connected = false;
};

std::mutex mutex;
std::map<std::string, std::map<int, Opened>, std::less<>> opened;

void Check(cudaError_t status, const std::string& what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // reported here, so not left for others
  throw std::runtime_error(what + ": " + cudaGetErrorString(status));
}

// Makes a device current until the end of the block.
class WithDevice {
 public:
  explicit WithDevice(int ordinal) {
    Check(cudaGetDevice(&before_), "no current GPU");
    Check(cudaSetDevice(ordinal), "GPU " + std::to_string(ordinal));
  }
  ~WithDevice() { (void)cudaSetDevice(before_); }
  WithDevice(const WithDevice&) = delete;
  WithDevice& operator=(const WithDevice&) = delete;

 private:
  int before_ = 0;
};

// Lets kernels of the current device reach another one of this process.
void EnablePeerAccess(int ordinal, int other) {
  if (ordinal == other) return;
  const std::string pair = "GPU " + std::to_string(ordinal) + " to GPU " + std::to_string(other);
  int can = 0;
  Check(cudaDeviceCanAccessPeer(&can, ordinal, other), pair);
  if (!can) throw std::runtime_error(pair + ": one cannot read the memory of the other");
  const cudaError_t status = cudaDeviceEnablePeerAccess(other, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {
    (void)cudaGetLastError();
  } else {
    Check(status, pair);
  }
}

}  // namespace

PeerAddress AllocatePeerMemory(const std::string& name, int ordinal, int64_t half_bytes) {
  WithDevice device(ordinal);
  const int64_t bytes = kPeerHeaderBytes + 2 * half_bytes;
  Opened entry;
  Check(cudaMalloc(&entry.own, bytes),
        std::to_string(bytes) + " bytes on GPU " + std::to_string(ordinal) +
            ", beside what XLA has taken (XLA_PYTHON_CLIENT_MEM_FRACTION)");
  entry.peers.half_bytes = half_bytes;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    opened[name][ordinal] = entry;
  }
  PeerAddress out{};
  Check(cudaMemset(entry.own, 0, kPeerHeaderBytes), "clearing flags");
  Check(cudaDeviceSynchronize(), "clearing flags");
  Check(cudaIpcGetMemHandle(&out.handle, entry.own), "a handle for other processes");
  out.ordinal = ordinal;
  out.address = reinterpret_cast<uint64_t>(entry.own);
  return out;
}

void ConnectPeers(const std::string& name,
                  int ordinal,
                  int rank,
                  double timeout_s,
                  const std::vector<PeerAddress>& addresses) {
  WithDevice device(ordinal);
  const std::lock_guard<std::mutex> lock(mutex);
  Opened& entry = opened.at(name).at(ordinal);
  Peers& peers = entry.peers;
  peers.num_devices = static_cast<int>(addresses.size());
  peers.rank = rank;
  peers.timeout_ns = static_cast<uint64_t>(timeout_s * 1e9);
  for (int i = 0; i < peers.num_devices; ++i) {
    const PeerAddress& from = addresses[i];
    void* base = reinterpret_cast<void*>(from.address);
    if (from.ordinal >= 0) {
      EnablePeerAccess(ordinal, from.ordinal);
    } else {
      Check(cudaIpcOpenMemHandle(&base, from.handle, cudaIpcMemLazyEnablePeerAccess),
            "memory of device " + std::to_string(i) + " along the axis, of another process");
      entry.foreign.push_back(base);
    }
    peers.bases[i] = static_cast<char*>(base);
  }
  // Loading a kernel may wait for those that run, and one that waits for a device that loads would
  // never end.
  Check(LoadPeerKernels(), "loading kernels");
  void* failure = nullptr;
  Check(cudaHostAlloc(&failure, sizeof(PeerFailure), cudaHostAllocPortable), "memory of the host");
  peers.failure = new (failure) PeerFailure{};
  entry.connected = true;
}

void DisconnectPeers(const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = opened.find(name);
  if (found == opened.end()) return;
  for (auto& [ordinal, entry] : found->second) entry.connected = false;
  for (auto& [ordinal, entry] : found->second) {
    WithDevice device(ordinal);
    Check(cudaDeviceSynchronize(), "GPU " + std::to_string(ordinal));
    for (void* base : entry.foreign) Check(cudaIpcCloseMemHandle(base), "closing memory");
    entry.foreign.clear();
  }
}

void FreePeerMemory(const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = opened.find(name);
  if (found == opened.end()) return;
  const auto entries = std::move(found->second);
  opened.erase(found);
  for (const auto& [ordinal, entry] : entries) {
    WithDevice device(ordinal);
    Check(cudaFree(entry.own), "freeing memory");
    Check(cudaFreeHost(entry.peers.failure), "freeing memory of the host");
  }
}

bool FindPeers(std::string_view name, int ordinal, Peers* peers) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = opened.find(name);
  if (found == opened.end()) return false;
  const auto entry = found->second.find(ordinal);
  if (entry == found->second.end() || !entry->second.connected) return false;
  *peers = entry->second.peers;
  return true;
}

}  // namespace jaxmoe
