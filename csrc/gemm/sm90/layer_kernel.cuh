// Both products of a layer in one launch: CTAs go on with the down product where tiles of the
// gate-up product are done.
//
// Tiles are numbered, those of the gate-up product first, and drawn in order from one counter. A
// tile of the down product reads what gate-up tiles of its rows store; the warp that loads its
// tokens waits until all of those are counted. Weights wait for nothing, so they stream while the
// gate-up product comes to its end. A tile waits for smaller numbers alone, which CTAs have drawn
// that run: none waits for ever, however few CTAs run at once. That is why the first tile of a CTA
// is drawn as well.
//
// Both products divide groups into the same token tiles, so the first row of one names it. Rows of
// X may lie where the down product stores its own: those of a group are read before any is written.
#pragma once

#include "csrc/gemm/sm90/kernel.cuh"

namespace jaxmoe {

template <class Storage>
using TileOf = typename std::decay_t<Storage>::Tile;

// A tile of the second product, in that product's own numbers.
__device__ __forceinline__ TileInfo InSecond(const TileInfo& info) {
  return {info.weight, info.row, info.rows, ~info.w_tile};
}

// Calls work(product's arguments, shared memory, tile), with types of the product it belongs to.
template <class T, class Work>
__device__ __forceinline__ void OfProduct(const MoeLayerArgs& args,
                                          const SharedStorage<T>& smem,
                                          const TileInfo& info,
                                          const Work& work) {
  static_assert(T::kSharedBytes == T::Down::kSharedBytes, "shared memory has one map for both");
  if (info.second()) {
    work(args.products[1], SharedStorage<typename T::Down>(smem.base), InSecond(info));
  } else {
    work(args.products[0], smem, info);
  }
}

// Draws the next tile, as a warp; the first lane gets it.
__device__ __forceinline__ int DrawTile(const MoeLayerArgs& args, int lane) {
  return lane == 0 ? atomicAdd(args.products[0].tile_counter, 1) : 0;
}

// Runs the scheduler warp of each cluster, see RunScheduler.
template <class T>
__device__ void RunLayerScheduler(const MoeLayerArgs& args,
                                  const SharedStorage<T>& smem,
                                  int lane) {
  constexpr unsigned kAll = 0xffffffffu;
  GridDependencyWait();
  int drawn = DrawTile(args, lane);  // on its way while groups are read
  TileScheduler<T> scheduler(args.products[0], lane);
  PipelineState<T::kRing> slot;
  bool second = false;
  int before = 0;  // tiles of the products before
  int tile = __shfl_sync(kAll, drawn, 0);
  while (true) {
    TileInfo info = scheduler.Find(tile - before, min(lane, T::kCluster - 1));
    if (info.end() && !second) {
      second = true;
      before = scheduler.num_tiles();
      scheduler.Restart(args.products[1]);
      continue;
    }
    if (second) info.w_tile = ~info.w_tile;
    PublishTile(smem, slot, info, lane);
    if (info.end()) return;
    slot.Advance();
    drawn = DrawTile(args, lane);
    tile = __shfl_sync(kAll, drawn, 0);
  }
}

template <class T>
__device__ void RunLayerWeightProducer(const MoeLayerArgs& args, const SharedStorage<T>& smem) {
  const uint64_t policy = WeightPolicy(args.products[0]);
  PipelineState<T::kStages> stage;
  ForEachTile(smem, [&](const TileInfo& info, const auto& slot) {
    OfProduct(args, smem, info, [&](const auto& product, const auto& smem, const TileInfo& info) {
      LoadWeightTile(product, smem, info, policy, stage);
    });
    slot.Release();
  });
}

template <class T>
__device__ void RunLayerTokenProducer(const MoeLayerArgs& args,
                                      const SharedStorage<T>& smem,
                                      int lane) {
  GridDependencyWait();
  const TokenSource<T> gathered(args.products[0], lane);
  const TokenSource<typename T::Down> adjacent(args.products[1], lane);
  PipelineState<T::kStages> stage;
  ForEachTile(smem, lane, [&](const TileInfo& info, const auto& slot) {
    if (info.second()) {
      if (lane == 0) {
        while (ptx::LoadAcquire(args.stored + info.row) < args.products[0].num_w_tiles) {
        }
      }
      __syncwarp();
      ptx::FenceProxyAsyncGlobal();
      const SharedStorage<typename T::Down> same(smem.base);
      LoadTokenTile(args.products[1], same, InSecond(info), adjacent, lane, stage);
    } else {
      LoadTokenTile(args.products[0], smem, info, gathered, lane, stage);
    }
    slot.Release();
  });
}

template <class T>
__device__ __forceinline__ void RunLayerConsumer(const MoeLayerArgs& args,
                                                 const SharedStorage<T>& smem) {
  const int thread = threadIdx.x % 128;
  uint32_t slices_parity = 0;
  using Scales = std::conditional_t<T::kScaled, TileScales<T>, NoScales>;
  PipelineState<T::kStages> stage;
  ForEachTile(smem, thread % 32, [&](const TileInfo& info, const auto& slot) {
    const WarpgroupShare share = Share<T>(info.rows, 0, args.products[0].gather);
    const StepRange steps = StepsOf<T>(args.products[info.second() ? 1 : 0].num_k_steps);
    Accumulators<T> acc;
    [[maybe_unused]] Scales scales;
    if constexpr (T::kScaled) {
      OfProduct(args, smem, info, [&](const auto& product, const auto& of, const TileInfo& info) {
        scales.template Fetch<TileOf<decltype(of)>>(product, info, share, -1, thread);
      });
    }
    // Of the arguments it reads how weights are packed, alike in both products.
    RunMainloop<T>(
        args.products[0], smem, steps.last - steps.first, share, thread, StepScales{}, stage, acc);
    slot.Release();
    if constexpr (T::kSplitK > 1) {
      const bool sum_is_here = ReduceSlices<T>(smem, thread, slices_parity, acc);
      slices_parity ^= 1;
      if (!sum_is_here) return;
    }
    OfProduct(args, smem, info, [&](const auto& product, const auto& of, const TileInfo& info) {
      using U = TileOf<decltype(of)>;
      const EpilogueSite site = SiteOf<U>(product, info, share, 0, thread);
      Epilogue<U, Scales>(product, of, site, scales).Run(acc);
    });
    if (!info.second()) {
      __syncwarp();
      if (thread % 32 == 0) ptx::BarrierArrive(smem.stored(slot.index()));
    }
  });
}

// Counts tiles of the gate-up product when they are stored. A warp of its own, as the fence before
// an addition takes a microsecond.
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

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kCtasPerSm)
    MoeLayerKernel(const __grid_constant__ MoeLayerArgs args) {
  static_assert(T::kHasLayerKernel && T::kGated && !T::kGatherByThreads);
  static_assert(T::kConsumers == 1 && T::kMulticast == 1 && sizeof(MoeLayerArgs) <= 4096);
  extern __shared__ __align__(1024) uint8_t raw_smem[];
  const SharedStorage<T> smem(raw_smem);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // known to be the same
  const int lane = threadIdx.x % 32;

  if (warp == 0 && lane == 0) {
    if constexpr (!T::kPacked) {
      ptx::PrefetchTensorMap(&args.products[0].w_map);
      if (args.products[0].up_origin != 0) ptx::PrefetchTensorMap(&args.products[0].w_up_map);
    }
    ptx::PrefetchTensorMap(&args.products[0].x_map);
    for (int s = 0; s < T::kRing; ++s) ptx::BarrierInit(smem.stored(s), 4 * T::kConsumers);
    InitBarriers(smem, 1, 3);
  }
  if constexpr (T::kCluster > 1) {
    ptx::ClusterSyncInit();
  } else {
    __syncthreads();
  }

  // Each role is one branch, or ptxas ignores setmaxnreg.
  if (warp < 4) {
    if constexpr (T::kReconfigureRegisters) {
      cutlass::arch::warpgroup_reg_dealloc<T::kProducerRegisters>();
    }
    if (warp == 0) {
      if (T::kCluster == 1 || ptx::ClusterRank() == 0) RunLayerScheduler<T>(args, smem, lane);
    } else if (warp == 1) {
      if (lane == 0) RunLayerWeightProducer<T>(args, smem);
    } else if (warp == 2) {
      RunLayerTokenProducer<T>(args, smem, lane);
    } else {
      // As in MoeGemmKernel: the next kernel may start when this one has seen the end of the one
      // before.
      GridDependencyWait();
      GridDependencyLaunch();
      RunStoredCounter<T>(args, smem, lane);
    }
  } else {
    if constexpr (T::kReconfigureRegisters) {
      cutlass::arch::warpgroup_reg_alloc<T::kConsumerRegisters>();
    }
    RunLayerConsumer<T>(args, smem);
  }
  // Other CTAs may still write to this one's shared memory or arrive at its barriers.
  if constexpr (T::kCluster > 1) ptx::ClusterSync();
}

}  // namespace jaxmoe
