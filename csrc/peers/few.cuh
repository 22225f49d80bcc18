// Dispatch and combine of few tokens, each one launch of CTAs that all run at once.
//
// What takes long there is not bytes but trips between devices, so nothing waits for a flag that is
// written behind data: every 8 bytes carry the step's number (pairs.cuh), or every 128 of rows
// where bytes do count (lines.cuh), and whoever wants them reads until it is there. Rows are pushed
// either way. The flags of a step go first, before any data; a device that has seen all of them
// knows that the others take this step too, and how far they are.
//   dispatch: slots and rows are pushed to the devices that a token has a choice on.
//   combine: rows of sums are pushed to the device of their token, which adds them up.
// Bytes a device sends: T p (n - 1) rows, twice as pairs, 8/7 as lines: for deepseek-v3 T = 64 and
//   n = 4 5.0 or 2.8 MB, 16.5 or 9.4 us at 300 GB/s. Trips: the arguments of the step, slots and
//   rows, the way there, the reading: 5 us predicted in place of the 18 us that a launch with one
//   barrier behind its data took. A warp that reads several parts of rows takes a trip for each,
//   and two where they are lines, so lanes read more of these at once.
#pragma once

#include "csrc/peers/exchange.cuh"
#include "csrc/peers/lines.cuh"
#include "csrc/peers/pairs.cuh"

namespace jaxmoe {

// Where arrays of one device lie in the memory of another.
struct FewPlaces {
  uint4* slots;  // of its tokens
  uint4* rows;
  uint4* small;
};

// Where what travels in a step begins in the memory of any device, in bytes. Slots, rows that are
// pairs, and small numbers lie one after the other, each by device; lines have a part of their own.
// NOTE: made once, as what lies in `peers` is read again after each volatile access.
template <class Row>
struct FewLayout {
  Row row;
  int64_t num_tokens;
  int64_t slot_pairs;   // of a device
  int64_t small_pairs;  // of a token
  int64_t slots, rows, small;

  __device__ FewLayout(const Peers& peers,
                       const ExchangeSize& size,
                       uint32_t step,
                       int64_t row_bytes,
                       int64_t slot_bytes,
                       int64_t small_floats)
      : row(row_bytes),
        num_tokens(size.num_tokens),
        slot_pairs(PairsOf(slot_bytes)),
        small_pairs(PairsOf(small_floats * 4)) {
    constexpr int64_t kUnit = sizeof(uint4);
    const int64_t n = size.num_devices;
    slots = FewOf(peers, peers.rank, step) - peers.bases[peers.rank];
    const int64_t after_slots = slots + n * slot_pairs * kUnit;
    if constexpr (Row::kHavePart) {
      rows = slots + peers.few_bytes - peers.line_bytes;
      small = after_slots;
    } else {
      rows = after_slots;
      small = rows + n * num_tokens * row.units * kUnit;
    }
  }

  // Of a device, in memory that begins there.
  __device__ __forceinline__ FewPlaces Of(int device, char* memory) const {
    const int64_t token = device * num_tokens;
    return {reinterpret_cast<uint4*>(memory + slots) + device * slot_pairs,
            reinterpret_cast<uint4*>(memory + rows) + token * row.units,
            reinterpret_cast<uint4*>(memory + small) + token * small_pairs};
  }
};

// Sends a warp's part of a row. Whole lines are stored: 8 lanes have a unit each, or none.
template <class Row>
__device__ __forceinline__ void SendPart(
    uint4* to, const typename Row::Data (&data)[Row::kSent], int begin, int units, uint32_t step) {
  __syncwarp();
  ForEachUnit<Row::kSent>(
      begin, units, [&](int j, int unit) { Row::Send(to, unit, data[j], step); });
}

// ---- dispatch -------------------------------------------------------------------------------

template <class Row>
__device__ __forceinline__ FewLayout<Row> FewLayoutOf(const Peers& peers,
                                                      const PeerDispatchParams& params,
                                                      uint32_t step) {
  const ExchangeSize& size = params.size;
  const int64_t slot_bytes = size.num_tokens * size.top_k * 4;
  return {peers, size, step, params.token_bytes, slot_bytes, params.small_floats};
}

template <class Row>
__device__ __forceinline__ void SendFew(const Peers& peers,
                                        const PeerDispatchParams& params,
                                        uint32_t step) {
  const ExchangeSize& size = params.size;
  const FewLayout<Row> layout = FewLayoutOf<Row>(peers, params, step);
  const int rank = peers.rank, num_devices = peers.num_devices;
  const int64_t slots = size.num_tokens * size.top_k;
  const Team team = WholeGrid();
  const int64_t thread = team.warp * 32 + threadIdx.x % 32;
  for (int64_t i = thread; i < layout.slot_pairs; i += team.warps * 32) {
    const int32_t first = params.slots[2 * i];
    const int32_t second = 2 * i + 1 < slots ? params.slots[2 * i + 1] : -1;
#pragma unroll 1
    for (int device = 0; device < num_devices; ++device) {
      if (device == rank) continue;
      StorePairs(layout.Of(rank, peers.bases[device]).slots + i,
                 make_uint2(static_cast<uint32_t>(first), static_cast<uint32_t>(second)),
                 step);
    }
  }
  const Row& row = layout.row;
  const int64_t parts = FewParts(row.units, Row::kSent);
  for (int64_t task = team.warp; task < size.num_tokens * parts; task += team.warps) {
    const int64_t token = task / parts;
    const int begin = static_cast<int>(task % parts) * 32 * Row::kSent;
    const char* from = static_cast<const char*>(params.tokens) + token * params.token_bytes;
    typename Row::Data data[Row::kSent];
    ForEachUnit<Row::kSent>(
        begin, row.units, [&](int j, int unit) { data[j] = row.Load(from, unit); });
    unsigned devices = DevicesOf(params.slots + token * size.top_k, size);
    devices &= ~(1u << rank);
    for (int turn = 1; devices != 0; ++turn) {  // each device begins with the one after it
      const int device = (rank + turn) % num_devices;
      if ((devices >> device & 1) == 0) continue;
      devices &= ~(1u << device);
      const FewPlaces places = layout.Of(rank, peers.bases[device]);
      SendPart<Row>(places.rows + token * row.units, data, begin, row.units, step);
      if (begin > 0) continue;
      SendFloats(places.small + token * layout.small_pairs,
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

template <class Row>
__device__ __forceinline__ void ReceiveFew(const Peers& peers,
                                           const PeerDispatchParams& params,
                                           uint32_t step,
                                           bool failed) {
  constexpr int kCount = Row::kTaken;
  const ExchangeSize& size = params.size;
  const int top_k = static_cast<int>(size.top_k);
  const int small_floats = static_cast<int>(params.small_floats);
  const FewLayout<Row> layout = FewLayoutOf<Row>(peers, params, step);
  const int rank = peers.rank;
  char* memory = peers.bases[rank];
  const Row& row = layout.row;
  const int64_t parts = FewParts(row.units, kCount);
  const int64_t first_slot = rank * size.num_local;
  const Team team = WholeGrid();
  const int64_t tasks = size.num_tokens * size.num_devices * parts;
  const unsigned nothing = failed ? 0xffffffffu : 0u;
  for (int64_t task = team.warp; task < tasks; task += team.warps) {
    const RowPart part = PartAt(task, parts, 32 * kCount, size, rank);
    const FewPlaces places = layout.Of(part.device, memory);
    const int64_t index = part.device * size.num_tokens + part.token;
    const bool own = part.device == rank;
    const char* tokens = static_cast<const char*>(params.tokens) + part.token * params.token_bytes;
    const uint4* from = places.rows + part.token * row.units;
    uint4 read[kCount];  // before it is known whether the row comes, as both take a trip
    ForEachUnit<kCount>(part.begin, row.units, [&](int j, int unit) {
      if (!failed && !own) read[j] = LoadNow(from + unit);
    });
    bool here = false;
    for (int k = threadIdx.x % 32; k < top_k; k += 32) {
      const int64_t at = part.token * top_k + k;
      int32_t slot = -1;
      if (!failed) {
        slot = own ? params.slots[at] : ReceiveSlot(peers, places.slots, at, step, part.device);
      }
      here |= slot >= first_slot && slot < first_slot + size.num_local;
      if (part.begin == 0) params.all_slots[index * top_k + k] = slot;
    }
    const bool comes = __any_sync(0xffffffffu, here);
    if (comes && !own) row.Await(peers, read, from, part.begin, step, part.device);
    char* to = static_cast<char*>(params.all_tokens) + index * params.token_bytes;
    ForEachUnit<kCount>(part.begin, row.units, [&](int j, int unit) {
      row.Put(to,
              unit,
              !comes ? Row::Fill(nothing)
              : own  ? row.Load(tokens, unit)
                     : Row::DataOf(read[j]));
    });
    if (part.begin > 0) continue;
    const float* small = params.small + part.token * small_floats;
    const uint4* small_from = places.small + part.token * layout.small_pairs;
    float* small_to = params.all_small + index * small_floats;
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

// Row: Pairs or Lines, in which rows travel; what lies beside them are pairs.
template <class Row>
__global__ void __launch_bounds__(kFewThreads, 1) PeerFewDispatchKernel(PeerDispatchParams params) {
  const Peers& peers = *params.peers;
  const uint32_t step = NextStep(peers);
  if (Begins(peers, params.size, params.place, step)) {
    if (blockIdx.x == 0) Announce(peers, step, params.size.tag);
    SendFew<Row>(peers, params, step);
  }
  ReceiveFew<Row>(peers, params, step, WaitForStep(peers, step, params.size.tag));
  FinishStep(peers, step);
}

// ---- combine --------------------------------------------------------------------------------

template <class Row>
__device__ __forceinline__ FewLayout<Row> FewLayoutOf(const Peers& peers,
                                                      const PeerCombineParams& params,
                                                      uint32_t step) {
  const int64_t row_bytes = params.hidden * ElementSize(params.dtype);
  return {peers, params.size, step, row_bytes, 0, params.small_floats};
}

template <class Row>
__device__ __forceinline__ void SendFew(const Peers& peers,
                                        const PeerCombineParams& params,
                                        uint32_t step) {
  const ExchangeSize& size = params.size;
  const FewLayout<Row> layout = FewLayoutOf<Row>(peers, params, step);
  const int rank = peers.rank;
  const Row& row = layout.row;
  const int64_t row_bytes = params.hidden * ElementSize(params.dtype);
  const int64_t parts = FewParts(row.units, Row::kSent);
  const Team team = WholeGrid();
  const int64_t tasks = size.num_tokens * size.num_devices * parts;
  for (int64_t task = team.warp; task < tasks; task += team.warps) {
    const RowPart part = PartAt(task, parts, 32 * Row::kSent, size, rank);
    if (part.device == rank) continue;  // read where it is
    const int64_t index = part.device * size.num_tokens + part.token;
    const char* from = static_cast<const char*>(params.rows) + index * row_bytes;
    typename Row::Data data[Row::kSent];
    ForEachUnit<Row::kSent>(
        part.begin, row.units, [&](int j, int unit) { data[j] = row.Load(from, unit); });
    if (!HasChoice(params.all_slots + index * size.top_k, size, rank)) continue;
    const FewPlaces places = layout.Of(rank, peers.bases[part.device]);
    SendPart<Row>(places.rows + part.token * row.units, data, part.begin, row.units, step);
    if (part.begin > 0) continue;
    SendFloats(places.small + part.token * layout.small_pairs,
               params.small + index * params.small_floats,
               static_cast<int>(params.small_floats),
               step);
  }
}

// Rows and small numbers that others have sent, for Sum.
template <class Row>
struct FewReceived {
  const Peers& peers;
  uint32_t step;
  FewLayout<Row> layout;
  char* memory;

  __device__ FewReceived(const Peers& peers, const PeerCombineParams& params, uint32_t step)
      : peers(peers),
        step(step),
        layout(FewLayoutOf<Row>(peers, params, step)),
        memory(peers.bases[peers.rank]) {}

  __device__ __forceinline__ const uint4* RowOf(int device, int64_t token) const {
    return layout.Of(device, memory).rows + token * layout.row.units;
  }

  __device__ __forceinline__ float Small(int device, int64_t token, int i) const {
    const uint4* small = layout.Of(device, memory).small + token * layout.small_pairs;
    const uint2 pair = ReceivePair(peers, small + i / 2, step, device);
    return __uint_as_float(i % 2 == 0 ? pair.x : pair.y);
  }
};

struct PairsReceived : FewReceived<Pairs> {
  using FewReceived::FewReceived;
  static constexpr int kColumns = 1;

  // 16 bytes of a row, as they were read.
  struct Read {
    uint4 first, second;
  };

  static __device__ __forceinline__ int UnitsOf(int row_pieces) { return row_pieces; }
  static __device__ __forceinline__ int ColumnOf(int unit, int) { return unit; }

  __device__ __forceinline__ Read Piece(int device, int64_t token, int column) const {
    const uint4* from = RowOf(device, token) + 2 * column;
    return {LoadNow(from), LoadNow(from + 1)};
  }

  template <int kDevices>
  __device__ __forceinline__ void Await(
      Read (&)[kDevices][kColumns], unsigned, int, int64_t, int, int) const {}

  __device__ __forceinline__ uint4 Arrived(Read read, int device, int64_t token, int column) const {
    const uint4* from = RowOf(device, token) + 2 * column;
    const uint2 first = jaxmoe::Arrived(peers, read.first, from, step, device);
    const uint2 second = jaxmoe::Arrived(peers, read.second, from + 1, step, device);
    return make_uint4(first.x, first.y, second.x, second.y);
  }
};

struct LinesReceived : FewReceived<Lines> {
  using FewReceived::FewReceived;
  static constexpr int kColumns = 2;
  using Read = uint4;

  static __device__ __forceinline__ int UnitsOf(int row_pieces) {
    return Lines(int64_t{16} * row_pieces).units;
  }

  static __device__ __forceinline__ int ColumnOf(int unit, int row_pieces) {
    return unit % kLineUnits < kLinePieces ? Lines::PieceOf(unit) : row_pieces;
  }

  __device__ __forceinline__ Read Piece(int device, int64_t token, int unit) const {
    return LoadNow(RowOf(device, token) + unit);
  }

  template <int kDevices>
  __device__ __forceinline__ void Await(Read (&read)[kDevices][kColumns],
                                        unsigned devices,
                                        int begin,
                                        int64_t token,
                                        int first,
                                        int units) const {
    AwaitLines(peers, step, [&](const auto& use) {
#pragma unroll
      for (int u = 0; u < kDevices; ++u) {
        const int device = begin + u;
        if ((devices >> device & 1) == 0) continue;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const int unit = first + 32 * c;
          if (unit < units) use(read[u][c], RowOf(device, token) + unit, device);
        }
      }
    });
  }

  __device__ __forceinline__ uint4 Arrived(Read read, int, int64_t, int) const { return read; }
};

// From: PairsReceived or LinesReceived, of the rows in which sums travel.
template <typename T, class Row, class From>
__global__ void __launch_bounds__(kFewThreads, 1) PeerFewCombineKernel(PeerCombineParams params) {
  constexpr int kSize = 16 / sizeof(T);
  const Peers& peers = *params.peers;
  const uint32_t step = NextStep(peers);
  if (Begins(peers, params.size, params.place, step)) {
    if (blockIdx.x == 0) Announce(peers, step, params.size.tag);
    SendFew<Row>(peers, params, step);
  }
  const bool failed = WaitForStep(peers, step, params.size.tag);
  const int row_pieces = static_cast<int>(params.hidden / kSize);
  const From received(peers, params, step);
  const TokenRange all{0, params.size.num_tokens};
  Sum<T, kSize, From::kColumns, 4>(peers, params, received, failed, row_pieces, all, WholeGrid());
  FinishStep(peers, step);
}

}  // namespace jaxmoe
