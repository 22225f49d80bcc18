// Grouped GEMM kernel: roles of the warps.
//
//   Y[r, n] = epilogue(sum_k W[e(r)][n, k] * X[x_row(r), k])
//
// Persistent CTAs of a producer warpgroup (warp 0 schedules, one thread of warp 1 loads weights,
// warp 2 loads rows of X, warp 3 brings scales or counts stored tiles), in wide tiles one that
// gathers rows of X, and one or two of consumers. Weights sit on wgmma's M side and tokens on N,
// for decode and prefill alike, so the token tile goes down to 8 (the other way round in the wide
// tiles of promoted sums, see promoted.cuh). One tensor map serves all experts: the expert is a
// coordinate. Measurements behind the tile shapes are in docs/notes.md#what-holds-now.
#pragma once

#include "csrc/gemm/sm90/epilogue.cuh"
#include "csrc/gemm/sm90/low_rank.cuh"
#include "csrc/gemm/sm90/producer.cuh"
#include "csrc/gemm/sm90/scheduler.cuh"
#include "csrc/gemm/sm90/stored.cuh"
#include "csrc/gemm/sm90/token_epilogue.cuh"
#include "csrc/gemm/sm90/token_finalize.cuh"

namespace jaxmoe {

template <class T>
__device__ __forceinline__ WarpgroupShare Share(int rows, int consumer, bool copied) {
  if constexpr (T::kSplit == Split::kTokens) {
    constexpr int kToken = T::kTokensOnM ? 64 : T::kTokenStep;
    const int half = (rows + 2 * kToken - 1) / (2 * kToken) * kToken;
    const int first = consumer * half;
    return {0, first, min(max(rows - first, 0), half), half, copied};
  }
  return {T::kSplit == Split::kWeights ? 2 * consumer : 0, 0, rows, rows, copied};
}

// Where the part of a tile goes that a consumer warpgroup computed.
template <class T>
__device__ __forceinline__ EpilogueSite SiteOf(const MoeGemmArgs& args,
                                               const TileInfo& info,
                                               const WarpgroupShare& share,
                                               int consumer,
                                               int thread) {
  EpilogueSite site;
  site.weight = info.weight;
  site.row = info.row + share.first_token;
  site.rows = share.rows;
  const int pair = info.w_tile * (T::kWeightTile / 128) + share.first_block / 2;
  site.feature = pair * (T::IsGated(args) ? 64 : 128);
  site.weight_row0 = WeightRow<T>(args, info.w_tile, share.first_block);
  site.weight_row1 = WeightRow<T>(args, info.w_tile, share.first_block + 1);
  site.consumer = consumer;
  site.thread = thread;
  return site;
}

// Gives back the stages of a tile in which a warpgroup multiplies nothing.
template <class T>
__device__ __forceinline__ void PassSteps(const SharedStorage<T>& smem,
                                          int num_k_steps,
                                          int lane,
                                          StageOf<T>& stage) {
  for (int step = 0; step < num_k_steps; ++step) {
    ptx::BarrierWait(smem.full(stage.index), stage.parity);
    __syncwarp();  // no lane falls a phase behind the one that gives the stage back
    ReleaseStage(smem, stage.index, lane);
    stage.Advance();
  }
}

template <class T, class Args>
__device__ __forceinline__ void RunConsumer(const Args& kernel_args,
                                            const SharedStorage<T>& smem,
                                            int consumer) {
  const MoeGemmArgs& first = First(kernel_args);
  int thread = threadIdx.x % 128;
  // Else ptxas derives it and addresses from it anew in every k step, to save a register.
  if constexpr (T::kWarpProducts || (T::kPromoted && T::kDecode)) ptx::KeepInRegister(thread);
  const int lane = thread % 32;
  uint32_t slices_parity = 0;
  int token_of_row = -1;
  if constexpr (T::kTokenScaled && !T::kBringsScales) {
    GridDependencyWait();  // scales of X are the previous kernel's output
    if constexpr (T::kDecode) token_of_row = TileScales<T>::TokenOfRow(first, lane);
  }
  constexpr bool kRowScales = TakesRowScales<T>();
  if (kRowScales && first.scales.x != nullptr) GridDependencyWait();
  if (T::kAddsLowRank || T::kTokenSums) GridDependencyWait();  // the previous kernel's output
  using Fetched = std::conditional_t<kRowScales, RowScales<T>, TileScales<T>>;
  using Scales = std::conditional_t<T::kScaled, Fetched, NoScales>;
  [[maybe_unused]] BroughtScales<T> brought;
  using Token = std::conditional_t<T::kFinalizes, TokenFinalize<T>, NoFinalize>;
  const Token token(kernel_args, lane);
  StageOf<T> stage;
  ForEachTile(smem, lane, [&](const TileInfo& tile, const auto& slot) {
    const MoeGemmArgs& args = ProductOf(kernel_args, tile);
    const TileInfo info = InProduct(kernel_args, tile);
    const StepRange steps = StepsOf<T>(args.num_k_steps);
    ReadShape(smem, stage);
    if (!HasFeatures<T>(args, info.w_tile, consumer)) {
      PassSteps<T>(smem, steps.last - steps.first, lane, stage);
      slot.Release();
      if constexpr (T::kBringsScales) {
        brought.Wait(smem, consumer, thread);
        brought.Release(smem, lane);
      }
      return;
    }
    const WarpgroupShare share = Share<T>(info.rows, consumer, IsCopied<T>(args, info.rows));
    Accumulators<T> acc;
    [[maybe_unused]] Scales scales;
    StepScales step_scales{};
    if constexpr (T::kPromoted && !T::kTokensOnM) {
      step_scales = FetchStepScales<T>(args, info, share, thread);
    }
    if constexpr (T::kScaled && !T::kLateScales) {
      scales.Fetch(args, info, share, token_of_row, thread);
    }
    if constexpr (kRowScales && !T::kLateScales) scales.FetchRows(args, info, share, lane);
    // How weights are packed is the same in both products.
    const int num_k_steps = steps.last - steps.first;
    const auto site_of = [&] { return SiteOf<T>(args, info, share, consumer, thread); };
    if constexpr (T::kTokenSums) {
      const TokenSums<T> sums(args, smem, info, consumer, thread);
      RunMainloop<T>(args, smem, num_k_steps, share, thread, step_scales, stage, acc, sums);
    } else if constexpr (!T::kAddsLowRank) {
      RunMainloop<T>(
          first, smem, num_k_steps, share, thread, step_scales, stage, acc, NothingLast());
    } else {
      const LowRank<T> low(args.low, smem, share.rows, consumer, thread);
      low.Fetch(site_of(), args.n, 0);
      if constexpr (T::kPacked) {  // whose loop has no register left, and may use another N
        RunMainloop<T>(
            first, smem, num_k_steps, share, thread, step_scales, stage, acc, NothingLast());
        low.AddFrom(0, site_of(), args.n, acc);
      } else {
        RunMainloop<T>(first, smem, num_k_steps, share, thread, step_scales, stage, acc, low);
        low.AddFrom(LowRank<T>::kRank, site_of(), args.n, acc);
      }
    }
    slot.Release();
    if constexpr (T::kSplitK > 1) {
      const bool sum_is_here = ReduceSlices<T>(smem, thread, slices_parity, acc);
      slices_parity ^= 1;
      if (!sum_is_here) return;
    }

    const EpilogueSite site = SiteOf<T>(args, info, share, consumer, thread);
    if constexpr (T::kTokensOnM) {
      RunTokenMajorEpilogue<T>(args, smem, site, info, share, acc);
    } else if constexpr (T::kBringsScales) {
      brought.Wait(smem, consumer, thread);
      Epilogue<T, BroughtScales<T>>(args, smem, site, brought).Run(acc);
      brought.Release(smem, lane);
    } else {
      if constexpr (T::kScaled && T::kLateScales) {
        scales.Fetch(args, info, share, token_of_row, thread);
      }
      if constexpr (kRowScales && T::kLateScales) scales.FetchRows(args, info, share, lane);
      Epilogue<T, Scales>(args, smem, site, scales).Run(acc);
    }
    if (kGoesOn<Args> && !IsSecond(kernel_args, tile)) {
      __syncwarp();
      if (lane == 0) ptx::BarrierArrive(smem.stored(slot.index()));
    }
  });
  token.Run(kernel_args, smem, thread);
}

// Initializes barriers for `loaders` warps that read the ring to fill stages, as one thread.
template <class T>
__device__ __forceinline__ void InitBarriers(const SharedStorage<T>& smem,
                                             int full_arrivals,
                                             int loaders) {
  for (int s = 0; s < T::kMostStages; ++s) {
    ptx::BarrierInit(smem.full(s), full_arrivals);
    ptx::BarrierInit(smem.empty(s), 4 * T::kConsumers * T::kMulticast);
  }
  if constexpr (T::kBringsScales) {
    ptx::BarrierInit(smem.scales_full(), 32);
    ptx::BarrierInit(smem.scales_empty(), 4 * T::kConsumers);
  }
  ptx::BarrierInit(smem.partial_full(), 1);
  ptx::BarrierInit(smem.partial_empty(), 4);  // the warps of the CTA that adds up
  for (int s = 0; s < T::kRing; ++s) {
    ptx::BarrierInit(smem.stored(s), 4 * T::kConsumers);
    ptx::BarrierInit(smem.ring_full(s), 1);
    ptx::BarrierInit(smem.ring_empty(s), T::kCluster * (loaders + 4 * T::kConsumers));
  }
  ptx::BarrierInitFence();
}

template <class T, class Args>
__global__ void __launch_bounds__(T::kThreads, T::kCtasPerSm)
    MoeGemmKernel(const __grid_constant__ Args kernel_args) {
  static_assert(!kGoesOn<Args> || (T::kConsumers == 1 && T::kMulticast == 1));
  static_assert(sizeof(kernel_args) <= 4096);
  extern __shared__ __align__(1024) uint8_t raw_smem[];
  const SharedStorage<T> smem(raw_smem);
  const MoeGemmArgs& args = First(kernel_args);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // known to be the same
  const int lane = threadIdx.x % 32;

  if (warp == 0 && lane == 0) {
    if constexpr (!T::kPacked) {
      ptx::PrefetchTensorMap(&args.w_map);
      if (args.up_origin != 0) ptx::PrefetchTensorMap(&args.w_up_map);
    }
    ptx::PrefetchTensorMap(&args.x_map);
    constexpr int kWarpgroup = 128;
    const bool by_threads = args.gather && T::kGatherByThreads;
    const bool step_scales = T::kPromoted && args.scales.by_step;
    const int full_arrivals =
        1 + (by_threads ? kWarpgroup : 0) + (T::kGatherByWarp ? 32 : 0) + (step_scales ? 32 : 0);
    // The weight thread, the warps that load X, its scales, the warp that counts stored tiles.
    const int warp3 = step_scales || T::kBringsScales || kGoesOn<Args> ? 1 : 0;
    InitBarriers(smem, full_arrivals, 1 + (by_threads ? 4 : 1) + warp3);
  }
  if (T::kPromoted && !args.scales.by_step) {
    for (int i = threadIdx.x; i < T::kStages * T::kStepScaleBytes / 4; i += T::kThreads) {
      smem.step_scales(0)[i] = 1.0f;
    }
  }
  if constexpr (T::kCluster > 1 || T::kFinalizes) ptx::ClusterSyncInit();
  // ClusterSyncInit orders nothing but the initialization of barriers.
  if constexpr (T::kCluster == 1 || T::kPromoted) __syncthreads();

  // Each role is one branch, or ptxas ignores setmaxnreg.
  if (warp < 4) {
    if constexpr (T::kReconfigureRegisters) {
      cutlass::arch::warpgroup_reg_dealloc<T::kProducerRegisters>();
    }
    if (warp == 0) {
      if (T::kCluster == 1 || ptx::ClusterRank() == 0) {
        if (kGoesOn<Args> || !args.early_groups) GridDependencyWait();
        RunScheduler<T>(kernel_args, smem, lane);
      }
    } else if (warp == 1) {
      if (lane == 0) {
        RunWeightProducer<T>(kernel_args, smem);
      }
    } else {
      if (warp == 3) {
        // The next kernel may start only after this one has seen the end of the one before, so
        // that, before its own wait, it may read everything written two launches back.
        GridDependencyWait();
        GridDependencyLaunch();
        bool counts = kGoesOn<Args>;
        if constexpr (T::kPromoted) {
          if (args.scales.by_step) RunScaleProducer<T>(kernel_args, smem, lane);
          counts = counts && !args.scales.by_step;
        }
        if constexpr (T::kBringsScales) RunTileScales<T>(args, smem, lane);
        if constexpr (kGoesOn<Args>) {
          if (counts) RunStoredCounter<T>(kernel_args, smem, lane);
        }
      }
      if (warp == 2 && !(T::kGatherByThreads && args.gather)) {
        RunTokenProducer<T>(kernel_args, smem, lane);
      }
    }
  } else if (warp < 4 * T::kProducers) {
    if constexpr (T::kReconfigureRegisters) {
      cutlass::arch::warpgroup_reg_dealloc<T::kProducerRegisters>();
    }
    if constexpr (T::kGatherByThreads) {
      if (args.gather) RunGatherProducer<T>(args, smem, threadIdx.x - 128);
    }
  } else {
    if constexpr (T::kReconfigureRegisters) {
      cutlass::arch::warpgroup_reg_alloc<T::kConsumerRegisters>();
    }
    constexpr bool kOnly = T::kAddsLowRank && T::kConsumers == 1;  // known, which saves a register
    RunConsumer<T>(kernel_args, smem, kOnly ? 0 : warp / 4 - T::kProducers);
  }
  // Other CTAs may still write to this one's shared memory or arrive at its barriers. Rows of a
  // token are waited for by the CTA that adds them up.
  if constexpr (T::kCluster > 1) ptx::ClusterSync();
}

}  // namespace jaxmoe
