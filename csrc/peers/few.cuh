// Dispatch and combine of few tokens, each one launch of CTAs that all run at once.
//
// What takes long there is not bytes but trips between devices, so nothing waits for a flag that is
// written behind data: every 8 bytes carry 4 of the step's number, and whoever wants them reads
// until it is there. Rows are pushed either way. The flags of a step go first, before any data; a
// device that has seen all of them knows that the others take this step too, and how far they are.
//   dispatch: slots and rows are pushed to the devices that a token has a choice on.
//   combine: rows of sums are pushed to the device of their token, which adds them up.
// Bytes a device sends: 2 T p (n - 1) rows, 1.8 MB for deepseek-v3 T = 64 and n = 2, 6 us at 340
//   GB/s. Trips: the arguments of the step, slots and rows, the way there, the reading: 5 us
//   predicted in place of the 18 us that a launch with one barrier behind its data took.
#pragma once

#include "csrc/peers/exchange.cuh"

namespace jaxmoe {

// 8 bytes of data. In the memory of a step they are 16: {word, step, word, step}.
inline constexpr int64_t kPairBytes = 8;
inline constexpr int kFewPairs = 4;  // that a lane moves at once: 1 KiB of a row a warp

__host__ __device__ constexpr int64_t PairsOf(int64_t bytes) {
  return (bytes + kPairBytes - 1) / kPairBytes;
}

__host__ __device__ constexpr int64_t FewParts(int64_t row_pairs) {
  return row_pairs > 0 ? (row_pairs + 32 * kFewPairs - 1) / (32 * kFewPairs) : 1;
}

// Where the arrays of a device lie in the half of another, in pairs.
struct FewPlaces {
  int64_t slots;  // of this device's tokens
  int64_t rows;
  int64_t small;
};

// A half has the pairs of each device one after the other.
__device__ __forceinline__ FewPlaces FewPlacesOf(
    const ExchangeSize& size, int device, int64_t slot_pairs, int64_t row_pairs, int64_t small) {
  const int64_t n = size.num_devices;
  const int64_t rows = n * slot_pairs;
  return {device * slot_pairs,
          rows + device * size.num_tokens * row_pairs,
          rows + n * size.num_tokens * row_pairs + device * size.num_tokens * small};
}

// The data of a pair that was read, once it is that of the step; it is read again until then. Where
// the device that sends it is gone, all bits are 1.
__device__ __forceinline__ uint2
Arrived(const Peers& peers, uint4 pair, const uint4* from, uint32_t step, int device) {
  if (pair.y != step || pair.w != step) {
    const uint64_t begin = GlobalTimer();
    for (int tries = 1; pair.y != step || pair.w != step; ++tries) {
      if (tries % 16 == 0 && GivesUp(peers, step, device, begin)) {
        return make_uint2(0xffffffffu, 0xffffffffu);
      }
      pair = LoadPairs(from);
    }
  }
  return make_uint2(pair.x, pair.z);
}

__device__ __forceinline__ uint2 ReceivePair(const Peers& peers,
                                             const uint4* from,
                                             uint32_t step,
                                             int device) {
  return Arrived(peers, LoadPairs(from), from, step, device);
}

// Calls use(j, pair of the row) for this lane's pairs of a part, of kFewPairs at most.
template <class Use>
__device__ __forceinline__ void ForEachPair(int begin, int row_pairs, const Use& use) {
  const int first = begin + static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int j = 0; j < kFewPairs; ++j) {
    if (first + 32 * j < row_pairs) use(j, first + 32 * j);
  }
}

// Sends floats of a warp, `count` of them, as pairs.
__device__ __forceinline__ void SendFloats(uint4* to, const float* from, int count, uint32_t step) {
  for (int i = threadIdx.x % 32; 2 * i < count; i += 32) {
    const float second = 2 * i + 1 < count ? from[2 * i + 1] : 0.0f;
    StorePairs(to + i, make_uint2(__float_as_uint(from[2 * i]), __float_as_uint(second)), step);
  }
}

// ---- dispatch -------------------------------------------------------------------------------

__device__ __forceinline__ FewPlaces FewPlacesOf(const PeerDispatchParams& params, int device) {
  return FewPlacesOf(params.size,
                     device,
                     PairsOf(params.size.num_tokens * params.size.top_k * 4),
                     PairsOf(params.token_bytes),
                     PairsOf(params.small_floats * 4));
}

__device__ __forceinline__ void SendFew(const Peers& peers,
                                        const PeerDispatchParams& params,
                                        uint32_t step) {
  const ExchangeSize& size = params.size;
  const FewPlaces places = FewPlacesOf(params, peers.rank);
  const int64_t slots = size.num_tokens * size.top_k;
  const int64_t slot_pairs = PairsOf(slots * 4);
  const Team team = WholeGrid();
  const int64_t thread = team.warp * 32 + threadIdx.x % 32;
  for (int64_t i = thread; i < slot_pairs; i += team.warps * 32) {
    const int32_t first = params.slots[2 * i];
    const int32_t second = 2 * i + 1 < slots ? params.slots[2 * i + 1] : -1;
    for (int device = 0; device < peers.num_devices; ++device) {
      if (device == peers.rank) continue;
      StorePairs(reinterpret_cast<uint4*>(FewOf(peers, device, step)) + places.slots + i,
                 make_uint2(static_cast<uint32_t>(first), static_cast<uint32_t>(second)),
                 step);
    }
  }
  const int row_pairs = static_cast<int>(PairsOf(params.token_bytes));
  const int small_pairs = static_cast<int>(PairsOf(params.small_floats * 4));
  const int64_t parts = FewParts(row_pairs);
  for (int64_t task = team.warp; task < size.num_tokens * parts; task += team.warps) {
    const int64_t token = task / parts;
    const int begin = static_cast<int>(task % parts) * 32 * kFewPairs;
    const uint2* row = static_cast<const uint2*>(params.tokens) + token * row_pairs;
    uint2 pairs[kFewPairs];
    ForEachPair(begin, row_pairs, [&](int j, int pair) { pairs[j] = row[pair]; });
    unsigned devices = DevicesOf(params.slots + token * size.top_k, size);
    devices &= ~(1u << peers.rank);
    for (int turn = 1; devices != 0; ++turn) {  // each device begins with the one after it
      const int device = (peers.rank + turn) % peers.num_devices;
      if ((devices >> device & 1) == 0) continue;
      devices &= ~(1u << device);
      uint4* half = reinterpret_cast<uint4*>(FewOf(peers, device, step));
      uint4* to = half + places.rows + token * row_pairs;
      ForEachPair(
          begin, row_pairs, [&](int j, int pair) { StorePairs(to + pair, pairs[j], step); });
      if (begin > 0) continue;
      SendFloats(half + places.small + token * small_pairs,
                 params.small + token * params.small_floats,
                 static_cast<int>(params.small_floats),
                 step);
    }
  }
}

// Slot k of a token of another device.
__device__ __forceinline__ int32_t
ReceiveSlot(const Peers& peers, const uint4* slots, int64_t slot, uint32_t step, int device) {
  const uint2 pair = ReceivePair(peers, slots + slot / 2, step, device);
  return static_cast<int32_t>(slot % 2 == 0 ? pair.x : pair.y);
}

__device__ __forceinline__ void ReceiveFew(const Peers& peers,
                                           const PeerDispatchParams& params,
                                           uint32_t step,
                                           bool failed) {
  const ExchangeSize& size = params.size;
  const int top_k = static_cast<int>(size.top_k);
  const int small_floats = static_cast<int>(params.small_floats);
  const int row_pairs = static_cast<int>(PairsOf(params.token_bytes));
  const int small_pairs = static_cast<int>(PairsOf(params.small_floats * 4));
  const int64_t parts = FewParts(row_pairs);
  const int64_t first_slot = peers.rank * size.num_local;
  const uint4* half = reinterpret_cast<const uint4*>(FewOf(peers, peers.rank, step));
  const Team team = WholeGrid();
  const int64_t tasks = size.num_tokens * size.num_devices * parts;
  const unsigned nothing = failed ? 0xffffffffu : 0u;
  for (int64_t task = team.warp; task < tasks; task += team.warps) {
    const RowPart part = PartAt(task, parts, 32 * kFewPairs, size, peers.rank);
    const FewPlaces places = FewPlacesOf(params, part.device);
    const int64_t row = part.device * size.num_tokens + part.token;
    const bool own = part.device == peers.rank;
    const uint2* tokens = static_cast<const uint2*>(params.tokens) + part.token * row_pairs;
    const uint4* from = half + places.rows + part.token * row_pairs;
    uint4 pairs[kFewPairs];  // read before it is known whether the row comes, as both take a trip
    ForEachPair(part.begin, row_pairs, [&](int j, int pair) {
      if (!failed && !own) pairs[j] = LoadPairs(from + pair);
    });
    bool here = false;
    for (int k = threadIdx.x % 32; k < top_k; k += 32) {
      const int64_t at = part.token * top_k + k;
      int32_t slot = -1;
      if (!failed) {
        slot =
            own ? params.slots[at] : ReceiveSlot(peers, half + places.slots, at, step, part.device);
      }
      here |= slot >= first_slot && slot < first_slot + size.num_local;
      if (part.begin == 0) params.all_slots[row * top_k + k] = slot;
    }
    const bool comes = __any_sync(0xffffffffu, here);
    uint2* to = static_cast<uint2*>(params.all_tokens) + row * row_pairs;
    ForEachPair(part.begin, row_pairs, [&](int j, int pair) {
      to[pair] = !comes ? make_uint2(nothing, nothing)
                 : own  ? tokens[pair]
                        : Arrived(peers, pairs[j], from + pair, step, part.device);
    });
    if (part.begin > 0) continue;
    const float* small = params.small + part.token * small_floats;
    const uint4* small_from = half + places.small + part.token * small_pairs;
    float* small_to = params.all_small + row * small_floats;
    for (int i = threadIdx.x % 32; i < small_floats; i += 32) {
      float value = __uint_as_float(nothing);
      if (comes && own) value = small[i];
      if (comes && !own) {
        const uint2 pair = ReceivePair(peers, small_from + i / 2, step, part.device);
        value = __uint_as_float(i % 2 == 0 ? pair.x : pair.y);
      }
      small_to[i] = value;
    }
  }
}

__global__ void __launch_bounds__(kFewThreads, 1) PeerFewDispatchKernel(PeerDispatchParams params) {
  const Peers& peers = *params.peers;
  const uint32_t step = NextStep(peers);
  if (Begins(peers, params.size, params.place, step)) {
    if (blockIdx.x == 0) Announce(peers, step, params.size.tag);
    SendFew(peers, params, step);
  }
  ReceiveFew(peers, params, step, WaitForStep(peers, step, params.size.tag));
  FinishStep(peers, step);
}

// ---- combine --------------------------------------------------------------------------------

__device__ __forceinline__ FewPlaces FewPlacesOf(const PeerCombineParams& params, int device) {
  return FewPlacesOf(params.size,
                     device,
                     0,
                     PairsOf(params.hidden * ElementSize(params.dtype)),
                     PairsOf(params.small_floats * 4));
}

__device__ __forceinline__ void SendFew(const Peers& peers,
                                        const PeerCombineParams& params,
                                        uint32_t step) {
  const ExchangeSize& size = params.size;
  const FewPlaces places = FewPlacesOf(params, peers.rank);
  const int row_pairs = static_cast<int>(PairsOf(params.hidden * ElementSize(params.dtype)));
  const int small_pairs = static_cast<int>(PairsOf(params.small_floats * 4));
  const int64_t parts = FewParts(row_pairs);
  const Team team = WholeGrid();
  const int64_t tasks = size.num_tokens * size.num_devices * parts;
  for (int64_t task = team.warp; task < tasks; task += team.warps) {
    const RowPart part = PartAt(task, parts, 32 * kFewPairs, size, peers.rank);
    if (part.device == peers.rank) continue;  // read where it is
    const int64_t row = part.device * size.num_tokens + part.token;
    const uint2* from = static_cast<const uint2*>(params.rows) + row * row_pairs;
    uint2 pairs[kFewPairs];
    ForEachPair(part.begin, row_pairs, [&](int j, int pair) { pairs[j] = from[pair]; });
    if (!HasChoice(params.all_slots + row * size.top_k, size, peers.rank)) continue;
    uint4* half = reinterpret_cast<uint4*>(FewOf(peers, part.device, step));
    uint4* to = half + places.rows + part.token * row_pairs;
    ForEachPair(
        part.begin, row_pairs, [&](int j, int pair) { StorePairs(to + pair, pairs[j], step); });
    if (part.begin > 0) continue;
    SendFloats(half + places.small + part.token * small_pairs,
               params.small + row * params.small_floats,
               static_cast<int>(params.small_floats),
               step);
  }
}

// Rows and small numbers that others have sent, for Sum.
struct FewReceived {
  const Peers& peers;
  const PeerCombineParams& params;
  uint32_t step;

  __device__ const uint4* half() const {
    return reinterpret_cast<const uint4*>(FewOf(peers, peers.rank, step));
  }

  // 16 bytes of a row, as they were read.
  struct Read {
    uint4 first, second;
  };

  __device__ __forceinline__ const uint4* At(int device, int64_t token, int column) const {
    const int64_t row_pairs = PairsOf(params.hidden * ElementSize(params.dtype));
    return half() + FewPlacesOf(params, device).rows + token * row_pairs + 2 * column;
  }

  __device__ __forceinline__ Read Piece(int device, int64_t token, int column) const {
    const uint4* from = At(device, token, column);
    return {LoadPairs(from), LoadPairs(from + 1)};
  }

  __device__ __forceinline__ uint4 Arrived(Read read, int device, int64_t token, int column) const {
    const uint4* from = At(device, token, column);
    const uint2 first = jaxmoe::Arrived(peers, read.first, from, step, device);
    const uint2 second = jaxmoe::Arrived(peers, read.second, from + 1, step, device);
    return make_uint4(first.x, first.y, second.x, second.y);
  }

  __device__ __forceinline__ float Small(int device, int64_t token, int i) const {
    const int64_t small_pairs = PairsOf(params.small_floats * 4);
    const uint4* from = half() + FewPlacesOf(params, device).small + token * small_pairs + i / 2;
    const uint2 pair = ReceivePair(peers, from, step, device);
    return __uint_as_float(i % 2 == 0 ? pair.x : pair.y);
  }
};

template <typename T>
__global__ void __launch_bounds__(kFewThreads, 1) PeerFewCombineKernel(PeerCombineParams params) {
  constexpr int kSize = 16 / sizeof(T);
  const Peers& peers = *params.peers;
  const uint32_t step = NextStep(peers);
  if (Begins(peers, params.size, params.place, step)) {
    if (blockIdx.x == 0) Announce(peers, step, params.size.tag);
    SendFew(peers, params, step);
  }
  const bool failed = WaitForStep(peers, step, params.size.tag);
  const int row_pieces = static_cast<int>(params.hidden / kSize);
  const FewReceived received{peers, params, step};
  const TokenRange all{0, params.size.num_tokens};
  Sum<T, kSize, 1, 4>(peers, params, received, failed, row_pieces, all, WholeGrid());
  FinishStep(peers, step);
}

}  // namespace jaxmoe
