// Allocates the memory of peers, opens that of other devices and processes, and remembers it.
#include "csrc/peers/memory.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>

#include "csrc/peers/exchange.h"
#include "csrc/peers/mapped.h"

namespace jaxmoe {

// What XLA says where it knows no number. Others may be below zero: JAX makes them of a hash.
constexpr int64_t kNoExecution = -1;

// What a device keeps under a name when its memory is closed, as CUDA graphs hold addresses of it.
// NOTE: never freed; two pages a name and device.
struct KeptPeers {
  Peers* peers = nullptr;          // in the device's memory
  PeerHeader* closed = nullptr;    // of memory that is not there: a step fails, and says nothing
  PeerFailure* failure = nullptr;  // in memory of the host
};

// A device's part of what is open under a name.
struct OpenedPeers {
  std::mutex launches;  // held while a step is launched, and to change `connected`
  bool connected = false;
  void* own = nullptr;
  MappedMemory mapped;  // of which `own` is, if no other process opens it
  Peers peers{};
  KeptPeers kept;
  std::vector<void*> foreign;  // memory of other processes
  PeerStreams streams;
  std::atomic<int64_t> execution{kNoExecution};  // the last one that the device has come to
};

namespace {

// Where devices of this process wait for each other.
struct Meeting {
  std::mutex mutex;
  std::condition_variable ended;
  std::map<int64_t, size_t> came;   // devices, by execution; those of one that goes on are gone
  int64_t given_up = kNoExecution;  // the last one that a device did not come to in time
};

constexpr int64_t kCudaBlock = 2 << 20;
// A program that a device does not run is a mistake, which its kernels name.
constexpr std::chrono::seconds kMeeting(10);

using Devices = std::map<int, std::shared_ptr<OpenedPeers>>;

// NOTE: held for the map alone. What waits for a GPU must not hold a lock that another GPU's
// handler takes, as the first may be waiting for the second.
std::mutex mutex;
std::map<std::string, Devices, std::less<>> opened;
std::map<std::pair<std::string, int>, KeptPeers> kept;
std::map<std::string, Meeting> meetings;  // NOTE: never freed

Devices DevicesOf(const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = opened.find(name);
  return found == opened.end() ? Devices{} : found->second;
}

void Check(cudaError_t status, const std::string& what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // reported here, so not left for others
  throw std::runtime_error(what + ": " + cudaGetErrorString(status));
}

// Does something with a device current, in a thread of its own: to make the one before current
// again would create a context on it, if there was none.
template <class Work>
void OnDevice(int ordinal, const Work& work) {
  std::exception_ptr failure;
  std::thread thread([&] {
    try {
      Check(cudaSetDevice(ordinal), "GPU " + std::to_string(ordinal));
      work();
    } catch (...) {
      failure = std::current_exception();
    }
  });
  thread.join();
  if (failure) std::rethrow_exception(failure);
}

// Does it for each device, also if one fails; throws the first failure at the end.
template <class Work>
void OnEach(const Devices& devices, const Work& work) {
  std::exception_ptr failure;
  for (const auto& [ordinal, entry] : devices) {
    try {
      OnDevice(ordinal, [&, &entry = *entry] { work(entry); });
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

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

// Writes where kernels of the current device find it.
void Tell(const KeptPeers& kept, const Peers& peers) {
  Check(cudaMemcpy(kept.peers, &peers, sizeof(peers), cudaMemcpyHostToDevice), "copying addresses");
}

// What kernels find where there is no memory.
Peers ClosedPeers(const OpenedPeers& entry) {
  Peers closed = entry.peers;
  closed.own = entry.kept.closed;
  for (char*& base : closed.bases) base = reinterpret_cast<char*>(entry.kept.closed);
  closed.half_bytes = 0;
  closed.few_bytes = 0;
  closed.line_bytes = 0;
  return closed;
}

// What the current device, whose ordinal it is, keeps under a name; made at the first time.
KeptPeers Keep(const std::string& name, int ordinal) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = kept.find({name, ordinal});
    if (found != kept.end()) return found->second;
  }
  KeptPeers made;
  void* kept_peers = nullptr;
  Check(cudaMalloc(&kept_peers, sizeof(Peers)), "memory for addresses");
  made.peers = static_cast<Peers*>(kept_peers);
  void* closed = nullptr;
  Check(cudaMalloc(&closed, sizeof(PeerHeader)), "memory for a header");
  made.closed = static_cast<PeerHeader*>(closed);
  PeerHeader header{};
  header.failed = 1;
  header.told = 1;
  Check(cudaMemcpy(made.closed, &header, sizeof(header), cudaMemcpyHostToDevice), "copying it");
  void* failure = nullptr;
  Check(cudaHostAlloc(&failure, sizeof(PeerFailure), cudaHostAllocPortable), "memory of the host");
  made.failure = new (failure) PeerFailure{};
  const std::lock_guard<std::mutex> lock(mutex);
  return kept[{name, ordinal}] = made;
}

// Makes those of the current device, each in its place as soon as it is there.
void MakeStreams(PeerStreams* streams) {
  for (cudaStream_t* stream : {&streams->from_peers, &streams->to_peers}) {
    Check(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking), "a stream for copies");
  }
  const auto make = [](cudaEvent_t* event) {
    Check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "an event of copies");
  };
  make(&streams->met);
  for (cudaEvent_t& event : streams->arrived) make(&event);
}

// Ends those that are there, after they have done what they were given. Returns the first failure.
cudaError_t DestroyStreams(PeerStreams* streams) {
  cudaError_t status = cudaSuccess;
  const auto keep = [&status](cudaError_t found) {
    if (status == cudaSuccess) status = found;
  };
  for (cudaStream_t stream : {streams->from_peers, streams->to_peers}) {
    if (stream != nullptr) keep(cudaStreamDestroy(stream));
  }
  if (streams->met != nullptr) keep(cudaEventDestroy(streams->met));
  for (cudaEvent_t event : streams->arrived) {
    if (event != nullptr) keep(cudaEventDestroy(event));
  }
  *streams = {};
  return status;
}

}  // namespace

bool HasNativeAtomics(int ordinal, const std::vector<std::string>& buses) {
  for (const std::string& bus : buses) {
    int other = 0, has = 0;
    if (cudaDeviceGetByPCIBusId(&other, bus.c_str()) != cudaSuccess) {
      (void)cudaGetLastError();
      return false;
    }
    if (other == ordinal) continue;
    const cudaDeviceP2PAttr atomics = cudaDevP2PAttrNativeAtomicSupported;
    if (cudaDeviceGetP2PAttribute(&has, atomics, ordinal, other) != cudaSuccess) {
      (void)cudaGetLastError();
      return false;
    }
    if (!has) return false;
  }
  return true;
}

PeerAddress AllocatePeerMemory(
    const std::string& name, int ordinal, int64_t half_bytes, int64_t few_bytes, bool shared) {
  const auto entry = std::make_shared<OpenedPeers>();
  entry->peers.half_bytes = half_bytes;
  entry->peers.few_bytes = few_bytes;
  PeerAddress out{};
  OnDevice(ordinal, [&] {
    const int64_t few_begin = kPeerHeaderBytes + 2 * half_bytes;
    int64_t bytes = few_begin + 2 * few_bytes;
    // A handle gives others the whole of what CUDA allocates at once, with what else lies there.
    if (shared) bytes = (bytes + kCudaBlock - 1) / kCudaBlock * kCudaBlock;
    const std::string what = std::to_string(bytes) + " bytes on GPU " + std::to_string(ordinal) +
                             ", beside what XLA has taken (XLA_PYTHON_CLIENT_MEM_FRACTION)";
    if (shared) {
      Check(cudaMalloc(&entry->own, bytes), what);
    } else {
      if (const char* error = AllocateMapped(ordinal, bytes, &entry->mapped)) {
        throw std::runtime_error(what + ": " + error);
      }
      entry->own = reinterpret_cast<void*>(entry->mapped.address);
    }
    {
      const std::lock_guard<std::mutex> lock(mutex);
      opened[name][ordinal] = entry;
    }
    entry->peers.own = static_cast<PeerHeader*>(entry->own);
    Check(cudaMemset(entry->own, 0, kPeerHeaderBytes), "clearing flags");
    Check(cudaMemset(static_cast<char*>(entry->own) + few_begin, 0, 2 * few_bytes),
          "clearing flags");
    Check(cudaDeviceSynchronize(), "clearing flags");
    if (shared) Check(cudaIpcGetMemHandle(&out.handle, entry->own), "a handle for other processes");
    char bus[32] = {};
    Check(cudaDeviceGetPCIBusId(bus, sizeof(bus), ordinal), "where a GPU is");
    out.bus = bus;
  });
  out.ordinal = ordinal;
  out.address = reinterpret_cast<uint64_t>(entry->own);
  return out;
}

void ConnectPeers(const std::string& name,
                  int ordinal,
                  int rank,
                  int group,
                  int64_t line_bytes,
                  double timeout_s,
                  const std::vector<PeerAddress>& addresses) {
  OpenedPeers& entry = *DevicesOf(name).at(ordinal);
  Peers& peers = entry.peers;
  peers.num_devices = static_cast<int>(addresses.size());
  peers.rank = rank;
  peers.place = group * peers.num_devices + rank;
  peers.line_bytes = std::clamp<int64_t>(line_bytes, 0, peers.few_bytes);
  peers.timeout_ns = static_cast<uint64_t>(timeout_s * 1e9);
  OnDevice(ordinal, [&] {
    for (int i = 0; i < peers.num_devices; ++i) {
      const PeerAddress& from = addresses[i];
      void* base = reinterpret_cast<void*>(from.address);
      if (from.ordinal >= 0) {
        OpenedPeers& other = *DevicesOf(name).at(from.ordinal);
        if (other.mapped.bytes == 0) {
          EnablePeerAccess(ordinal, from.ordinal);
        } else if (const char* error =
                       AllowMapped(other.mapped.address, other.mapped.bytes, ordinal)) {
          throw std::runtime_error("GPU " + std::to_string(ordinal) + " to GPU " +
                                   std::to_string(from.ordinal) + ": " + error);
        }
      } else {
        Check(cudaIpcOpenMemHandle(&base, from.handle, cudaIpcMemLazyEnablePeerAccess),
              "memory of device " + std::to_string(i) + " along the axis, of another process");
        entry.foreign.push_back(base);
      }
      peers.bases[i] = static_cast<char*>(base);
    }
    // Loading a kernel may wait for those that run, and one that waits for a device that loads
    // would never end.
    Check(LoadPeerKernels(), "loading kernels");
    MakeStreams(&entry.streams);
    entry.kept = Keep(name, ordinal);
    *entry.kept.failure = PeerFailure{};
    peers.failure = entry.kept.failure;
    Tell(entry.kept, peers);
  });
  const std::lock_guard<std::mutex> lock(entry.launches);
  entry.connected = true;
}

void DisconnectPeers(const std::string& name) {
  const Devices devices = DevicesOf(name);
  for (const auto& [ordinal, entry] : devices) {
    const std::lock_guard<std::mutex> lock(entry->launches);
    entry->connected = false;
  }
  OnEach(devices, [](OpenedPeers& entry) {
    // Kernels that run read what they are told, so it does not change under them; graphs that are
    // replayed meanwhile may begin before it does.
    Check(cudaDeviceSynchronize(), "waiting for a GPU");
    if (entry.kept.peers != nullptr) Tell(entry.kept, ClosedPeers(entry));
    Check(cudaDeviceSynchronize(), "waiting for a GPU");
    cudaError_t status = DestroyStreams(&entry.streams);
    for (void* base : entry.foreign) {
      const cudaError_t closed = cudaIpcCloseMemHandle(base);
      if (status == cudaSuccess) status = closed;
    }
    entry.foreign.clear();
    Check(status, "closing memory");
  });
}

void FreePeerMemory(const std::string& name) {
  const Devices devices = DevicesOf(name);
  {
    const std::lock_guard<std::mutex> lock(mutex);
    opened.erase(name);
  }
  OnEach(devices, [](OpenedPeers& entry) {
    if (entry.mapped.bytes == 0) {
      Check(cudaFree(entry.own), "freeing memory");
    } else if (const char* error = FreeMapped(entry.mapped)) {
      throw std::runtime_error(std::string("freeing memory: ") + error);
    }
  });
}

void MeetPeersOfProcess(const std::string& name, int ordinal, int64_t execution) {
  const Devices devices = DevicesOf(name);
  const auto own = devices.find(ordinal);
  if (execution == kNoExecution || own == devices.end() || devices.size() == 1) return;
  if (own->second->execution.exchange(execution) == execution) return;
  Meeting* meeting = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    meeting = &meetings[name];
  }
  std::unique_lock<std::mutex> lock(meeting->mutex);
  if (execution == meeting->given_up) return;  // late, and nobody waits any more
  if (++meeting->came[execution] == devices.size()) {
    meeting->came.erase(execution);
    meeting->ended.notify_all();
    return;
  }
  const auto ended = [&] { return meeting->came.count(execution) == 0; };
  // The others are here in microseconds as a rule, and waking up takes longer.
  const auto begin = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - begin < std::chrono::microseconds(100)) {
    if (ended()) return;
    lock.unlock();
    std::this_thread::yield();
    lock.lock();
  }
  const std::chrono::nanoseconds timeout(own->second->peers.timeout_ns);
  const auto most = std::min<std::chrono::nanoseconds>(timeout, kMeeting);
  if (!meeting->ended.wait_for(lock, most, ended)) {
    meeting->came.erase(execution);  // the kernels find out who is missing
    meeting->given_up = execution;
    meeting->ended.notify_all();
  }
}

std::string WhyFailed(const Peers& peers, const std::string& name) {
  const PeerFailure& failure = *peers.failure;
  // The kernels write it last.
  const int32_t code = __atomic_load_n(&failure.code, __ATOMIC_ACQUIRE);
  const std::string who = "device " + std::to_string(peers.rank) + " of " + name;
  const std::string other = "device " + std::to_string(failure.device);
  const std::string in_step = " in step " + std::to_string(failure.step);
  const std::string after = "; close the memory and open it again";
  switch (code) {
    case PeerFailure::kTimeout:
      return who + " waited " + std::to_string(peers.timeout_ns / 1000000) + " ms for " + other +
             in_step + after;
    case PeerFailure::kOtherMesh:
      return who + " is " + other + " of the program's mesh, and device " +
             std::to_string(peers.place) + " of the one that the memory was opened for" + after;
    case PeerFailure::kGaveUp:
      return who + " stopped" + in_step + ", as " + other + " gave up" + after;
    case PeerFailure::kOtherStep:
      return who + " and " + other + " had other calls" + in_step +
             ": all devices must make them in one order" + after;
    case PeerFailure::kAtOnce:
      return who + " had two calls at the same time" + in_step +
             ": CUDA graphs must run them one after the other "
             "(xla_gpu_command_buffer_scheduling_mode must not be CONCURRENT)" +
             after;
    case PeerFailure::kTooSmall:
      return who + " has less memory" + in_step +
             " than when the program was recorded, or other links" + after;
    default:
      return "";
  }
}

cudaError_t PeerStreams::Wait(cudaStream_t later, cudaStream_t earlier) const {
  const cudaError_t status = cudaEventRecord(met, earlier);
  return status != cudaSuccess ? status : cudaStreamWaitEvent(later, met, 0);
}

PeersInUse::PeersInUse(std::string_view name, int ordinal) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = opened.find(name);
    if (found == opened.end()) return;
    const auto entry = found->second.find(ordinal);
    if (entry == found->second.end()) return;
    opened_ = entry->second;
  }
  opened_->launches.lock();
  if (opened_->connected) peers_ = &opened_->peers;
}

const Peers* PeersInUse::on_device() const {
  return peers_ == nullptr ? nullptr : opened_->kept.peers;
}

const PeerStreams& PeersInUse::streams() const { return opened_->streams; }

PeersInUse::~PeersInUse() {
  if (opened_) opened_->launches.unlock();
}

}  // namespace jaxmoe
