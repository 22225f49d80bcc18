// Device code of an exchange beside products: what copy engines cannot do.
#pragma once

#include <cstdint>

#include "csrc/peers/beside.h"
#include "csrc/peers/copy.cuh"
#include "csrc/peers/exchange.cuh"
#include "csrc/peers/step.cuh"

namespace jaxmoe {

// The steps of an exchange: tokens lie in odd halves, sums in even ones. Where the last step was an
// odd one, a step without data comes first, on all devices alike: without it a device's flag might
// pass the number that another one still waits for.
__device__ __forceinline__ uint32_t PublishStep(const Peers& peers) { return NextStep(peers) | 1; }

// Places in a half, in bytes: slots and weights [T,K], and arrays of T rows.
struct BesidePlaces {
  int64_t weights;
  int64_t arrays[kMaxPeerArrays + 1];  // the last one is the end
};

__host__ __device__ inline BesidePlaces PlacesOf(const PeerBeside& params) {
  const int64_t choices = PeerAligned(params.size.num_tokens * params.size.top_k * 4);
  BesidePlaces places{choices, {2 * choices}};
  for (int i = 0; i < params.num_arrays; ++i) {
    const int64_t bytes = params.size.num_tokens * params.arrays[i].row_bytes;
    places.arrays[i + 1] = places.arrays[i] + PeerAligned(bytes);
  }
  return places;
}

__global__ void __launch_bounds__(kManyThreads, 1) PeerPublishKernel(PeerBeside params) {
  const Peers& peers = *params.peers;
  const uint32_t step = PublishStep(peers);
  const bool begins = Begins(peers, params.size, params.place, step);
  if (begins) {
    const BesidePlaces places = PlacesOf(params);
    const int64_t choices = params.size.num_tokens * params.size.top_k * 4;
    char* half = HalfOf(peers, peers.rank, step);
    CopyArray(half, nullptr, params.slots, choices);
    CopyArray(half + places.weights, nullptr, params.weights, choices);
    for (int i = 0; i < params.num_arrays; ++i) {
      const PeerArray& array = params.arrays[i];
      const int64_t bytes = params.size.num_tokens * array.row_bytes;
      CopyArray(half + places.arrays[i], array.all, array.own, bytes);
    }
  }
  if (!IsLastCta<true>(&peers.own->departures, gridDim.x)) return;
  for (uint32_t meeting = NextStep(peers); meeting <= step; ++meeting) {
    if (begins) Announce(peers, meeting, params.size.tag);
    WaitForStep(peers, meeting, params.size.tag);
  }
  if (threadIdx.x > 0) return;
  peers.own->step = step;
  peers.own->finished = step;
}

// Reads the choices of all devices' tokens where these have left them.
__global__ void __launch_bounds__(kManyThreads, 1) PeerChoicesKernel(PeerBeside params) {
  const Peers& peers = *params.peers;
  const uint32_t step = peers.own->step;
  const bool failed = HasFailed(peers);
  const int64_t choices = params.size.num_tokens * params.size.top_k;
  const int64_t weights = PlacesOf(params).weights;
  const int64_t num_local = params.size.num_local;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t i = first; i < choices * peers.num_devices; i += stride) {
    const int turn = static_cast<int>(i / choices);
    const int64_t choice = i - turn * choices;
    const char* half = HalfOf(peers, (peers.rank + turn) % peers.num_devices, step);
    int32_t id = -1;
    float weight = 0.0f;
    if (!failed) {
      const int64_t slot = __ldcv(reinterpret_cast<const int32_t*>(half) + choice);
      weight = __ldcv(reinterpret_cast<const float*>(half + weights) + choice);
      const int64_t local = slot - peers.rank * num_local;
      if (slot >= 0 && local >= 0 && local < num_local) {
        id = static_cast<int32_t>(local * peers.num_devices + turn);
      }
    }
    params.all_ids[i] = id;
    params.all_weights[i] = weight;
  }
  if (first < peers.num_devices) {
    params.came[first] = first == 0;
    params.counters[first] = 0;
    params.counters[peers.num_devices + first] = 0;
  }
}

template <typename T>
__global__ void __launch_bounds__(kManyThreads, 1)
    PeerSumKernel(PeerBeside params, int row_pieces) {
  constexpr int kSize = 16 / sizeof(T);
  using Bits = typename Piece<T, kSize>::Bits;
  const Peers& peers = *params.peers;
  const uint32_t step = NextStep(peers);
  const bool begins = Begins(peers, params.size, params.place, step);
  if (blockIdx.x == 0 && begins) Announce(peers, step, params.size.tag);
  bool failed = WaitForStep(peers, step, params.size.tag) || !begins;
  const Received<Bits> received(peers, params.sum, step, row_pieces);
  const TokenRange all{0, params.size.num_tokens};
  while (true) {
    Sum<T, kSize, 2, 2>(peers, params.sum, received, failed, row_pieces, all, WholeGrid());
    // A device that fails in the next step has told so before its copies, which nothing stops, have
    // written where this one may have been reading.
    __syncthreads();
    if (failed || !HasFailed(peers)) break;
    failed = true;
  }
  FinishStep(peers, step);
}

}  // namespace jaxmoe
