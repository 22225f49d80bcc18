// Device code of dispatch and combine through memory that all devices of an axis reach.
//
// Each is three kernels in one stream: what others need is written and announced, one CTA waits for
// the announcements of all, and the last kernel reads. What waits is one CTA, so collectives on
// other streams find SMs. For few tokens it is one kernel, of so few CTAs that all run at once.
//   dispatch: tokens are copied into the own half, slots pushed into every device's; then each
//     device pulls the rows that have a choice there, from the half of their source into its
//     result.
//   combine: rows of sums are pushed into the half of the token's source; that adds them up.
// Bytes a device sends: T p (n - 1) rows either way, p = 1 - (1 - 1/n)^K. deepseek-v3 T = 4096 in
//   bf16: n = 4 159 MB, 466 us at 340 GB/s; n = 8 270 MB. Copying tokens: 2 T H s, 27 us at 4.3
//   TB/s.
// A warp moves kPeerUnits units of 16 bytes of a row at a time, all loads in flight: 4 KiB a warp,
//   and 340 GB/s at 2 us of latency need 680 KB, 166 warps. Rows go round the sources, beginning at
//   the device's own, so that all links are in use and devices begin at different ones.
#pragma once

#include <cstdint>
#include <type_traits>

#include "csrc/common/piece.cuh"
#include "csrc/peers/exchange.h"
#include "csrc/peers/step.cuh"

namespace jaxmoe {

inline constexpr int kPeerThreads = 256;
inline constexpr int kPeerUnits = 8;  // loads of a lane in flight

// One warp: waits until all devices have come to the next step, and passes it.
__global__ void __launch_bounds__(32) PeerWaitKernel(Peers peers, uint32_t tag) {
  PeerHeader* own = HeaderOf(peers, peers.rank);
  const uint32_t step = own->step + 1;
  WaitForStep(peers, step, tag);
  if (threadIdx.x == 0) own->step = step;
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

// A warp's copy of units [begin, begin + 32 kPeerUnits) of a row.
template <class Unit>
__device__ __forceinline__ void CopyUnits(Unit* to, const Unit* from, int begin, int count) {
  const int first = begin + static_cast<int>(threadIdx.x % 32);
  Unit units[kPeerUnits];
#pragma unroll
  for (int i = 0; i < kPeerUnits; ++i) {
    if (first + 32 * i < count) units[i] = __ldcg(from + first + 32 * i);
  }
#pragma unroll
  for (int i = 0; i < kPeerUnits; ++i) {
    if (first + 32 * i < count) to[first + 32 * i] = units[i];
  }
}

template <class Unit>
__device__ __forceinline__ void FillUnits(Unit* to, Unit value, int begin, int count) {
  const int first = begin + static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int i = 0; i < kPeerUnits; ++i) {
    if (first + 32 * i < count) to[first + 32 * i] = value;
  }
}

template <class Unit>
__device__ __forceinline__ Unit AllBits(bool set) {
  if constexpr (sizeof(Unit) == 16) {
    const unsigned word = set ? 0xffffffffu : 0u;
    return make_uint4(word, word, word, word);
  } else {
    return set ? static_cast<Unit>(~Unit{0}) : Unit{0};
  }
}

// A part of a row of one device that a warp moves.
struct RowPart {
  int source;
  int64_t token;
  int begin;  // unit
};

// Parts of a row.
__device__ __forceinline__ int64_t PartsOf(int row_units) {
  return (row_units + 32 * kPeerUnits - 1) / (32 * kPeerUnits);
}

__device__ __forceinline__ RowPart PartAt(int64_t task, int64_t parts, const Peers& peers) {
  const int64_t row = task / parts;
  const int n = peers.num_devices;
  return {static_cast<int>((row % n + peers.rank) % n),
          row / n,
          static_cast<int>(task % parts) * 32 * kPeerUnits};
}

__device__ __forceinline__ int64_t WarpOfGrid() {
  return static_cast<int64_t>(blockIdx.x) * (kPeerThreads / 32) + threadIdx.x / 32;
}

__device__ __forceinline__ int64_t WarpsOfGrid() {
  return static_cast<int64_t>(gridDim.x) * (kPeerThreads / 32);
}

// ---- dispatch -------------------------------------------------------------------------------

// Places of arrays in a half, in bytes.
struct DispatchPlaces {
  int64_t tokens;
  int64_t small;
  int64_t end;
};

// Slots of all devices come first.
__host__ __device__ constexpr DispatchPlaces PlacesOf(const ExchangeSize& size,
                                                      int num_devices,
                                                      int64_t token_bytes,
                                                      int64_t small_floats) {
  const int64_t slots = PeerAligned(num_devices * size.num_tokens * size.top_k * 4);
  const int64_t tokens = PeerAligned(size.num_tokens * token_bytes);
  return {slots, slots + tokens, slots + tokens + PeerAligned(size.num_tokens * small_floats * 4)};
}

// Unit: what divides a row of tokens, whose units are read and written at once.
template <class Unit>
__device__ __forceinline__ void Stage(const PeerDispatchParams& params, uint32_t step) {
  const Peers& peers = params.peers;
  const ExchangeSize& size = params.size;
  const DispatchPlaces places =
      PlacesOf(size, peers.num_devices, params.token_bytes, params.small_floats);
  char* own = HalfOf(peers, peers.rank, step);

  const int64_t stride = WarpsOfGrid() * 32;
  const int64_t thread = WarpOfGrid() * 32 + threadIdx.x % 32;
  const int64_t slots = size.num_tokens * size.top_k;
  for (int64_t i = thread; i < slots * peers.num_devices; i += stride) {
    const int device = static_cast<int>(i / slots);
    const int64_t slot = i - device * slots;
    int32_t* there = reinterpret_cast<int32_t*>(HalfOf(peers, device, step)) + peers.rank * slots;
    there[slot] = params.slots[slot];
  }
  float* small = reinterpret_cast<float*>(own + places.small);
  for (int64_t i = thread; i < size.num_tokens * params.small_floats; i += stride) {
    small[i] = params.small[i];
  }
  const int64_t units = size.num_tokens * (params.token_bytes / sizeof(Unit));
  constexpr int64_t kMost = 1 << 30;  // units of a piece, which a call counts in 32 bits
  Unit* to = reinterpret_cast<Unit*>(own + places.tokens);
  const Unit* from = static_cast<const Unit*>(params.tokens);
  for (int64_t piece = 0; piece < units; piece += kMost) {
    const int count = static_cast<int>(units - piece < kMost ? units - piece : kMost);
    for (int64_t i = WarpOfGrid() * 32 * kPeerUnits; i < count; i += stride * kPeerUnits) {
      CopyUnits(to + piece, from + piece, static_cast<int>(i), count);
    }
  }
}

template <class Unit>
__device__ __forceinline__ void Pull(const PeerDispatchParams& params, uint32_t step, bool failed) {
  const Peers& peers = params.peers;
  const ExchangeSize& size = params.size;
  const DispatchPlaces places =
      PlacesOf(size, peers.num_devices, params.token_bytes, params.small_floats);
  const int32_t* arrived = reinterpret_cast<const int32_t*>(HalfOf(peers, peers.rank, step));
  const int row_units = static_cast<int>(params.token_bytes / sizeof(Unit));
  const int small_floats = static_cast<int>(params.small_floats);
  const int top_k = static_cast<int>(size.top_k);
  // A token without elements still has slots.
  const int64_t parts = row_units > 0 ? PartsOf(row_units) : 1;
  const int64_t tasks = size.num_tokens * peers.num_devices * parts;
  for (int64_t task = WarpOfGrid(); task < tasks; task += WarpsOfGrid()) {
    const RowPart part = PartAt(task, parts, peers);
    const int64_t row = part.source * size.num_tokens + part.token;
    const int32_t* slots = arrived + row * top_k;
    const bool comes = !failed && HasChoice(slots, size, peers.rank);
    const char* half = HalfOf(peers, part.source, step);
    const Unit* from = reinterpret_cast<const Unit*>(half + places.tokens) + part.token * row_units;
    Unit* to = static_cast<Unit*>(params.all_tokens) + row * row_units;
    if (comes) {
      CopyUnits(to, from, part.begin, row_units);
    } else {
      FillUnits(to, AllBits<Unit>(failed), part.begin, row_units);
    }
    if (part.begin > 0) continue;
    for (int k = threadIdx.x % 32; k < top_k; k += 32) {
      params.all_slots[row * top_k + k] = failed ? -1 : __ldcg(slots + k);
    }
    const float* small =
        reinterpret_cast<const float*>(half + places.small) + part.token * small_floats;
    for (int i = threadIdx.x % 32; i < small_floats; i += 32) {
      const float nothing = failed ? __uint_as_float(0xffffffffu) : 0.0f;
      params.all_small[row * small_floats + i] = comes ? __ldcg(small + i) : nothing;
    }
  }
}

template <class Unit>
__global__ void __launch_bounds__(kPeerThreads) PeerStageKernel(PeerDispatchParams params) {
  const uint32_t step = HeaderOf(params.peers, params.peers.rank)->step + 1;
  if (!Begins(params.peers, params.place, step)) return;  // others may still read
  Stage<Unit>(params, step);
  AnnounceStep(params.peers, step, params.size.tag);
}

template <class Unit>
__global__ void __launch_bounds__(kPeerThreads) PeerPullKernel(PeerDispatchParams params) {
  const uint32_t step = HeaderOf(params.peers, params.peers.rank)->step;
  Pull<Unit>(params, step, HasFailed(params.peers));
}

// All of it in one launch, whose CTAs must all run at once.
template <class Unit>
__global__ void __launch_bounds__(kPeerThreads, 1) PeerDispatchKernel(PeerDispatchParams params) {
  const uint32_t step = HeaderOf(params.peers, params.peers.rank)->step + 1;
  if (Begins(params.peers, params.place, step)) {
    Stage<Unit>(params, step);
    AnnounceStep(params.peers, step, params.size.tag);
  }
  Pull<Unit>(params, step, WaitForStep(params.peers, step, params.size.tag));
  PassStep(params.peers, step);
}

// ---- combine --------------------------------------------------------------------------------

// A half holds the rows [n, T, H] by the device that sends them, and small numbers [n, T, S] here.
__device__ __forceinline__ int64_t SmallPlace(const PeerCombineParams& params) {
  const int64_t row_bytes = params.hidden * ElementSize(params.dtype);
  return PeerAligned(params.peers.num_devices * params.size.num_tokens * row_bytes);
}

template <class Unit>
__device__ __forceinline__ void Push(const PeerCombineParams& params,
                                     uint32_t step,
                                     int row_units) {
  const Peers& peers = params.peers;
  const ExchangeSize& size = params.size;
  const int64_t small_place = SmallPlace(params);
  const int64_t parts = PartsOf(row_units);
  const int64_t tasks = size.num_tokens * peers.num_devices * parts;
  for (int64_t task = WarpOfGrid(); task < tasks; task += WarpsOfGrid()) {
    const RowPart part = PartAt(task, parts, peers);
    const int64_t row = part.source * size.num_tokens + part.token;
    if (part.source == peers.rank) continue;  // read where it is
    if (!HasChoice(params.all_slots + row * size.top_k, size, peers.rank)) continue;
    const int64_t place = peers.rank * size.num_tokens + part.token;
    char* half = HalfOf(peers, part.source, step);
    CopyUnits(reinterpret_cast<Unit*>(half) + place * row_units,
              static_cast<const Unit*>(params.rows) + row * row_units,
              part.begin,
              row_units);
    if (part.begin > 0) continue;
    float* small = reinterpret_cast<float*>(half + small_place) + place * params.small_floats;
    for (int64_t i = threadIdx.x % 32; i < params.small_floats; i += 32) {
      small[i] = params.small[row * params.small_floats + i];
    }
  }
}

// What moves a piece of kSize elements of T.
template <typename T, int kSize>
using UnitOf = std::conditional_t<kSize * sizeof(T) == 16,
                                  uint4,
                                  std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>>;

// A warp's sum of the small numbers of a token over some devices, a bit for each.
__device__ __forceinline__ void SumSmall(
    const PeerCombineParams& params, uint32_t step, bool failed, int64_t token, unsigned devices) {
  const Peers& peers = params.peers;
  const float* received =
      reinterpret_cast<const float*>(HalfOf(peers, peers.rank, step) + SmallPlace(params));
  for (int64_t i = threadIdx.x % 32; i < params.small_floats; i += 32) {
    float sum = failed ? __uint_as_float(0x7fffffffu) : 0.0f;
    for (int device = 0; device < peers.num_devices; ++device) {
      if ((devices >> device & 1) == 0) continue;
      const float* from = device == peers.rank ? params.small : received;
      const int64_t row = device * params.size.num_tokens + token;
      sum += __ldcg(from + row * params.small_floats + i);
    }
    params.small_sum[token * params.small_floats + i] = sum;
  }
}

// A lane sums pieces of kSize elements of T.
template <typename T, int kSize>
__device__ __forceinline__ void Sum(const PeerCombineParams& params,
                                    uint32_t step,
                                    bool failed,
                                    int row_pieces) {
  using P = Piece<T, kSize>;
  using Bits = typename P::Bits;
  const Peers& peers = params.peers;
  const ExchangeSize& size = params.size;
  const Bits* received = reinterpret_cast<const Bits*>(HalfOf(peers, peers.rank, step));
  const Bits* rows = static_cast<const Bits*>(params.rows);
  const int64_t num_tokens = size.num_tokens;
  const int64_t parts = (row_pieces + 31) / 32;
  for (int64_t task = WarpOfGrid(); task < num_tokens * parts; task += WarpsOfGrid()) {
    const int64_t token = task / parts;
    const int column = static_cast<int>(task % parts) * 32 + static_cast<int>(threadIdx.x % 32);
    unsigned devices = 0;
    for (int k = threadIdx.x % 32; k < static_cast<int>(size.top_k); k += 32) {
      const int64_t slot = params.slots[token * size.top_k + k];
      if (slot >= 0 && slot < peers.num_devices * size.num_local) {
        devices |= 1u << (slot / size.num_local);
      }
    }
    devices = __reduce_or_sync(0xffffffffu, devices);
    if (task % parts == 0) SumSmall(params, step, failed, token, devices);
    if (column >= row_pieces) continue;
    Bits residual{};
    const int64_t at = token * row_pieces + column;
    if (params.residual != nullptr) {
      residual = P::Load(static_cast<const Bits*>(params.residual) + at);
    }
    float sum[kSize];
    float term[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum[i] = failed ? __uint_as_float(0x7fffffffu) : 0.0f;
    constexpr int kUnroll = 4;
    for (int first = 0; first < peers.num_devices; first += kUnroll) {
      Bits bits[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int device = first + u;
        if ((devices >> device & 1) == 0) continue;
        const Bits* from = device == peers.rank ? rows : received;
        bits[u] = P::Load(from + device * num_tokens * row_pieces + at);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if ((devices >> (first + u) & 1) == 0) continue;
        P::Unpack(bits[u], term);
#pragma unroll
        for (int i = 0; i < kSize; ++i) sum[i] += term[i];
      }
    }
    if (params.residual != nullptr) {
      P::Unpack(residual, term);
#pragma unroll
      for (int i = 0; i < kSize; ++i) sum[i] += term[i];
    }
    static_cast<Bits*>(params.y)[at] = P::Pack(sum);
  }
}

template <class Unit>
__global__ void __launch_bounds__(kPeerThreads)
    PeerPushKernel(PeerCombineParams params, int row_units) {
  const uint32_t step = HeaderOf(params.peers, params.peers.rank)->step + 1;
  if (!Begins(params.peers, params.place, step)) return;  // others may still read
  Push<Unit>(params, step, row_units);
  AnnounceStep(params.peers, step, params.size.tag);
}

template <typename T, int kSize>
__global__ void __launch_bounds__(kPeerThreads)
    PeerSumKernel(PeerCombineParams params, int row_pieces) {
  const uint32_t step = HeaderOf(params.peers, params.peers.rank)->step;
  Sum<T, kSize>(params, step, HasFailed(params.peers), row_pieces);
}

// All of it in one launch, whose CTAs must all run at once.
template <typename T, int kSize>
__global__ void __launch_bounds__(kPeerThreads, 1)
    PeerCombineKernel(PeerCombineParams params, int row_pieces) {
  const uint32_t step = HeaderOf(params.peers, params.peers.rank)->step + 1;
  if (Begins(params.peers, params.place, step)) {
    Push<UnitOf<T, kSize>>(params, step, row_pieces);
    AnnounceStep(params.peers, step, params.size.tag);
  }
  const bool failed = WaitForStep(params.peers, step, params.size.tag);
  Sum<T, kSize>(params, step, failed, row_pieces);
  PassStep(params.peers, step);
}

}  // namespace jaxmoe
