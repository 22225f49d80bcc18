// Rows in pairs: 8 bytes of data in 16, each 4 beside the step's number, with which they arrive at
// once. That holds on every link: memory is written 8 bytes at a time or more. As NCCL's protocol
// LL.
#pragma once

#include <cstdint>

#include "csrc/peers/step.cuh"

namespace jaxmoe {

// 8 bytes of data. In the memory of a step they are 16: {word, step, word, step}.
inline constexpr int64_t kPairBytes = 8;

__host__ __device__ constexpr int64_t PairsOf(int64_t bytes) {
  return (bytes + kPairBytes - 1) / kPairBytes;
}

// Parts of a row of so many units of 16 bytes on their way, each of `count` of a lane; one at
// least.
__host__ __device__ constexpr int64_t FewParts(int64_t units, int count) {
  return units > 0 ? (units + 32 * count - 1) / (32 * count) : 1;
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
      pair = LoadNow(from);
    }
  }
  return make_uint2(pair.x, pair.z);
}

__device__ __forceinline__ uint2 ReceivePair(const Peers& peers,
                                             const uint4* from,
                                             uint32_t step,
                                             int device) {
  return Arrived(peers, LoadNow(from), from, step, device);
}

// Calls use(j, unit of the row) for this lane's units of a part, of kCount at most.
template <int kCount, class Use>
__device__ __forceinline__ void ForEachUnit(int begin, int units, const Use& use) {
  const int first = begin + static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    if (first + 32 * j < units) use(j, first + 32 * j);
  }
}

// A row in pairs, as Lines is one in lines: a unit is a pair.
struct Pairs {
  using Data = uint2;
  static constexpr bool kHavePart = false;
  static constexpr int kSent = 4;  // units that a lane moves at once: 1 KiB of a row a warp
  static constexpr int kTaken = 4;

  int units;

  explicit __host__ __device__ Pairs(int64_t row_bytes)
      : units(static_cast<int>(PairsOf(row_bytes))) {}

  static __device__ __forceinline__ Data Load(const void* row, int unit) {
    return static_cast<const uint2*>(row)[unit];
  }

  static __device__ __forceinline__ void Put(void* row, int unit, Data data) {
    static_cast<uint2*>(row)[unit] = data;
  }

  static __device__ __forceinline__ void Send(uint4* to, int unit, Data data, uint32_t step) {
    StorePairs(to + unit, data, step);
  }

  static __device__ __forceinline__ Data Fill(uint32_t word) { return make_uint2(word, word); }

  static __device__ __forceinline__ Data DataOf(uint4 read) { return make_uint2(read.x, read.z); }

  // Waits for a warp's part of a row that it has begun to read.
  __device__ __forceinline__ void Await(const Peers& peers,
                                        uint4 (&read)[kTaken],
                                        const uint4* row,
                                        int begin,
                                        uint32_t step,
                                        int device) const {
    ForEachUnit<kTaken>(begin, units, [&](int j, int unit) {
      const uint2 data = Arrived(peers, read[j], row + unit, step, device);
      read[j] = make_uint4(data.x, step, data.y, step);
    });
  }
};

// Sends floats of a warp, `count` of them, as pairs.
__device__ __forceinline__ void SendFloats(uint4* to, const float* from, int count, uint32_t step) {
  for (int i = threadIdx.x % 32; 2 * i < count; i += 32) {
    const float second = 2 * i + 1 < count ? from[2 * i + 1] : 0.0f;
    StorePairs(to + i, make_uint2(__float_as_uint(from[2 * i]), __float_as_uint(second)), step);
  }
}

}  // namespace jaxmoe
