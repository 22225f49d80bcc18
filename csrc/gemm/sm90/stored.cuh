// What a kernel of both products does with tiles of the gate-up product when they are stored.
//
// Most are counted: MoeLayerArgs::stored has, at the first row of a token tile, how many weight
// tiles of it are. Where groups of 128 features share a scale, two tiles have one: the second of
// them to come quantizes it, and quantized groups are counted.
//
//   stored = groups quantized | bit kStoredCountBits + g: one of the two tiles of group g has come
#pragma once

#include "csrc/common/counters.cuh"
#include "csrc/common/piece.cuh"
#include "csrc/common/quant_scale.cuh"
#include "csrc/gemm/sm90/producer.cuh"

namespace jaxmoe {

// Counts tiles. A warp of its own, as the fence before an addition takes a microsecond.
template <class T>
__device__ __forceinline__ void RunStoredCounter(const MoeLayerArgs& args,
                                                 const SharedStorage<T>& smem,
                                                 int lane) {
  const bool sum_is_here = T::kSplitK == 1 || ptx::ClusterRank() == 0;
  ForEachTile(smem, lane, [&](const TileInfo& info, const auto& slot) {
    if (!info.second() && sum_is_here) {
      ptx::BarrierWait(smem.stored(slot.index()), slot.parity());
      if (lane == 0) ptx::AddRelease(args.stored + info.row);
    }
    slot.Release();
  });
}

// Rows of one group of 128 features, which a warp quantizes to the bit as LaunchQuantize does: a
// lane has four features of eight rows. What follows from one another takes long, so all rows do it
// at once, and one division is that of all.
template <class Element>
class GroupOfRows {
 public:
  static constexpr int kRows = 8;

  // Elements of a row from `x` on, or zeros, where there are no more features or rows.
  __device__ __forceinline__ GroupOfRows(const uint2* x, int64_t pitch, int rows, bool exists) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      bits_[i] = i < rows && exists ? __ldcg(x + i * pitch) : uint2{};
    }
  }

  // Four values of each row; returns the scale of row `lane`.
  __device__ __forceinline__ float Quantize(uint32_t (&values)[kRows], int lane) const {
    uint32_t largest[kRows];
    bool finite = true;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      largest[i] = OverWarp(M::Max(bits_[i].x & M::kNoSign, bits_[i].y & M::kNoSign));
      finite = finite && M::AllFinite(largest[i]);
    }
    if (!finite) {  // rare, and larger than all others
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        largest[i] = OverWarp(
            M::Max(M::Finite(bits_[i].x & M::kNoSign), M::Finite(bits_[i].y & M::kNoSign)));
      }
    }
    uint32_t mine = largest[0];
#pragma unroll
    for (int i = 1; i < kRows; ++i) mine = lane == i ? largest[i] : mine;
    const float scale = QuantScale(M::ToFloat(mine, 0), kLargestE4M3);
    const float inverse = __frcp_rn(scale);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float row[8];
      Piece<Element, 8>::Unpack(make_uint4(bits_[i].x, bits_[i].y, 0, 0), row);
      values[i] = ToFp8<__NV_E4M3>(row, __shfl_sync(0xffffffffu, inverse, i));
    }
    return scale;
  }

 private:
  using M = Magnitude<Element>;
  static_assert(sizeof(Element) == 2);

  static __device__ __forceinline__ unsigned OverWarp(uint32_t pair) {
    return __reduce_max_sync(0xffffffffu, max(pair & 0xffffu, pair >> 16));
  }

  uint2 bits_[kRows];
};

// Quantizes group `group` of the rows of a gate-up tile, as a warp.
template <class Element>
__device__ __forceinline__ void QuantizeStoredGroup(const MoeLayerArgs& args,
                                                    const TileInfo& info,
                                                    int group,
                                                    int lane) {
  constexpr int kRows = GroupOfRows<Element>::kRows;
  const int features = args.products[0].n_out;
  const int pitch = features / 4;
  const int groups = (features + 127) / 128;
  const int word = 32 * group + lane;
  const bool exists = word < pitch;
  for (int first = 0; first < info.rows; first += kRows) {
    const int rows = min(info.rows - first, kRows);
    const int64_t at = static_cast<int64_t>(info.row + first) * pitch + word;
    const GroupOfRows<Element> x(
        static_cast<const uint2*>(args.products[0].out) + at, pitch, rows, exists);
    uint32_t values[kRows];
    const float scale = x.Quantize(values, lane);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (i < rows && exists) static_cast<uint32_t*>(args.act_values)[at + i * pitch] = values[i];
    }
    if (lane < rows) {
      args.act_scales[static_cast<int64_t>(info.row + first + lane) * groups + group] = scale;
    }
  }
}

// A stored gate-up tile of a layer with groups that share a scale, as a warp.
__device__ __forceinline__ void QuantizeIfSecond(const MoeLayerArgs& args,
                                                 const TileInfo& info,
                                                 int lane) {
  constexpr unsigned kAll = 0xffffffffu;
  int* const stored = args.stored + info.row;
  const int group = info.w_tile / 2;
  if (group * 2 + 1 < args.products[0].num_w_tiles) {  // else it has the group alone
    const int bit = 1 << (kStoredCountBits + group);
    const int before = lane == 0 ? ptx::FlipBits(stored, bit) : 0;
    if ((__shfl_sync(kAll, before, 0) & bit) == 0) return;
    __syncwarp();  // all lanes see what the first one was told of
  }
  if (args.products[0].scales.half) {
    QuantizeStoredGroup<__half>(args, info, group, lane);
  } else {
    QuantizeStoredGroup<__nv_bfloat16>(args, info, group, lane);
  }
  __syncwarp();
  if (lane == 0) ptx::AddRelease(stored);
}

// Takes care of stored tiles for the scheduler, where the other warps have no time for it. Tiles
// are handed over in the order in which they are published.
template <class T>
class StoredTiles {
 public:
  // Before `info` is published in the slot of the tile two before it: waits until that is stored,
  // as consumers tell it of one tile of a slot at a time.
  __device__ __forceinline__ void Wait(const MoeLayerArgs& args,
                                       const SharedStorage<T>& smem,
                                       const PipelineState<T::kRing>& slot) const {
    if (!Counts(args)) return;
    ptx::BarrierWait(smem.stored(slot.index), slot.parity ^ 1);
    __syncwarp();
  }

  // After that: takes care of that tile, and keeps `info`.
  __device__ __forceinline__ void Next(const MoeLayerArgs& args, const TileInfo& info, int lane) {
    if (Counts(args)) QuantizeIfSecond(args, tiles_[0], lane);
    tiles_[0] = tiles_[1];
    tiles_[1] = info;
  }

 private:
  static_assert(T::kRing == 2);

  __device__ __forceinline__ bool Counts(const MoeLayerArgs& args) const {
    return args.act_values != nullptr && !tiles_[0].end() && !tiles_[0].second();
  }

  TileInfo tiles_[2] = {{-1, 0, 0, 0}, {-1, 0, 0, 0}};
};

}  // namespace jaxmoe
