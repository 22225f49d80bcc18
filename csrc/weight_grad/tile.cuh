// Compile-time shape of one weight-gradient kernel: tile, stages, roles, shared-memory map.
#pragma once

#include "csrc/common/groups.cuh"
#include "csrc/common/pipeline.cuh"
#include "csrc/common/ptx.cuh"
#include "csrc/weight_grad/tgmm.h"

namespace jaxmoe {

// The kernel's argument block, passed by value in constant memory. M and N are wgmma's sides: x has
// m columns, dy has n.
struct TgmmArgs {
  CUtensorMap m_map;  // of x: EncodeRowsMap
  CUtensorMap n_map;  // of dy
  const int* group_starts;
  const int* group_sizes;
  int* tile_counter;
  void* out;
  int num_weights;
  int num_groups;
  int groups_per_batch;
  int rows_per_batch;
  int m;
  int n;
  int num_m_tiles;  // of clusters
  int num_n_tiles;
  int num_tiles;  // of all weights
  bool out_f32;
  bool accumulate;
};

template <class Element_, int kStepRows_, int kStages_, int kLead_, int kCluster_>
struct TgmmTile {
  using Element = Element_;
  static constexpr int kStepRows = kStepRows_;  // rows of a pipeline step
  static constexpr int kStages = kStages_;
  // Steps that the first consumer warpgroup is ahead of the second, so that one of them multiplies
  // while the other is in its epilogue. The stages between them hold what both have asked for.
  static constexpr int kLead = kLead_;
  static_assert(kLead < kStages, "the stages in between are not free for loading");
  static constexpr int kCluster = kCluster_;
  static constexpr int kMulticast = kCluster;  // all share the N side

  // 128 x 256 and not 256 x 128: a warpgroup's wgmma of 64 x 256 reads shared memory least.
  static constexpr int kM = 128;
  static constexpr int kN = 256;
  static constexpr int kConsumers = 2;  // warpgroups, 64 rows of M each
  // NOTE: no second warpgroup of producers: a wgmma of 64 x 256 needs 154 registers before any
  // setmaxnreg, which 512 threads do not have.
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kAccumulators = kN / 2;  // of a thread

  static constexpr int kBoxColumns = 64;
  static constexpr int kBoxBytes = kStepRows * kBoxColumns * 2;
  static constexpr int kMBoxes = kM / kBoxColumns;
  static constexpr int kNBoxes = kN / kBoxColumns;
  static constexpr int kMBytes = kMBoxes * kBoxBytes;
  static constexpr int kNBytes = kNBoxes * kBoxBytes;
  static constexpr int kStageBytes = kMBytes + kNBytes;
  static constexpr int kSliceRows = 16;  // of one wgmma
  static constexpr int kSlices = kStepRows / kSliceRows;
  static_assert(kBoxBytes % 1024 == 0, "boxes are aligned to the swizzle pattern");

  // Half of a warpgroup's 64 x 256 outputs in 16 bits.
  static constexpr int kStagingBytes = 64 * (kN / 2) * 2;
  static constexpr int kStagingOffset = kStages * kStageBytes;

  static constexpr int kRing = 2;  // tiles known ahead
  static constexpr int kRingOffset = kStagingOffset + kConsumers * kStagingBytes;
  static constexpr int kBarrierOffset = kRingOffset + kRing * static_cast<int>(sizeof(TileInfo));
  static constexpr int kSharedBytes = kBarrierOffset + (2 * kStages + 3 * kRing) * 8;
  static constexpr int kAlignment = 1024;  // of the swizzle pattern
  static constexpr int kDynamicBytes = kSharedBytes + kAlignment;
  static_assert(kDynamicBytes <= 227 * 1024, "tile does not fit the shared memory of an SM");

  static constexpr int kProducerRegisters = 88;  // 384 * 168 = 88 * 128 + 208 * 256
  static constexpr int kConsumerRegisters = 208;
};

// Views of the dynamic shared memory.
template <class T>
struct TgmmStorage {
  uint8_t* base;

  __device__ explicit TgmmStorage(uint8_t* raw) {
    const uint32_t address = ptx::SmemAddress(raw);
    base = raw + ((T::kAlignment - address % T::kAlignment) % T::kAlignment);
  }
  __device__ uint8_t* m_side(int stage) const { return base + stage * T::kStageBytes; }
  __device__ uint8_t* n_side(int stage) const { return m_side(stage) + T::kMBytes; }
  __device__ uint8_t* staging(int consumer) const {
    return base + T::kStagingOffset + consumer * T::kStagingBytes;
  }
  __device__ TileInfo* ring() const { return reinterpret_cast<TileInfo*>(base + T::kRingOffset); }
  __device__ uint64_t* barriers() const {
    return reinterpret_cast<uint64_t*>(base + T::kBarrierOffset);
  }
  __device__ uint64_t* full(int stage) const { return barriers() + stage; }
  __device__ uint64_t* empty(int stage) const { return barriers() + T::kStages + stage; }
  __device__ uint64_t* ring_full(int slot) const { return barriers() + 2 * T::kStages + slot; }
  __device__ uint64_t* ring_empty(int slot) const { return ring_full(slot) + T::kRing; }
  // The first consumer warpgroup is ahead in the tile of this slot.
  __device__ uint64_t* ahead(int slot) const { return ring_empty(slot) + T::kRing; }
};

// A TileInfo of this kernel: `row` and `rows` are those of the weight's only group; if it may have
// several, `rows` counts whole steps. `w_tile` is the tile's place in the weight:
struct TgmmPlace {
  int m_tile;  // of this CTA, in units of kM
  int n_tile;

  static constexpr int kMaxTiles = 1 << 15;  // of a side
  __device__ static TgmmPlace Of(const TileInfo& info) {
    return {info.w_tile & 0xffff, info.w_tile >> 16};
  }
  __device__ int Packed() const { return m_tile | n_tile << 16; }
};

template <class T>
__device__ __forceinline__ int StepsOfTile(const TileInfo& info) {
  return (info.rows + T::kStepRows - 1) / T::kStepRows;
}

// The rows of a tile's steps, one group of its weight after the other.
template <class T>
class StepRows {
 public:
  __device__ StepRows(const TgmmArgs& args, const TileInfo& info) : args_(args) {
    row_ = info.row;
    end_ = info.row + info.rows;
    next_group_ = args.num_groups;
    if (args.num_groups > args.num_weights) {
      row_ = end_ = 0;
      next_group_ = info.weight;
      SkipToRows();
    }
  }

  __device__ int row() const { return row_; }
  __device__ int count() const { return min(end_ - row_, T::kStepRows); }

  __device__ void Advance() {
    row_ += T::kStepRows;
    SkipToRows();
  }

 private:
  __device__ void SkipToRows() {
    while (row_ >= end_ && next_group_ < args_.num_groups) {
      const GroupRows rows = RowsOfGroup(args_, next_group_);
      row_ = rows.start;
      end_ = rows.start + rows.size;
      next_group_ += args_.num_weights;
    }
  }

  const TgmmArgs& args_;
  int row_;
  int end_;
  int next_group_;
};

}  // namespace jaxmoe
