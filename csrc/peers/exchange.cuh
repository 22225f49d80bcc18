// Device code of dispatch and combine through memory that all devices of an axis reach.
//
// Each is three kernels in one stream: what others need is written and announced, one CTA waits for
// the announcements of all, and the last kernel reads. What waits is one CTA, so collectives on
// other streams find SMs. For few tokens see few.cuh.
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

inline constexpr int kPeerUnits = 8;  // loads of a lane in flight

// One warp: waits until all devices have come to the next step, and passes it.
__global__ void __launch_bounds__(32) PeerWaitKernel(const Peers* address, uint32_t tag) {
  const Peers& peers = *address;
  const uint32_t step = NextStep(peers);
  WaitForStep(peers, step, tag);
  if (threadIdx.x == 0) peers.own->step = step;
}

// ---- rows -----------------------------------------------------------------------------------

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

// Parts of a row.
__device__ __forceinline__ int64_t PartsOf(int row_units) {
  return (row_units + 32 * kPeerUnits - 1) / (32 * kPeerUnits);
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
                                                      int64_t token_bytes,
                                                      int64_t small_floats) {
  const int64_t slots = PeerAligned(size.num_devices * size.num_tokens * size.top_k * 4);
  const int64_t tokens = PeerAligned(size.num_tokens * token_bytes);
  return {slots, slots + tokens, slots + tokens + PeerAligned(size.num_tokens * small_floats * 4)};
}

// Unit: what divides a row of tokens, whose units are read and written at once.
template <class Unit>
__device__ __forceinline__ void Stage(const Peers& peers,
                                      const PeerDispatchParams& params,
                                      uint32_t step) {
  const ExchangeSize& size = params.size;
  const DispatchPlaces places = PlacesOf(size, params.token_bytes, params.small_floats);
  char* own = HalfOf(peers, peers.rank, step);

  const int64_t stride = WarpsOfGrid() * 32;
  const int64_t thread = WarpOfGrid() * 32 + threadIdx.x % 32;
  const int64_t slots = size.num_tokens * size.top_k;
  for (int device = 0; device < peers.num_devices; ++device) {
    int32_t* there = reinterpret_cast<int32_t*>(HalfOf(peers, device, step)) + peers.rank * slots;
    for (int64_t i = thread; i < slots; i += stride) there[i] = params.slots[i];
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
__device__ __forceinline__ void Pull(const Peers& peers,
                                     const PeerDispatchParams& params,
                                     uint32_t step,
                                     bool failed) {
  const ExchangeSize& size = params.size;
  const DispatchPlaces places = PlacesOf(size, params.token_bytes, params.small_floats);
  const int32_t* arrived = reinterpret_cast<const int32_t*>(HalfOf(peers, peers.rank, step));
  const int row_units = static_cast<int>(params.token_bytes / sizeof(Unit));
  const int small_floats = static_cast<int>(params.small_floats);
  const int top_k = static_cast<int>(size.top_k);
  // A token without elements still has slots.
  const int64_t parts = row_units > 0 ? PartsOf(row_units) : 1;
  const int64_t tasks = size.num_tokens * peers.num_devices * parts;
  for (int64_t task = WarpOfGrid(); task < tasks; task += WarpsOfGrid()) {
    const RowPart part = PartAt(task, parts, 32 * kPeerUnits, peers);
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
  const Peers& peers = *params.peers;
  const uint32_t step = NextStep(peers);
  if (!Begins(peers, params.size, params.place, step)) return;  // others may still read
  Stage<Unit>(peers, params, step);
  AnnounceAtEnd(peers, step, params.size.tag);
}

template <class Unit>
__global__ void __launch_bounds__(kPeerThreads) PeerPullKernel(PeerDispatchParams params) {
  const Peers& peers = *params.peers;
  const uint32_t step = peers.own->step;
  Pull<Unit>(peers, params, step, HasFailed(peers));
  FinishStep(peers, step);
}

// ---- combine --------------------------------------------------------------------------------

// A half holds the rows [n, T, H] by the device that sends them, and small numbers [n, T, S] here.
__device__ __forceinline__ int64_t SmallPlace(const PeerCombineParams& params) {
  const int64_t row_bytes = params.hidden * ElementSize(params.dtype);
  return PeerAligned(params.size.num_devices * params.size.num_tokens * row_bytes);
}

template <class Unit>
__device__ __forceinline__ void Push(const Peers& peers,
                                     const PeerCombineParams& params,
                                     uint32_t step,
                                     int row_units) {
  const ExchangeSize& size = params.size;
  const int64_t small_place = SmallPlace(params);
  const int64_t parts = PartsOf(row_units);
  const int64_t tasks = size.num_tokens * peers.num_devices * parts;
  for (int64_t task = WarpOfGrid(); task < tasks; task += WarpsOfGrid()) {
    const RowPart part = PartAt(task, parts, 32 * kPeerUnits, peers);
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

// Rows and small numbers that others have pushed, for Sum.
template <class Bits>
struct Received {
  const PeerCombineParams& params;
  const Bits* rows;  // [n, T, row_pieces]
  const float* small;
  int row_pieces;

  __device__ Received(const Peers& peers,
                      const PeerCombineParams& params,
                      uint32_t step,
                      int row_pieces)
      : params(params),
        rows(reinterpret_cast<const Bits*>(HalfOf(peers, peers.rank, step))),
        small(reinterpret_cast<const float*>(HalfOf(peers, peers.rank, step) + SmallPlace(params))),
        row_pieces(row_pieces) {}

  using Read = Bits;

  __device__ __forceinline__ Bits Piece(int device, int64_t token, int column) const {
    return __ldcg(rows + (device * params.size.num_tokens + token) * row_pieces + column);
  }

  __device__ __forceinline__ Bits Arrived(Bits bits, int, int64_t, int) const { return bits; }

  __device__ __forceinline__ float Small(int device, int64_t token, int i) const {
    return __ldcg(small + (device * params.size.num_tokens + token) * params.small_floats + i);
  }
};

// A warp's sum of the small numbers of a token over some devices, a bit for each.
template <class From>
__device__ __forceinline__ void SumSmall(const Peers& peers,
                                         const PeerCombineParams& params,
                                         const From& received,
                                         bool failed,
                                         int64_t token,
                                         unsigned devices) {
  const float* own = params.small + (peers.rank * params.size.num_tokens + token) *
                                        params.small_floats;
  for (int i = threadIdx.x % 32; i < params.small_floats; i += 32) {
    float sum = failed ? __uint_as_float(0x7fffffffu) : 0.0f;
    for (int device = 0; device < peers.num_devices && !failed; ++device) {
      if ((devices >> device & 1) == 0) continue;
      sum += device == peers.rank ? __ldcg(own + i) : received.Small(device, token, i);
    }
    params.small_sum[token * params.small_floats + i] = sum;
  }
}

// A lane sums pieces of kSize elements of T.
template <typename T, int kSize, class From>
__device__ __forceinline__ void Sum(const Peers& peers,
                                    const PeerCombineParams& params,
                                    const From& received,
                                    bool failed,
                                    int row_pieces) {
  using P = Piece<T, kSize>;
  using Bits = typename P::Bits;
  const ExchangeSize& size = params.size;
  const Bits* rows = static_cast<const Bits*>(params.rows);
  const int64_t num_tokens = size.num_tokens;
  const int64_t parts = (row_pieces + 31) / 32;
  for (int64_t task = WarpOfGrid(); task < num_tokens * parts; task += WarpsOfGrid()) {
    const int64_t token = task / parts;
    const int column = static_cast<int>(task % parts) * 32 + static_cast<int>(threadIdx.x % 32);
    unsigned devices = DevicesOf(params.slots + token * size.top_k, size);
    if (failed) devices = 0;
    if (task % parts == 0) SumSmall(peers, params, received, failed, token, devices);
    if (column >= row_pieces) continue;
    const int64_t at = token * row_pieces + column;
    const Bits own = P::Load(rows + peers.rank * num_tokens * row_pieces + at);
    Bits residual{};
    if (params.residual != nullptr) {
      residual = P::Load(static_cast<const Bits*>(params.residual) + at);
    }
    float sum[kSize];
    float term[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum[i] = failed ? __uint_as_float(0x7fffffffu) : 0.0f;
    constexpr int kUnroll = 4;
    for (int first = 0; first < peers.num_devices; first += kUnroll) {
      typename From::Read read[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int device = first + u;
        if ((devices >> device & 1) == 0 || device == peers.rank) continue;
        read[u] = received.Piece(device, token, column);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int device = first + u;
        if ((devices >> device & 1) == 0) continue;
        P::Unpack(device == peers.rank ? own : received.Arrived(read[u], device, token, column),
                  term);
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
  const Peers& peers = *params.peers;
  const uint32_t step = NextStep(peers);
  if (!Begins(peers, params.size, params.place, step)) return;  // others may still read
  Push<Unit>(peers, params, step, row_units);
  AnnounceAtEnd(peers, step, params.size.tag);
}

template <typename T, int kSize>
__global__ void __launch_bounds__(kPeerThreads)
    PeerSumKernel(PeerCombineParams params, int row_pieces) {
  using Bits = typename Piece<T, kSize>::Bits;
  const Peers& peers = *params.peers;
  const uint32_t step = peers.own->step;
  const Received<Bits> received(peers, params, step, row_pieces);
  Sum<T, kSize>(peers, params, received, HasFailed(peers), row_pieces);
  FinishStep(peers, step);
}

}  // namespace jaxmoe
