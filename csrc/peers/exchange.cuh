// Device code of dispatch and combine through memory that all devices of an axis reach.
//
// Each is one kernel whose CTAs do two things: some push rows into the halves of other devices,
// chunk by chunk, and say when a chunk is there; the others take what all devices have pushed,
// while the next chunks are under way. For few tokens see few.cuh.
//   dispatch: rows are pushed to the devices that the token has a choice on, slots to all; they are
//     copied into the result.
//   combine: rows of sums are pushed to the device of the token; that adds them up.
// Bytes a device sends: T p (n - 1) rows either way, p = 1 - (1 - 1/n)^K. deepseek-v3 T = 4096 in
//   bf16: n = 4 159 MB, 466 us at 340 GB/s; n = 8 270 MB. What is taken is read and written once
//   more, 4 n T H s bytes of this device's memory with what arrives, behind the links.
// A warp moves kPeerUnits units of 16 bytes of a row at a time, all loads in flight: 4 KiB a warp,
//   and 340 GB/s at 2 us of latency need 680 KB, 166 warps. Rows go round the devices, beginning at
//   the own one, so that all links are in use and devices begin at different ones.
// No deadlock: who pushes waits for nobody, and is in the first CTAs, which run first. When these
//   have ended their SMs are free for collectives on other streams, which another device may wait
//   for before it pushes.
// Two groups push every other chunk each, as a CTA that has pushed its part of one must wait until
//   its stores have arrived: the other group has the links meanwhile.
#pragma once

#include <cstdint>
#include <type_traits>

#include "csrc/common/piece.cuh"
#include "csrc/peers/exchange.h"
#include "csrc/peers/step.cuh"

namespace jaxmoe {

inline constexpr int kPeerUnits = 8;  // loads of a lane in flight
inline constexpr unsigned kPushGroups = 2;

// ---- chunks ---------------------------------------------------------------------------------

__device__ __forceinline__ TokenRange ChunkOf(const ExchangeSize& size, int chunk) {
  return {size.num_tokens * chunk / size.chunks, size.num_tokens * (chunk + 1) / size.chunks};
}

// A step in chunks. push(step, tokens, team) gives a chunk to the others, take(step, failed,
// tokens, team) reads what all have given. At least kPushGroups CTAs push, and one takes.
template <class Push, class Take>
__device__ __forceinline__ void InChunks(const Peers& peers,
                                         const ExchangeSize& size,
                                         const int32_t* place,
                                         const Push& push,
                                         const Take& take) {
  const uint32_t step = NextStep(peers);
  const unsigned pushers = size.pushers;
  if (blockIdx.x < pushers) {
    const unsigned group = blockIdx.x % kPushGroups;
    const unsigned ctas = (pushers - group + kPushGroups - 1) / kPushGroups;
    if (Begins(peers, size, place, step)) {
      for (int chunk = group; chunk < size.chunks; chunk += kPushGroups) {
        push(step, ChunkOf(size, chunk), TeamOf(group, kPushGroups, ctas));
        if (IsLastCta<true>(&peers.own->arrivals[chunk], ctas)) {
          Announce(peers, step, size.tag, chunk);
        }
      }
    }
  } else {
    bool failed = false;
    for (int chunk = 0; chunk < size.chunks; ++chunk) {
      failed = failed || WaitForStep(peers, step, size.tag, chunk);
      const TokenRange tokens = ChunkOf(size, chunk);
      take(step, failed, tokens, TeamOf(pushers, 1, gridDim.x - pushers));
    }
  }
  FinishStep(peers, step);
}

// ---- rows -----------------------------------------------------------------------------------

// A warp's units [begin, begin + 32 kPeerUnits) of a row.
template <class Unit>
struct UnitsOfPart {
  Unit units[kPeerUnits];

  __device__ __forceinline__ UnitsOfPart(const Unit* from, int begin, int count) {
    const int first = begin + static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < kPeerUnits; ++i) {
      if (first + 32 * i < count) units[i] = __ldcg(from + first + 32 * i);
    }
  }

  __device__ __forceinline__ void Store(Unit* to, int begin, int count) const {
    const int first = begin + static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < kPeerUnits; ++i) {
      if (first + 32 * i < count) to[first + 32 * i] = units[i];
    }
  }
};

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

// Parts of a row, one at least: what lies beside a row goes with its first one.
__device__ __forceinline__ int64_t PartsOf(int row_units) {
  return row_units > 0 ? (row_units + 32 * kPeerUnits - 1) / (32 * kPeerUnits) : 1;
}

// ---- dispatch -------------------------------------------------------------------------------

// Places of arrays in a half, in bytes: slots [n,T,K], tokens [n,T] and small numbers [n,T,S] by
// the device that they are from.
struct DispatchPlaces {
  int64_t tokens;
  int64_t small;
  int64_t end;
};

__host__ __device__ constexpr DispatchPlaces PlacesOf(const ExchangeSize& size,
                                                      int64_t token_bytes,
                                                      int64_t small_floats) {
  const int64_t rows = size.num_devices * size.num_tokens;
  const int64_t slots = PeerAligned(rows * size.top_k * 4);
  const int64_t tokens = PeerAligned(rows * token_bytes);
  return {slots, slots + tokens, slots + tokens + PeerAligned(rows * small_floats * 4)};
}

// Unit: what divides a row of tokens, whose units are read and written at once.
template <class Unit>
__device__ __forceinline__ void PushTokens(const Peers& peers,
                                           const PeerDispatchParams& params,
                                           uint32_t step,
                                           TokenRange range,
                                           Team team) {
  const ExchangeSize& size = params.size;
  const DispatchPlaces places = PlacesOf(size, params.token_bytes, params.small_floats);
  const int row_units = static_cast<int>(params.token_bytes / sizeof(Unit));
  const int small_floats = static_cast<int>(params.small_floats);
  const int top_k = static_cast<int>(size.top_k);
  const int64_t parts = PartsOf(row_units);
  const int64_t tasks = (range.end - range.begin) * parts;
  for (int64_t task = team.warp; task < tasks; task += team.warps) {
    const int64_t token = range.begin + task / parts;
    const int begin = static_cast<int>(task % parts) * 32 * kPeerUnits;
    const Unit* from = static_cast<const Unit*>(params.tokens) + token * row_units;
    const UnitsOfPart<Unit> part(from, begin, row_units);
    const int32_t* slots = params.slots + token * top_k;
    const unsigned devices = DevicesOf(slots, size);
    const int64_t row = peers.rank * size.num_tokens + token;  // there
    for (int turn = 1; turn < peers.num_devices; ++turn) {     // the own rows stay where they are
      const int device = (peers.rank + turn) % peers.num_devices;
      char* half = HalfOf(peers, device, step);
      if (begin == 0) {
        for (int k = threadIdx.x % 32; k < top_k; k += 32) {
          reinterpret_cast<int32_t*>(half)[row * top_k + k] = slots[k];
        }
      }
      if ((devices >> device & 1) == 0) continue;
      part.Store(reinterpret_cast<Unit*>(half + places.tokens) + row * row_units, begin, row_units);
      if (begin > 0) continue;
      float* small = reinterpret_cast<float*>(half + places.small) + row * small_floats;
      for (int i = threadIdx.x % 32; i < small_floats; i += 32) {
        small[i] = params.small[token * small_floats + i];
      }
    }
  }
}

template <class Unit>
__device__ __forceinline__ void TakeTokens(const Peers& peers,
                                           const PeerDispatchParams& params,
                                           uint32_t step,
                                           bool failed,
                                           TokenRange range,
                                           Team team) {
  const ExchangeSize& size = params.size;
  const DispatchPlaces places = PlacesOf(size, params.token_bytes, params.small_floats);
  const char* half = HalfOf(peers, peers.rank, step);
  const int row_units = static_cast<int>(params.token_bytes / sizeof(Unit));
  const int small_floats = static_cast<int>(params.small_floats);
  const int top_k = static_cast<int>(size.top_k);
  const int64_t parts = PartsOf(row_units);
  const int64_t tasks = (range.end - range.begin) * size.num_devices * parts;
  for (int64_t task = team.warp; task < tasks; task += team.warps) {
    RowPart part = PartAt(task, parts, 32 * kPeerUnits, size, peers.rank);
    part.token += range.begin;
    const int64_t row = part.device * size.num_tokens + part.token;
    const bool own = part.device == peers.rank;
    const int32_t* slots = own ? params.slots + part.token * top_k
                               : reinterpret_cast<const int32_t*>(half) + row * top_k;
    const bool comes = !failed && HasChoice(slots, size, peers.rank);
    const Unit* from = own ? static_cast<const Unit*>(params.tokens) + part.token * row_units
                           : reinterpret_cast<const Unit*>(half + places.tokens) + row * row_units;
    Unit* to = static_cast<Unit*>(params.all_tokens) + row * row_units;
    if (comes) {
      UnitsOfPart<Unit>(from, part.begin, row_units).Store(to, part.begin, row_units);
    } else {
      FillUnits(to, AllBits<Unit>(failed), part.begin, row_units);
    }
    if (part.begin > 0) continue;
    for (int k = threadIdx.x % 32; k < top_k; k += 32) {
      params.all_slots[row * top_k + k] = failed ? -1 : __ldcg(slots + k);
    }
    const float* small =
        own ? params.small + part.token * small_floats
            : reinterpret_cast<const float*>(half + places.small) + row * small_floats;
    for (int i = threadIdx.x % 32; i < small_floats; i += 32) {
      const float nothing = failed ? __uint_as_float(0xffffffffu) : 0.0f;
      params.all_small[row * small_floats + i] = comes ? __ldcg(small + i) : nothing;
    }
  }
}

template <class Unit>
__global__ void __launch_bounds__(kManyThreads, 1) PeerDispatchKernel(PeerDispatchParams params) {
  const Peers& peers = *params.peers;
  InChunks(
      peers,
      params.size,
      params.place,
      [&](uint32_t step, TokenRange tokens, Team team) {
        PushTokens<Unit>(peers, params, step, tokens, team);
      },
      [&](uint32_t step, bool failed, TokenRange tokens, Team team) {
        TakeTokens<Unit>(peers, params, step, failed, tokens, team);
      });
}

// ---- combine --------------------------------------------------------------------------------

// A half holds the rows [n, T, H] by the device that sends them, and small numbers [n, T, S] here.
__device__ __forceinline__ int64_t SmallPlace(const PeerCombineParams& params) {
  const int64_t row_bytes = params.hidden * ElementSize(params.dtype);
  return PeerAligned(params.size.num_devices * params.size.num_tokens * row_bytes);
}

template <class Unit>
__device__ __forceinline__ void PushSums(const Peers& peers,
                                         const PeerCombineParams& params,
                                         uint32_t step,
                                         int row_units,
                                         TokenRange range,
                                         Team team) {
  const ExchangeSize& size = params.size;
  const int64_t small_place = SmallPlace(params);
  const int64_t parts = PartsOf(row_units);
  const int64_t tasks = (range.end - range.begin) * size.num_devices * parts;
  for (int64_t task = team.warp; task < tasks; task += team.warps) {
    RowPart part = PartAt(task, parts, 32 * kPeerUnits, size, peers.rank);
    part.token += range.begin;
    const int64_t row = part.device * size.num_tokens + part.token;
    if (part.device == peers.rank) continue;  // read where it is
    if (!HasChoice(params.all_slots + row * size.top_k, size, peers.rank)) continue;
    const int64_t place = peers.rank * size.num_tokens + part.token;
    char* half = HalfOf(peers, part.device, step);
    const Unit* from = static_cast<const Unit*>(params.rows) + row * row_units;
    Unit* to = reinterpret_cast<Unit*>(half) + place * row_units;
    UnitsOfPart<Unit>(from, part.begin, row_units).Store(to, part.begin, row_units);
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

  static __device__ __forceinline__ int UnitsOf(int row_pieces) { return row_pieces; }
  static __device__ __forceinline__ int ColumnOf(int unit, int) { return unit; }

  __device__ __forceinline__ Bits Piece(int device, int64_t token, int column) const {
    return __ldcg(rows + (device * params.size.num_tokens + token) * row_pieces + column);
  }

  template <int kDevices, int kColumns>
  __device__ __forceinline__ void Await(
      Bits (&)[kDevices][kColumns], unsigned, int, int64_t, int, int) const {}

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
  const float* own =
      params.small + (peers.rank * params.size.num_tokens + token) * params.small_floats;
  for (int i = threadIdx.x % 32; i < params.small_floats; i += 32) {
    float sum = failed ? __uint_as_float(0x7fffffffu) : 0.0f;
    for (int device = 0; device < peers.num_devices && !failed; ++device) {
      if ((devices >> device & 1) == 0) continue;
      sum += device == peers.rank ? __ldcg(own + i) : received.Small(device, token, i);
    }
    params.small_sum[token * params.small_floats + i] = sum;
  }
}

// A lane sums kColumns pieces of kSize elements of T, of kDevices at a time. Rows lie in From in
// units, whose column is that of a piece, or none.
template <typename T, int kSize, int kColumns, int kDevices, class From>
__device__ __forceinline__ void Sum(const Peers& peers,
                                    const PeerCombineParams& params,
                                    const From& received,
                                    bool failed,
                                    int row_pieces,
                                    TokenRange range,
                                    Team team) {
  using P = Piece<T, kSize>;
  using Bits = typename P::Bits;
  constexpr int kPart = 32 * kColumns;
  const ExchangeSize& size = params.size;
  const int rank = peers.rank, num_devices = peers.num_devices;
  const Bits* own_rows = static_cast<const Bits*>(params.own);
  const Bits* residuals = static_cast<const Bits*>(params.residual);
  const int units = From::UnitsOf(row_pieces);
  const int64_t parts = (units + kPart - 1) / kPart;
  const int64_t tasks = (range.end - range.begin) * parts;
  for (int64_t task = team.warp; task < tasks; task += team.warps) {
    const int64_t token = range.begin + task / parts;
    const int first = static_cast<int>(task % parts) * kPart + static_cast<int>(threadIdx.x % 32);
    Bits own[kColumns];
    Bits residual[kColumns];
    float sum[kColumns][kSize];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = From::ColumnOf(first + 32 * c, row_pieces);
      if (column >= row_pieces) continue;
      own[c] = P::Load(own_rows + token * row_pieces + column);
      if (residuals != nullptr) residual[c] = P::Load(residuals + token * row_pieces + column);
#pragma unroll
      for (int i = 0; i < kSize; ++i) sum[c][i] = failed ? __uint_as_float(0x7fffffffu) : 0.0f;
    }
    unsigned devices = DevicesOf(params.slots + token * size.top_k, size);
    if (failed) devices = 0;
    if (task % parts == 0) SumSmall(peers, params, received, failed, token, devices);
    float term[kSize];
    for (int begin = 0; begin < num_devices; begin += kDevices) {
      typename From::Read read[kDevices][kColumns];
#pragma unroll
      for (int u = 0; u < kDevices; ++u) {
        const int device = begin + u;
        if ((devices >> device & 1) == 0 || device == rank) continue;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const int unit = first + 32 * c;
          if (unit < units) read[u][c] = received.Piece(device, token, unit);
        }
      }
      received.Await(read, devices & ~(1u << rank), begin, token, first, units);
#pragma unroll
      for (int u = 0; u < kDevices; ++u) {
        const int device = begin + u;
        if ((devices >> device & 1) == 0) continue;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const int column = From::ColumnOf(first + 32 * c, row_pieces);
          if (column >= row_pieces) continue;
          P::Unpack(device == rank ? own[c] : received.Arrived(read[u][c], device, token, column),
                    term);
#pragma unroll
          for (int i = 0; i < kSize; ++i) sum[c][i] += term[i];
        }
      }
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = From::ColumnOf(first + 32 * c, row_pieces);
      if (column >= row_pieces) continue;
      if (residuals != nullptr) {
        P::Unpack(residual[c], term);
#pragma unroll
        for (int i = 0; i < kSize; ++i) sum[c][i] += term[i];
      }
      static_cast<Bits*>(params.y)[token * row_pieces + column] = P::Pack(sum[c]);
    }
  }
}

template <typename T, int kSize>
__global__ void __launch_bounds__(kManyThreads, 1)
    PeerCombineKernel(PeerCombineParams params, int row_pieces) {
  using Unit = UnitOf<T, kSize>;
  using Bits = typename Piece<T, kSize>::Bits;
  const Peers& peers = *params.peers;
  InChunks(
      peers,
      params.size,
      params.place,
      [&](uint32_t step, TokenRange tokens, Team team) {
        PushSums<Unit>(peers, params, step, row_pieces, tokens, team);
      },
      [&](uint32_t step, bool failed, TokenRange tokens, Team team) {
        const Received<Bits> received(peers, params, step, row_pieces);
        Sum<T, kSize, 2, 2>(peers, params, received, failed, row_pieces, tokens, team);
      });
}

}  // namespace jaxmoe
