// Steps of the devices that share memory: how a device begins one, says so, and waits for others.
#pragma once

#include <cstdint>

#include "csrc/peers/memory.h"
#include "csrc/peers/system_scope.cuh"

namespace jaxmoe {

__device__ __forceinline__ PeerHeader* HeaderOf(const Peers& peers, int device) {
  return reinterpret_cast<PeerHeader*>(peers.bases[device]);
}

// Of what a device gives others in a step.
__device__ __forceinline__ char* HalfOf(const Peers& peers, int device, uint32_t step) {
  return peers.bases[device] + kPeerHeaderBytes + (step % 2) * peers.half_bytes;
}

// Whether the last CTA of the grid is here, for all threads; `counter` is 0 again then.
__device__ __forceinline__ bool IsLastCta(uint32_t* counter) {
  __syncthreads();
  bool last = false;
  if (threadIdx.x == 0) {
    __threadfence_system();
    last = atomicAdd(counter, 1u) == gridDim.x - 1;
    if (last) *counter = 0;
    __threadfence_system();
  }
  return __syncthreads_or(last);
}

// Gives up, and tells the others: none of them may read what this device does not write any more.
// The first thread that does says why.
__device__ __forceinline__ void Fail(const Peers& peers,
                                     uint32_t step,
                                     PeerFailure::Code code,
                                     int device) {
  if (atomicExch(&HeaderOf(peers, peers.rank)->told, 1u) == 0) {
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
  const uint32_t* failed = &HeaderOf(peers, peers.rank)->failed;
  return __syncthreads_or(threadIdx.x == 0 && LoadAcquireSystem(failed) != 0);
}

// Whether this device may write what others need: nothing has failed, and the program has the
// devices where the memory has them.
__device__ __forceinline__ bool Begins(const Peers& peers, const int32_t* place, uint32_t step) {
  if (HasFailed(peers)) return false;
  const bool other = threadIdx.x == 0 && *place != peers.place;
  if (other) Fail(peers, step, PeerFailure::kOtherMesh, *place);
  return !__syncthreads_or(other);
}

// A thread for each device tells it that this one has come to `step`.
__device__ __forceinline__ void Announce(const Peers& peers, uint32_t step, uint32_t tag) {
  if (static_cast<int>(threadIdx.x) < peers.num_devices) {
    __threadfence_system();
    PeerHeader::Flag* flag = &HeaderOf(peers, threadIdx.x)->flags[peers.rank];
    flag->tags[step % 2] = tag;
    StoreReleaseSystem(&flag->step, step);
  }
}

// The same when the last CTA of the grid is here.
__device__ __forceinline__ void AnnounceStep(const Peers& peers, uint32_t step, uint32_t tag) {
  if (IsLastCta(&HeaderOf(peers, peers.rank)->arrivals)) Announce(peers, step, tag);
}

// Waits until all devices have come to `step`. Returns whether one gave up, for all threads.
__device__ __forceinline__ bool WaitForStep(const Peers& peers, uint32_t step, uint32_t tag) {
  PeerHeader* own = HeaderOf(peers, peers.rank);
  const int device = static_cast<int>(threadIdx.x);
  bool failed = false;
  if (device < peers.num_devices) {
    const PeerHeader::Flag* flag = &own->flags[device];
    const uint64_t begin = GlobalTimer();
    // Not equal: another device may be a step ahead.
    while (static_cast<int32_t>(LoadAcquireSystem(&flag->step) - step) < 0 && !failed) {
      if (const uint32_t gave_up = LoadAcquireSystem(&own->failed); gave_up != 0) {
        Fail(peers, step, PeerFailure::kGaveUp, static_cast<int>(gave_up) - 1);
        failed = true;
      } else if (GlobalTimer() - begin > peers.timeout_ns) {
        Fail(peers, step, PeerFailure::kTimeout, device);
        failed = true;
      }
    }
    // It is overwritten two steps later, which that device comes to after this one has passed this.
    if (!failed && flag->tags[step % 2] != tag) {
      Fail(peers, step, PeerFailure::kOtherStep, device);
      failed = true;
    }
  }
  return __syncthreads_or(failed);
}

// Passes a step when the last CTA of the grid is here.
__device__ __forceinline__ void PassStep(const Peers& peers, uint32_t step) {
  PeerHeader* own = HeaderOf(peers, peers.rank);
  if (IsLastCta(&own->departures) && threadIdx.x == 0) own->step = step;
}

__host__ __device__ constexpr int64_t PeerAligned(int64_t bytes) {
  return (bytes + kPeerAlignment - 1) / kPeerAlignment * kPeerAlignment;
}

}  // namespace jaxmoe
