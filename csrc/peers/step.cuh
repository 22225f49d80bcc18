// Steps of the devices that share memory: how a device begins one, says so, and waits for others.
#pragma once

#include <cstdint>

#include "csrc/peers/exchange.h"
#include "csrc/peers/system_scope.cuh"

namespace jaxmoe {

inline constexpr int64_t kPeerLineBytes = 128;
inline constexpr int kFewThreads = 256;
// So many, and 128 registers each, as what is in flight to memory is what makes the rate.
inline constexpr int kManyThreads = 512;

__host__ __device__ constexpr int64_t PeerAligned(int64_t bytes) {
  return (bytes + kPeerAlignment - 1) / kPeerAlignment * kPeerAlignment;
}

__device__ __forceinline__ PeerHeader* HeaderOf(const Peers& peers, int device) {
  return reinterpret_cast<PeerHeader*>(peers.bases[device]);
}

// Of what a device gives others in a step.
__device__ __forceinline__ char* HalfOf(const Peers& peers, int device, uint32_t step) {
  return peers.bases[device] + kPeerHeaderBytes + (step % 2) * peers.half_bytes;
}

// The same for few tokens.
__device__ __forceinline__ char* FewOf(const Peers& peers, int device, uint32_t step) {
  return peers.bases[device] + kPeerHeaderBytes + 2 * peers.half_bytes +
         (step % 2) * peers.few_bytes;
}

// The step that this device takes next.
__device__ __forceinline__ uint32_t NextStep(const Peers& peers) { return peers.own->step + 1; }

// Whether the last of so many CTAs is here, for all threads; `counter` is 0 again then. With
// kSystem other devices see what these have written if the caller tells them.
template <bool kSystem>
__device__ __forceinline__ bool IsLastCta(uint32_t* counter, unsigned ctas) {
  __syncthreads();
  bool last = false;
  if (threadIdx.x == 0) {
    kSystem ? __threadfence_system() : __threadfence();
    last = atomicAdd(counter, 1u) == ctas - 1;
    if (last) *counter = 0;
    if (kSystem) __threadfence_system();
  }
  return __syncthreads_or(last);
}

// Gives up, and tells the others: none of them may read what this device does not write any more.
// The first thread that does says why.
__device__ __forceinline__ void Fail(const Peers& peers,
                                     uint32_t step,
                                     PeerFailure::Code code,
                                     int device) {
  if (atomicExch(&peers.own->told, 1u) == 0) {
    peers.failure->device = device;
    peers.failure->step = step;
    __threadfence_system();
    peers.failure->code = code;
  }
  if (code == PeerFailure::kGaveUp) return;  // they have been told, and of whom
  for (int i = 0; i < peers.num_devices; ++i) {
    StoreReleaseSystem(&HeaderOf(peers, i)->failed, peers.rank + 1);
  }
}

// Whether something has failed, for all threads of a CTA, which see it change while they ask.
__device__ __forceinline__ bool HasFailed(const Peers& peers) {
  const uint32_t* failed = &peers.own->failed;
  return __syncthreads_or(threadIdx.x == 0 && LoadAcquireSystem(failed) != 0);
}

// Whether this device may write what others need: nothing has failed, the program has the devices
// where the memory has them, there is room, and no other step is under way, as might be in a CUDA
// graph that runs calls at the same time.
__device__ __forceinline__ bool Begins(const Peers& peers,
                                       const ExchangeSize& size,
                                       const int32_t* place,
                                       uint32_t step) {
  bool stops = false;
  if (threadIdx.x == 0) {
    PeerHeader* own = peers.own;
    const int32_t here = *place;  // all of these at once, as each takes its time
    const bool ended = own->finished == NextStep(peers) - 1;
    const uint32_t begun = blockIdx.x == 0 ? atomicExch(&own->begun, step) : step - 1;
    const int64_t room = size.few ? peers.few_bytes - peers.line_bytes : peers.half_bytes;
    const bool fits = size.num_devices == peers.num_devices && size.bytes <= room &&
                      size.lines * kPeerLineBytes <= peers.line_bytes;
    stops = LoadAcquireSystem(&own->failed) != 0;
    if (!stops && (here != peers.place || !fits || !ended || begun == step)) {
      stops = true;
      Fail(peers,
           step,
           here != peers.place ? PeerFailure::kOtherMesh
           : fits              ? PeerFailure::kAtOnce
                               : PeerFailure::kTooSmall,
           here);
    }
  }
  return !__syncthreads_or(stops);
}

// A thread for each device tells it that this one has come to `step`, or given it a chunk, after
// what thread 0 of the CTA has seen written.
__device__ __forceinline__ void Announce(const Peers& peers,
                                         uint32_t step,
                                         uint32_t tag,
                                         int chunk = 0) {
  if (static_cast<int>(threadIdx.x) < peers.num_devices) {
    StoreReleaseSystem(&HeaderOf(peers, threadIdx.x)->flags[peers.rank].came[step % 2][chunk],
                       static_cast<uint64_t>(tag) << 32 | step);
  }
}

// Whether a thread that has waited for a device since `begin` need not wait any longer.
__device__ __forceinline__ bool GivesUp(const Peers& peers,
                                        uint32_t step,
                                        int device,
                                        uint64_t begin) {
  if (const uint32_t gave_up = LoadAcquireSystem(&peers.own->failed); gave_up != 0) {
    Fail(peers, step, PeerFailure::kGaveUp, static_cast<int>(gave_up) - 1);
  } else if (GlobalTimer() - begin > peers.timeout_ns) {
    Fail(peers, step, PeerFailure::kTimeout, device);
  } else {
    return false;
  }
  return true;
}

// Waits until all devices have come to `step`, or given a chunk of it. Returns whether one gave up,
// for all threads.
__device__ __forceinline__ bool WaitForStep(const Peers& peers,
                                            uint32_t step,
                                            uint32_t tag,
                                            int chunk = 0) {
  const int device = static_cast<int>(threadIdx.x);
  bool failed = false;
  if (device < peers.num_devices) {
    const uint64_t* flag = &peers.own->flags[device].came[step % 2][chunk];
    const uint64_t begin = GlobalTimer();
    uint64_t came = LoadAcquireSystem(flag);
    // A device comes to the step after the next, whose flag this is too, when this one has passed.
    for (int tries = 1; static_cast<uint32_t>(came) != step && !failed; ++tries) {
      if (tries % 16 == 0) failed = GivesUp(peers, step, device, begin);
      came = LoadAcquireSystem(flag);
    }
    if (!failed && static_cast<uint32_t>(came >> 32) != tag) {
      Fail(peers, step, PeerFailure::kOtherStep, device);
      failed = true;
    }
  }
  return __syncthreads_or(failed);
}

// Ends a step when the last CTA of the grid is here.
__device__ __forceinline__ void FinishStep(const Peers& peers, uint32_t step) {
  PeerHeader* own = peers.own;
  if (!IsLastCta<false>(&own->departures, gridDim.x) || threadIdx.x > 0) return;
  own->step = step;
  own->finished = step;
}

// ---- rows -----------------------------------------------------------------------------------

// Whether a choice lies on a device, for all lanes of a warp.
__device__ __forceinline__ bool HasChoice(const int32_t* slots,
                                          const ExchangeSize& size,
                                          int device) {
  bool here = false;
  const int64_t first = device * size.num_local;
  for (int k = threadIdx.x % 32; k < static_cast<int>(size.top_k); k += 32) {
    const int64_t slot = __ldcg(slots + k);
    here |= slot >= first && slot < first + size.num_local;
  }
  return __any_sync(0xffffffffu, here);
}

// The devices that a token has a choice on, a bit for each, for all lanes of a warp.
__device__ __forceinline__ unsigned DevicesOf(const int32_t* slots, const ExchangeSize& size) {
  unsigned devices = 0;
  for (int k = threadIdx.x % 32; k < static_cast<int>(size.top_k); k += 32) {
    const int64_t slot = slots[k];
    if (slot >= 0 && slot < size.num_devices * size.num_local) {
      devices |= 1u << (slot / size.num_local);
    }
  }
  return __reduce_or_sync(0xffffffffu, devices);
}

// A part of a row of one device that a warp moves.
struct RowPart {
  int device;
  int64_t token;
  int begin;  // unit
};

// Rows go round the devices, beginning at this one, so that all links are in use. A row has `parts`
// of so many units. The devices are those of the call: a step that fails fills its results too,
// where the memory is that of more.
__device__ __forceinline__ RowPart
PartAt(int64_t task, int64_t parts, int units, const ExchangeSize& size, int rank) {
  const int64_t row = task / parts;
  const int n = size.num_devices;
  return {static_cast<int>((row % n + rank) % n), row / n, static_cast<int>(task % parts) * units};
}

// Warps that share tasks: this one's place among them, and how many they are.
struct Team {
  int64_t warp;
  int64_t warps;
};

// Every `stride`-th CTA from `first` on, of which `ctas` there are; this one is among them.
__device__ __forceinline__ Team TeamOf(unsigned first, unsigned stride, unsigned ctas) {
  const int64_t warps = blockDim.x / 32;
  const int64_t cta = (blockIdx.x - first) / stride;
  return {cta * warps + threadIdx.x / 32, ctas * warps};
}

__device__ __forceinline__ Team WholeGrid() { return TeamOf(0, 1, gridDim.x); }

// Tokens of a chunk.
struct TokenRange {
  int64_t begin;
  int64_t end;
};

}  // namespace jaxmoe
