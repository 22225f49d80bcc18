// Chooses the tiles of the weight gradient and fills its pipeline.
#pragma once

#include "csrc/common/launch.h"
#include "csrc/weight_grad/tile.cuh"

namespace jaxmoe {

// Steps of all groups of a weight, as a warp. Groups overlap if they are garbage, so that their sum
// may be anything.
template <class T>
__device__ __forceinline__ int StepsOfGroups(const TgmmArgs& args, int weight, int lane) {
  int64_t steps = 0;
  for (int64_t g = weight + static_cast<int64_t>(lane) * args.num_weights; g < args.num_groups;
       g += 32 * static_cast<int64_t>(args.num_weights)) {
    const int size = RowsOfGroup(args, static_cast<int>(g)).size;
    steps += (size + T::kStepRows - 1) / T::kStepRows;
  }
#pragma unroll
  for (int o = 16; o > 0; o /= 2) steps += __shfl_xor_sync(0xffffffffu, steps, o);
  return static_cast<int>(min(steps, static_cast<int64_t>(INT_MAX / T::kStepRows - 1)));
}

// Tile number `tile`, the part of CTA `rank`; ends past the last. Tiles of a weight come one after
// the other, in panels of kPanel of M by all of N, so that those that run at the same time share
// both operands in L2.
template <class T>
__device__ __forceinline__ TileInfo FindTile(const TgmmArgs& args, int tile, int rank, int lane) {
  constexpr int kPanel = 8;
  if (tile >= args.num_tiles) return {-1, 0, 0, 0};
  const int tiles = args.num_m_tiles * args.num_n_tiles;
  const int weight = tile / tiles;
  const int index = tile - weight * tiles;
  const int panel = index / (kPanel * args.num_n_tiles);
  const int in_panel = index - panel * kPanel * args.num_n_tiles;
  const int height = min(kPanel, args.num_m_tiles - panel * kPanel);
  const int n_tile = in_panel / height;
  const int m_tile = panel * kPanel + in_panel - n_tile * height;
  const TgmmPlace place{m_tile * T::kCluster + rank, n_tile};
  if (args.num_groups > args.num_weights) {
    return {weight, 0, StepsOfGroups<T>(args, weight, lane) * T::kStepRows, place.Packed()};
  }
  const GroupRows rows = weight < args.num_groups ? RowsOfGroup(args, weight) : GroupRows{0, 0};
  return {weight, rows.start, rows.size, place.Packed()};
}

// The whole life of the scheduler warp. Tiles are drawn from a counter: those of a weight with few
// rows end early.
template <class T>
__device__ void RunTgmmScheduler(const TgmmArgs& args, const TgmmStorage<T>& smem, int lane) {
  PipelineState<T::kRing> slot;
  int tile = blockIdx.x / T::kCluster;
  while (true) {
    const TileInfo info = FindTile<T>(args, tile, min(lane, T::kCluster - 1), lane);
    PublishTile(smem, slot, info, lane);
    slot.Advance();
    if (info.end()) return;
    int drawn = 0;
    if (lane == 0) drawn = atomicAdd(args.tile_counter, 1);
    tile = gridDim.x / T::kCluster + __shfl_sync(0xffffffffu, drawn, 0);
  }
}

// Issues the bulk copies of a step, as one thread.
template <class T>
class TgmmLoader {
 public:
  __device__ TgmmLoader(const TgmmArgs& args, const TgmmStorage<T>& smem)
      : args_(args),
        smem_(smem),
        policy_(ptx::CreatePolicy<ptx::CachePolicy::kEvictNormal>()),
        // The CTAs of a cluster load a part of N each, for all of them.
        first_box_(T::kCluster > 1 ? ptx::ClusterRank() * kBoxes : 0) {}

  // The stage must be empty. A step with fewer rows has them at its end, behind zeros, in both
  // operands: zero times NaN is NaN.
  __device__ __forceinline__ void Load(const TgmmPlace& place,
                                       const StepRows<T>& rows,
                                       int stage) const {
    uint64_t* full = smem_.full(stage);
    ptx::BarrierArriveExpectTx(full, T::kMBytes + T::kNBytes);
    const int before = rows.count() - T::kStepRows;  // row -1 of the group and those before: zeros
    const int c2 = rows.row();
#pragma unroll
    for (int b = 0; b < T::kMBoxes; ++b) {
      const int c0 = place.m_tile * T::kM + b * T::kBoxColumns;
      uint8_t* dst = smem_.m_side(stage) + b * T::kBoxBytes;
      ptx::TmaLoad3D(dst, &args_.m_map, full, c0, before, c2, policy_);
    }
#pragma unroll
    for (int b = first_box_; b < first_box_ + kBoxes; ++b) {
      const int c0 = place.n_tile * T::kN + b * T::kBoxColumns;
      uint8_t* dst = smem_.n_side(stage) + b * T::kBoxBytes;
      if constexpr (T::kCluster > 1) {
        constexpr uint16_t kAll = (1 << T::kCluster) - 1;
        ptx::TmaLoad3DMulticast(dst, &args_.n_map, full, c0, before, c2, kAll, policy_);
      } else {
        ptx::TmaLoad3D(dst, &args_.n_map, full, c0, before, c2, policy_);
      }
    }
  }

 private:
  static constexpr int kBoxes = T::kNBoxes / T::kCluster;

  const TgmmArgs& args_;
  const TgmmStorage<T>& smem_;
  const uint64_t policy_;
  const int first_box_;
};

// The whole life of the loading thread.
template <class T>
__device__ void RunTgmmLoader(const TgmmArgs& args, const TgmmStorage<T>& smem) {
  const TgmmLoader<T> loader(args, smem);
  PipelineState<T::kStages> stage;
  ForEachTile(smem, [&](const TileInfo& info, const auto& slot) {
    const TgmmPlace place = TgmmPlace::Of(info);
    const int steps = StepsOfTile<T>(info);
    StepRows<T> rows(args, info);
    for (int step = 0; step < steps; ++step, rows.Advance()) {
      ptx::BarrierWait(smem.empty(stage.index), stage.parity ^ 1);
      loader.Load(place, rows, stage.index);
      stage.Advance();
    }
    slot.Release();
  });
}

}  // namespace jaxmoe
