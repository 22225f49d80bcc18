// Stream of tiles, made from group offsets on the device.
//
// One warp of each cluster draws tile numbers from a global counter, so that CTAs that were given
// short tiles take more of them (or takes every n-th, where no kernel could clear the counter), and
// finds each number's group by a warp scan over 32 groups at a time. Numbers only grow, so the scan
// only moves forward: the whole search costs num_groups/32 scans per CTA. Groups without rows cost
// a lane. Nothing is read on the host.
//
// The ring holds kRing = 2 tiles and consumers release a slot when their k loop ends, so a CTA
// commits to at most one tile beyond the one its producers are loading (a deeper ring would take
// tiles from CTAs that are about to run dry).
#pragma once

#include "csrc/common/counters.cuh"
#include "csrc/common/groups.cuh"
#include "csrc/gemm/sm90/products.cuh"
#include "csrc/gemm/sm90/stored.cuh"
#include "csrc/gemm/sm90/tile.cuh"
#include "csrc/kernels/slot_plan.cuh"

namespace jaxmoe {

// Calls use(rows) for all groups, as a warp; a lane has every 32nd. Loads of four overlap: a tile
// waits for them.
template <class Use>
__device__ __forceinline__ void ForEachGroup(const MoeGemmArgs& args, int lane, const Use& use) {
  constexpr int kAtOnce = 4;
  for (int first = lane; first < args.num_groups; first += 32 * kAtOnce) {
    int rows[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      rows[i] = RowsOfGroup(args, min(first + 32 * i, args.num_groups - 1)).size;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + 32 * i < args.num_groups) use(rows[i]);
    }
  }
}

// Rows of the largest group, as a warp.
__device__ __forceinline__ int MostRows(const MoeGemmArgs& args, int lane) {
  int most = 0;
  ForEachGroup(args, lane, [&](int rows) { most = max(most, rows); });
  return __reduce_max_sync(0xffffffffu, most);
}

// The most rows of a cluster tile with which the busiest CTA has the fewest rows, as a warp. A CTA
// takes as many tiles as others, or one more, so where each has two or three, tiles that are a
// little smaller may come out even. Each tile costs what some rows do. Below 96 rows a CTA, reading
// weights from shared memory takes longer than multiplying them. Many tiles are even enough.
template <class T>
__device__ __forceinline__ int EvenTileRows(const MoeGemmArgs& args, int lane) {
  constexpr int kChoices = 5;
  constexpr int kStep = T::kTokenStep * T::kMulticast;
  constexpr int kMost = T::kTokenTile * T::kMulticast;
  static_assert(kMost - (kChoices - 1) * kStep >= 96 * T::kMulticast);
  int tiles[kChoices] = {};
  ForEachGroup(args, lane, [&](unsigned rows) {
#pragma unroll
    for (int i = 0; i < kChoices; ++i) {
      const unsigned most = kMost - i * kStep;
      tiles[i] += (rows + most - 1) / most;
    }
  });
  const int clusters = gridDim.x / T::kCluster;
  int best_rows = kMost;
  int64_t least = INT64_MAX;
#pragma unroll
  for (int i = 0; i < kChoices; ++i) {
    const int64_t all =
        static_cast<int64_t>(__reduce_add_sync(0xffffffffu, tiles[i])) * args.num_w_tiles;
    const int rows = kMost - i * kStep;
    const int64_t each = (all + clusters - 1) / clusters;
    if (i == 0 && each > kFewTiles) break;
    const int64_t cost = each * (rows + kStep);
    if (cost < least) {
      least = cost;
      best_rows = rows;
    }
  }
  return best_rows;
}

// What a launch finds out about its groups before its first tile. Narrow ones have a tile a group.
struct LaunchShape {
  bool narrow;    // see Tile::kFlexible
  int tile_rows;  // of a cluster tile, at most
};

template <class T>
__device__ __forceinline__ LaunchShape ShapeOf(const MoeGemmArgs& args, int lane) {
  LaunchShape shape{false, T::kTokenTile * T::kMulticast};
  if constexpr (T::kFlexible) {
    shape.narrow = args.may_narrow && (args.plans || MostRows(args, lane) <= T::kNarrowTokens);
  }
  if constexpr (T::kEvens) {
    if (args.few_tiles && !shape.narrow) shape.tile_rows = EvenTileRows<T>(args, lane);
  }
  return shape;
}

template <class T>
class TileScheduler {
 public:
  __device__ TileScheduler(const MoeGemmArgs& args, const LaunchShape& shape, int lane)
      : args_(&args), lane_(lane), shape_(shape) {
    LoadGroups();
    CountTiles();
  }

  // Goes on with another product of the same groups, once Find has come to the end of this one.
  __device__ void Restart(const MoeGemmArgs& args) {
    args_ = &args;
    base_ = 0;
    window_ = 0;
    if (!args.plans && args.num_groups > 32) LoadGroups();  // else they are here
    CountTiles();
  }

  // Tiles of the whole product, once Find has come to its end.
  __device__ int num_tiles() const { return base_; }

  // Group of the tile found last, 0 before the first.
  __device__ int found_group() const { return found_group_; }

  // Finds the part of CTA `rank` in cluster tile number `tile`; ends when there is none. All lanes
  // must ask for the same tile.
  __device__ TileInfo Find(int tile, int rank) {
    TileInfo info{-1, 0, 0, 0};
    constexpr unsigned kAll = 0xffffffffu;
    int window_tiles = __shfl_sync(kAll, inclusive_, 31);
    while (tile >= base_ + window_tiles) {
      base_ += window_tiles;
      window_ += 32;
      if (window_ >= (args_->plans ? 1 : args_->num_groups)) return info;
      LoadGroups();
      CountTiles();
      window_tiles = __shfl_sync(kAll, inclusive_, 31);
    }
    const int local = tile - base_;
    const int owner = __ffs(__ballot_sync(kAll, inclusive_ > local)) - 1;
    const int start = __shfl_sync(kAll, start_, owner);
    const int size = __shfl_sync(kAll, size_, owner);
    const int index = local - __shfl_sync(kAll, inclusive_ - tiles_, owner);

    // Raster inside a group: panels of `raster` weight tiles; inside a panel the weight tile runs
    // fastest. raster = 1 keeps the token tiles that share a weight tile adjacent in time.
    const int token_tiles = (size - 1) / tile_rows() + 1;
    const int panel_tiles = args_->raster * token_tiles;
    const int panel = index / panel_tiles;
    const int in_panel = index - panel * panel_tiles;
    const int width = min(args_->raster, args_->num_w_tiles - panel * args_->raster);
    const int token_tile = in_panel / width;
    info.w_tile = panel * args_->raster + in_panel - token_tile * width;
    found_group_ = __shfl_sync(kAll, group_, owner);
    info.weight = found_group_ % args_->num_weights;
    // The group's rows are spread evenly over its tiles: 270 rows are 96 + 96 + 78, which wgmma
    // multiplies as 272 columns, not 128 + 128 + 14, whose tiles drift apart in time.
    const int even = (size + token_tiles - 1) / token_tiles;
    constexpr int kStep = T::kTokenStep * (T::kSplit == Split::kTokens ? 2 : 1);
    constexpr int kShare = T::kMulticast * kStep;
    const int cta_rows = (even + kShare - 1) / kShare * kStep;
    const int part = T::kMulticast > 1 ? rank : 0;
    const int first = (token_tile * T::kMulticast + part) * cta_rows;
    info.row = start + first;
    info.rows = max(min(size - first, cta_rows), 0);
    return info;
  }

 private:
  // Known to the compiler where it does not vary.
  __device__ int tile_rows() const {
    return T::kEvens ? shape_.tile_rows : T::kTokenTile * T::kMulticast;
  }

  // Reads the 32 groups of the window, or makes the plan, which has no more.
  __device__ void LoadGroups() {
    const int g = window_ + lane_;
    group_ = g;
    start_ = 0;
    size_ = 0;
    if (args_->plans) {
      LoadPlan();
    } else if (g < args_->num_groups) {
      const GroupRows rows = RowsOfGroup(*args_, g);
      start_ = rows.start;
      size_ = rows.size;
    }
  }

  // NOTE: 32 bits hold the number of tiles of groups that fit in memory. Garbage groups that
  // overlap may wrap it, which gives wrong tiles, but none out of bounds.
  __device__ void CountTiles() {
    tiles_ = size_ == 0 ? 0 : ((size_ - 1) / tile_rows() + 1) * args_->num_w_tiles;
    inclusive_ = tiles_;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int below = __shfl_up_sync(0xffffffffu, inclusive_, offset);
      if (lane_ >= offset) inclusive_ += below;
    }
  }

  // Groups in the order of their first slots, not of the experts: tiles may come in any order.
  __device__ void LoadPlan() {
    const SlotPlan plan(args_->plan, lane_);
    group_ = max(plan.expert(), 0);
    start_ = plan.first_row();
    size_ = plan.num_rows();
    if (args_->writes_plan && blockIdx.x == 0) plan.Write();
  }

  const MoeGemmArgs* args_;
  const int lane_;
  const LaunchShape shape_;
  int window_ = 0;  // group of lane 0, unless planned here
  int group_ = 0;
  int found_group_ = 0;
  int base_ = 0;  // tiles of all groups before the window
  int start_ = 0;
  int size_ = 0;
  int tiles_ = 0;
  int inclusive_ = 0;
};

// Draws the next tile, as a warp; the first lane gets it.
__device__ __forceinline__ int DrawTile(const MoeGemmArgs& args, int lane) {
  return lane == 0 ? atomicAdd(args.tile_counter, 1) : 0;
}

// Waits, as a warp, until the rows of a group have come, if they come while the kernel runs. Other
// CTAs of the cluster learn of it by their rings, which do not clear L1: what comes is read past
// it.
__device__ __forceinline__ void WaitForSource(const MoeGemmArgs& args, int group) {
  const uint32_t* came = args.sources_came;
  ptx::WaitForWord(came == nullptr ? nullptr : came + group / args.groups_per_source);
}

// Runs the scheduler warp. A cluster has one, in its first CTA, which writes to the rings of all
// CTAs.
template <class T, class Args>
__device__ void RunScheduler(const Args& args, const SharedStorage<T>& smem, int lane) {
  constexpr unsigned kAll = 0xffffffffu;
  const MoeGemmArgs& first = First(args);
  // With one product the first tile of each cluster is given.
  const int given = kGoesOn<Args> ? 0 : gridDim.x / T::kCluster;
  int drawn = kGoesOn<Args> ? DrawTile(first, lane) : 0;  // on its way while groups are read
  const LaunchShape shape = ShapeOf<T>(first, lane);
  if (T::kFlexible && lane == 0) *smem.narrow() = shape.narrow;  // who sees the first tile sees it
  TileScheduler<T> scheduler(first, shape, lane);
  PipelineState<T::kRing> slot;
  [[maybe_unused]] StoredTiles<T> stored;
  constexpr bool kTakesCare = kGoesOn<Args> && T::kPromoted;
  bool second = false;
  int before = 0;  // tiles of the product before
  int tile = kGoesOn<Args> ? __shfl_sync(kAll, drawn, 0) : blockIdx.x / T::kCluster;
  if constexpr (T::kFinalizes) {  // a weight tile of each group a cluster
    tile = ptx::ClusterRank() * first.num_w_tiles + blockIdx.x / ptx::ClusterSize();
  }
  while (true) {
    TileInfo info = scheduler.Find(tile - before, min(lane, T::kCluster - 1));
    if (kGoesOn<Args> && info.end() && !second) {
      second = true;
      before = scheduler.num_tiles();
      scheduler.Restart(Second(args));
      continue;
    }
    if (second) info.w_tile = ~info.w_tile;
    if constexpr (!kGoesOn<Args> && T::kGatherByThreads) {
      WaitForSource(first, scheduler.found_group());  // behind the last tile nothing new
    }
    if constexpr (kTakesCare) stored.Wait(args, smem, slot);
    PublishTile(smem, slot, info, lane);
    slot.Advance();
    if constexpr (kTakesCare) stored.Next(args, info, lane);
    if (info.end()) {
      if constexpr (kTakesCare) {  // of the last tile, which nothing follows in its slot
        stored.Wait(args, smem, slot);
        stored.Next(args, info, lane);
      }
      return;
    }
    // No kernel ran before that could have cleared the counter.
    if (first.plans && !kGoesOn<Args>) {
      tile += given;
      continue;
    }
    drawn = DrawTile(first, lane);
    tile = given + __shfl_sync(kAll, drawn, 0);
  }
}

}  // namespace jaxmoe
