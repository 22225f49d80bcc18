// Device code of a dispatch in the order of experts.
//
// A dispatch takes as long as its bytes on the links, and nothing needs all of them at once: the
// first product can multiply the rows of the first experts while those of the last are on the way.
// So a row goes to a device with the first of its experts there. Of even choices a part x of the
// experts needs 1 - (1 - x)^m of the rows, m the choices that a token has there.
// Bytes a device sends: T p (n - 1) rows, p = 1 - (1 - 1/n)^K. deepseek-v3 T = 4096 in bf16, n = 4:
//   159 MB, 466 us at 340 GB/s; a sixteenth of the experts needs an eighth of that, 58 us, and the
//   gate-up product takes 2900.
// Why few CTAs push: a product has an SM for each of its CTAs, and those of the SMs that push are
//   lost until all is sent; 15 of 132, and one that waits, have 64 KiB each in flight, which the
//   links take in 3 us. Pairs of them are neighbours, as the pairs of products are.
#pragma once

#include <cstdint>

#include "csrc/peers/copy.cuh"
#include "csrc/peers/exchange.cuh"
#include "csrc/peers/ordered.h"
#include "csrc/peers/step.cuh"

namespace jaxmoe {

// The step that LaunchPeerOffer has begun: the next one once the last part has come, which may be
// before all kernels of this one have begun.
__device__ __forceinline__ uint32_t BegunStep(const Peers& peers) { return peers.own->begun; }

// Places in a half, in bytes: slots [n,T,K] and arrays of n T rows; the last one is the end.
struct OrderedPlaces {
  int64_t arrays[kMaxOrderedArrays + 1];
};

__host__ __device__ inline OrderedPlaces PlacesOf(const PeerOrdered& params) {
  const int64_t rows = params.size.num_devices * params.size.num_tokens;
  OrderedPlaces places{{PeerAligned(rows * params.size.top_k * 4)}};
  for (int i = 0; i < params.num_arrays; ++i) {
    places.arrays[i + 1] = places.arrays[i] + PeerAligned(rows * params.arrays[i].row_bytes);
  }
  return places;
}

// The devices but this one that the row of a token goes to with each part.
__device__ __forceinline__ void WriteDevices(const Peers& peers,
                                             const PeerOrdered& params,
                                             int64_t token) {
  const ExchangeSize& size = params.size;
  const int num_slots = static_cast<int>(size.num_devices * size.num_local);
  const int num_local = static_cast<int>(size.num_local);
  unsigned until[kMaxExpertParts] = {};  // with this part or one before
  for (int k = 0; k < static_cast<int>(size.top_k); ++k) {
    const int slot = params.slots[token * size.top_k + k];
    if (slot < 0 || slot >= num_slots) continue;
    const int device = slot / num_local;
    const int local = slot - device * num_local;
    if (device == peers.rank) continue;
#pragma unroll
    for (int part = 0; part < kMaxExpertParts; ++part) {
      if (part < params.parts.count && local < params.parts.ends[part]) {
        until[part] |= 1u << device;
      }
    }
  }
  uint16_t* devices = params.devices + token * kMaxExpertParts;
#pragma unroll
  for (int part = 0; part < kMaxExpertParts; ++part) {
    const unsigned before = part == 0 ? 0 : until[part - 1];
    devices[part] = static_cast<uint16_t>(until[part] & ~before);
  }
}

__global__ void __launch_bounds__(kManyThreads, 1) PeerOfferKernel(PeerOrdered params) {
  const Peers& peers = *params.peers;
  const ExchangeSize& size = params.size;
  // Tokens lie in odd halves; where the last step was an odd one, one without data comes first.
  const uint32_t step = NextStep(peers) | 1;
  bool begins = Begins(peers, size, params.place, step);
  if (begins && NextStep(peers) < step) {  // others may still read what the last step left
    if (blockIdx.x == 0) Announce(peers, step - 1, size.tag);
    begins = !WaitForStep(peers, step - 1, size.tag);
  }
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (begins) {
    const int64_t choices = size.num_tokens * size.top_k;
    for (int64_t i = first; i < choices; i += stride) {
      const int32_t slot = params.slots[i];
      for (int device = 0; device < peers.num_devices; ++device) {
        reinterpret_cast<int32_t*>(HalfOf(peers, device, step))[peers.rank * choices + i] = slot;
      }
    }
    for (int64_t token = first; token < size.num_tokens; token += stride) {
      WriteDevices(peers, params, token);
    }
  }
  if (first < kMaxExpertParts) params.pushed[first] = 0;
  for (int64_t word = first; word < size.num_local / params.unit; word += stride) {
    params.came[word] = 0;
  }
  if (IsLastCta<true>(&peers.own->departures, gridDim.x) && begins) {
    Announce(peers, step, size.tag);
  }
}

// Pushes a part's rows. A lane looks whether one of the next 32 tasks of its warp, a piece of a row
// each, is one of these.
__device__ __forceinline__ void PushOfPart(const Peers& peers,
                                           const PeerOrdered& params,
                                           uint32_t step,
                                           int part) {
  const Team team = TeamOf(1, 1, gridDim.x - 1);
  const OrderedPlaces places = PlacesOf(params);
  const OrderedArray& array = params.arrays[0];
  const int row_units = static_cast<int>(array.row_bytes / sizeof(uint4));
  const int64_t parts = PartsOf(row_units);
  const int64_t tasks = params.size.num_tokens * parts;
  const int64_t first_row = peers.rank * params.size.num_tokens;  // there
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int64_t base = team.warp; base < tasks; base += 32 * team.warps) {
    const int64_t task = base + lane * team.warps;
    unsigned found = 0;
    if (task < tasks) found = params.devices[task / parts * kMaxExpertParts + part];
    for (unsigned left = __ballot_sync(0xffffffffu, found != 0); left != 0; left &= left - 1) {
      const int owner = __ffs(left) - 1;
      const unsigned devices = __shfl_sync(0xffffffffu, found, owner);
      const int64_t here = base + owner * team.warps;
      const int64_t token = here / parts;
      const int begin = static_cast<int>(here % parts) * 32 * kPeerUnits;
      const uint4* from = reinterpret_cast<const uint4*>(array.own) + token * row_units;
      const UnitsOfPart<uint4> units(from, begin, row_units);
      for (int turn = 1; turn < peers.num_devices; ++turn) {
        const int device = (peers.rank + turn) % peers.num_devices;
        if ((devices >> device & 1) == 0) continue;
        char* half = HalfOf(peers, device, step);
        uint4* to = reinterpret_cast<uint4*>(half + places.arrays[0]);
        units.Store(to + (first_row + token) * row_units, begin, row_units);
        if (begin > 0) continue;
        for (int i = 1; i < params.num_arrays; ++i) {
          const int words = static_cast<int>(params.arrays[i].row_bytes / 4);
          const uint32_t* more =
              reinterpret_cast<const uint32_t*>(params.arrays[i].own) + token * words;
          uint32_t* there =
              reinterpret_cast<uint32_t*>(half + places.arrays[i]) + (first_row + token) * words;
          for (int word = lane; word < words; word += 32) there[word] = more[word];
        }
      }
    }
  }
}

// Waits for the parts of all devices, whatever becomes of them, and ends the step: the last part is
// said to have come by all of this device's CTAs that push.
__device__ __forceinline__ void AwaitParts(const Peers& peers,
                                           const PeerOrdered& params,
                                           uint32_t step) {
  int word = 0;
  for (int part = 0; part < params.parts.count; ++part) {
    WaitForStep(peers, step, params.size.tag, 1 + part);
    const int end = params.parts.ends[part] / params.unit;
    if (part + 1 == params.parts.count && threadIdx.x == 0) {
      peers.own->step = step;
      peers.own->finished = step;
    }
    __threadfence();  // what has come, before the words by which other CTAs know it
    for (int i = word + static_cast<int>(threadIdx.x); i < end; i += blockDim.x) {
      StoreReleaseSystem(params.came + i, 1u);
    }
    word = end;
  }
}

__global__ void __launch_bounds__(kManyThreads, 1) PeerPushKernel(PeerOrdered params) {
  const Peers& peers = *params.peers;
  const uint32_t step = BegunStep(peers);
  if (blockIdx.x == 0) {
    AwaitParts(peers, params, step);
    return;
  }
  if (HasFailed(peers)) return;  // others may still read there
  for (int part = 0; part < params.parts.count; ++part) {
    PushOfPart(peers, params, step, part);
    if (IsLastCta<true>(params.pushed + part, gridDim.x - 1)) {
      Announce(peers, step, params.size.tag, 1 + part);
    }
  }
}

__global__ void __launch_bounds__(kManyThreads, 1) PeerTakeKernel(PeerOrdered params) {
  const Peers& peers = *params.peers;
  const ExchangeSize& size = params.size;
  const uint32_t step = BegunStep(peers);
  char* half = HalfOf(peers, peers.rank, step);
  const OrderedPlaces places = PlacesOf(params);
  if (!HasFailed(peers)) {
    for (int i = 0; i < params.num_arrays; ++i) {
      const int64_t bytes = size.num_tokens * params.arrays[i].row_bytes;
      CopyArray(half + places.arrays[i] + peers.rank * bytes, nullptr, params.arrays[i].own, bytes);
    }
  }
  const bool failed = WaitForStep(peers, step, size.tag);
  const int64_t choices = size.num_devices * size.num_tokens * size.top_k;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t i = first; i < choices; i += stride) {
    int64_t local = -1;
    if (!failed) {
      const int64_t slot = __ldcv(reinterpret_cast<const int32_t*>(half) + i);
      local = slot < 0 ? -1 : slot - peers.rank * size.num_local;
    }
    params.all_ids[i] = local >= 0 && local < size.num_local ? static_cast<int32_t>(local) : -1;
  }
}

__global__ void __launch_bounds__(32) PeerFirstKernel(PeerOrdered params) {
  const Peers& peers = *params.peers;
  if (!WaitForStep(peers, BegunStep(peers), params.size.tag, 1)) return;
  // The CTA that says what came may not be running, and the product would not let it in.
  for (int i = threadIdx.x; i < params.size.num_local / params.unit; i += blockDim.x) {
    StoreReleaseSystem(params.came + i, 1u);
  }
}

}  // namespace jaxmoe
