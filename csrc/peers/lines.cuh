// Rows in lines of 128 bytes, each of which says that it is there: 112 of data and the step's
// number in the last 16, which come after the data.
//
// 8/7 of the bytes of rows, where pairs (few.cuh) are twice as many; but a line is read once more
// when its number has been seen, some 0.7 us, so pairs stay where there is little to send. NCCL's
// LL128 has 120 bytes of data: 7 % more, but then 16 bytes of a row may lie in two lines, and lanes
// would trade halves.
//
// Why the data are there when the number is. The lanes of a line store it in one instruction, as
// one write of 128 bytes. That it arrives whole, or at least in the order of its addresses, is
// promised by nobody, and it is what NCCL's LL128 relies on (prims_ll128.h): the memory system,
// NVLink and NVSwitch between GPUs of one kind keep it so. NCCL does that unasked where GPUs of
// compute capability 7.0, 8.0 or 9.0 are all joined by NVLink, and not over PCIe, where the halves
// of a line may pass each other. So memory has a part for lines where CUDA says that each link has
// native atomics, as NVLink does and PCIe does not; where one has none, or a process cannot see a
// GPU of another, pairs are all there is (HasNativeAtomics in memory.cc).
//   A load of a line may find a part of it from before and a part from after it came, also the
//   number from after: so the data are those of loads that begin when it has been seen.
//   Numbers of other steps: nothing but lines ever lies in that part, each at a multiple of 128, so
//   where a number belongs there is none but this step's, that of an earlier one, or the 0 that
//   memory begins with. The half of step e has lines of e - 2, e - 4 and so on, and those of e + 2
//   are not sent before this device has finished e (memory.h). 2^32 steps later numbers come again.
#pragma once

#include <cstdint>

#include "csrc/peers/pairs.cuh"
#include "csrc/peers/step.cuh"

namespace jaxmoe {

inline constexpr int kLineUnits = kPeerLineBytes / 16;
inline constexpr int kLinePieces = kLineUnits - 1;  // units that are data

// Of a warp: waits until lines are there that it has begun to read, and reads them once more.
// for_each(use) calls use(data, from, device) for all that this lane has read: 16 bytes of a line
// of a device, and from where. Where a device is gone all bits are 1.
template <class ForEach>
__device__ __forceinline__ void AwaitLines(const Peers& peers,
                                           uint32_t step,
                                           const ForEach& for_each) {
  const bool has_number = threadIdx.x % kLineUnits == kLinePieces;
  const auto read_again = [](uint4& data, const uint4* from, int) { data = LoadNow(from); };
  uint64_t begin = 0;
  for (int tries = 1;; ++tries) {
    int missing = -1;  // a device whose line is not there
    for_each([&](const uint4& data, const uint4*, int device) {
      if (has_number && (data.y != step || data.w != step)) missing = device;
    });
    if (!__any_sync(0xffffffffu, missing >= 0)) break;
    if (tries == 1) begin = GlobalTimer();
    if (tries % 16 == 0) {
      const bool stops = missing >= 0 && GivesUp(peers, step, missing, begin);
      if (__any_sync(0xffffffffu, stops)) {
        for_each([](uint4& data, const uint4*, int) {
          data = make_uint4(0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu);
        });
        return;
      }
    }
    for_each(read_again);
  }
  for_each(read_again);
}

// A row in lines. Unit i on its way is 16 bytes: piece i - i / 8 of the row, or the number.
struct Lines {
  using Data = uint4;
  static constexpr bool kHavePart = true;  // of the memory, and rows do not lie among pairs
  static constexpr int kSent = 4;          // units that a lane sends at once: 1.75 KiB a warp
  static constexpr int kTaken = 8;         // and takes, as each time is two trips

  int pieces;
  int units;

  explicit __host__ __device__ Lines(int64_t row_bytes)
      : pieces(static_cast<int>(row_bytes / 16)),
        units((pieces + kLinePieces - 1) / kLinePieces * kLineUnits) {}

  static __device__ __forceinline__ int PieceOf(int unit) { return unit - unit / kLineUnits; }

  __device__ __forceinline__ bool HasPiece(int unit) const {
    return unit % kLineUnits < kLinePieces && PieceOf(unit) < pieces;
  }

  __device__ __forceinline__ Data Load(const void* row, int unit) const {
    if (!HasPiece(unit)) return make_uint4(0, 0, 0, 0);
    return static_cast<const uint4*>(row)[PieceOf(unit)];
  }

  __device__ __forceinline__ void Put(void* row, int unit, Data data) const {
    if (HasPiece(unit)) static_cast<uint4*>(row)[PieceOf(unit)] = data;
  }

  static __device__ __forceinline__ void Send(uint4* to, int unit, Data data, uint32_t step) {
    const bool has_number = unit % kLineUnits == kLinePieces;  // no branch: it is one store
    data.x = has_number ? step : data.x;
    data.y = has_number ? step : data.y;
    data.z = has_number ? step : data.z;
    data.w = has_number ? step : data.w;
    StoreLine(to + unit, data);
  }

  static __device__ __forceinline__ Data Fill(uint32_t word) {
    return make_uint4(word, word, word, word);
  }

  static __device__ __forceinline__ Data DataOf(uint4 read) { return read; }

  // Waits for a warp's part of a row that it has begun to read, for all of its lanes.
  __device__ __forceinline__ void Await(const Peers& peers,
                                        uint4 (&read)[kTaken],
                                        const uint4* row,
                                        int begin,
                                        uint32_t step,
                                        int device) const {
    AwaitLines(peers, step, [&](const auto& use) {
      ForEachUnit<kTaken>(begin, units, [&](int j, int unit) { use(read[j], row + unit, device); });
    });
  }
};

}  // namespace jaxmoe
