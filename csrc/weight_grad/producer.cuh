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

// Issues the bulk copies of a step, as one thread: both operands, or if M is gathered N alone.
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
    ptx::BarrierArriveExpectTx(full, T::kNBytes + (args_.gather ? 0 : T::kMBytes));
    const int before = rows.count() - T::kStepRows;  // row -1 of the group and those before: zeros
    const int c2 = rows.row();
    if (!args_.gather) {
#pragma unroll
      for (int b = 0; b < T::kMBoxes; ++b) {
        const int c0 = place.m_tile * T::kM + b * T::kBoxColumns;
        uint8_t* dst = smem_.m_side(stage) + b * T::kBoxBytes;
        ptx::TmaLoad3D(dst, &args_.m_map, full, c0, before, c2, policy_);
      }
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

// The whole life of the loading thread, where nothing is gathered.
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

// One of the gathering warps: the operand of the M side by 16-byte copies, a warp two rows at a
// time, swizzled by hand. Rows before those of the step, or whose index is out of range, are
// zeros. The last of the warps loads N as well, and has a pair of rows less.
template <class T>
__device__ void RunTgmmGatherer(const TgmmArgs& args,
                                const TgmmStorage<T>& smem,
                                int warp,
                                int lane) {
  constexpr int kChunks = T::kM / 8;  // of 16 bytes, in a row
  static_assert(kChunks == 16, "half a warp a row");
  constexpr int kPairs = T::kStepRows / 2;
  constexpr int kPasses = (kPairs + T::kGatherWarps - 1) / T::kGatherWarps;
  static_assert(2 * kPasses <= 32, "a lane for the index of each row of a warp");
  const bool loads = warp == T::kGatherWarps - 1;
  const TgmmLoader<T> loader(args, smem);
  const int chunk = lane % kChunks;
  const int row_chunks = args.m / 8;
  const uint4* operand = static_cast<const uint4*>(args.m_operand);
  // Pass i copies rows 2 * (warp + 3 i) and the next; lanes 2 i and 2 i + 1 have their indices.
  const int my_row = 2 * (warp + T::kGatherWarps * (lane / 2)) + lane % 2;
  const auto load_index = [&](const StepRows<T>& rows) {
    const int row = my_row - T::kStepRows + rows.count();
    return row >= 0 && my_row < T::kStepRows ? args.row_index[rows.row() + row] : -1;
  };
  PipelineState<T::kStages> stage;
  ForEachTile(smem, lane, [&](const TileInfo& info, const auto& slot) {
    const TgmmPlace place = TgmmPlace::Of(info);
    const int column = place.m_tile * kChunks + chunk;
    const bool inside = column < row_chunks;
    const int steps = StepsOfTile<T>(info);
    StepRows<T> rows(args, info);
    int next_index = steps > 0 ? load_index(rows) : -1;
    for (int step = 0; step < steps; ++step) {
      const int index = next_index;
      ptx::BarrierWait(smem.empty(stage.index), stage.parity ^ 1);
      if (loads && lane == 0) loader.Load(place, rows, stage.index);
      __syncwarp();
      if (step + 1 < steps) {
        rows.Advance();
        next_index = load_index(rows);  // arrives while this step is copied
      }
      const uint32_t dst = ptx::SmemAddress(smem.m_side(stage.index)) + chunk / 8 * T::kBoxBytes;
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const int pair = warp + T::kGatherWarps * i;
        const int source_row = __shfl_sync(0xffffffffu, index, 2 * i + lane / 16);
        if (pair < kPairs) {
          const int row = 2 * pair + lane / 16;
          const bool valid = inside && source_row >= 0 && source_row < args.gathered_rows;
          const int64_t at = static_cast<int64_t>(source_row) * row_chunks + column;
          ptx::CopyAsync16(
              dst + row * 128 + ((chunk ^ row) % 8) * 16, valid ? operand + at : operand, valid);
        }
      }
      ptx::CopyAsyncArrive(smem.full(stage.index));
      stage.Advance();
    }
    slot.Release();
  });
  ptx::CopyAsyncWaitAll();  // no copy outlives its thread
}

}  // namespace jaxmoe
