// The grouped GEMM kernel: roles of the warps and the launch of one variant.
//
//   Y[r, n] = epilogue(sum_k W[e(r)][n, k] * X[x_row(r), k])
//
// Persistent CTAs of one producer warpgroup (warp 0 schedules, one thread of warp 1 loads weights,
// warps 2 and 3 load rows of X) and one or two consumer warpgroups. Weights sit on wgmma's M side
// and tokens on N, for decode and prefill alike, so the token tile goes down to 8 and one tensor
// map serves all experts (the expert is a coordinate). Measurements behind the tile shapes are in
// docs/notes.md.
#pragma once

#include "csrc/moe_gemm/epilogue.cuh"
#include "csrc/moe_gemm/producer.cuh"
#include "csrc/moe_gemm/scheduler.cuh"

namespace jaxmoe {

template <class T>
__device__ __forceinline__ WarpgroupShare Share(int rows, int consumer, bool gathered) {
  if constexpr (T::kSplit == Split::kTokens) {
    constexpr int kStep = 2 * T::kTokenStep;
    const int half = (rows + kStep - 1) / kStep * T::kTokenStep;
    const int first = consumer * half;
    return {0, first, min(max(rows - first, 0), half), half, gathered};
  }
  return {T::kSplit == Split::kWeights ? 2 * consumer : 0, 0, rows, rows, gathered};
}

template <class T>
__device__ __forceinline__ void RunConsumer(const MoeGemmArgs& args,
                                            const SharedStorage<T>& smem,
                                            int consumer) {
  const int thread = threadIdx.x % 128;
  const int lane = thread % 32;
  // Named barriers: 1 + consumer is the epilogue's, 3 + consumer orders ping-pong k loops.
  constexpr int kOrderBarrier = 3;
  PipelineState<T::kStages> stage;
  PipelineState<T::kRing> slot;
  if constexpr (T::kPingpong) {
    if (consumer == 1) {
      slot.Advance();
      stage.Advance(args.num_k_steps);
      ptx::NamedBarrierArrive(kOrderBarrier + 0, 256);  // consumer 0 may start
    }
  }
  while (true) {
    ptx::BarrierWait(smem.ring_full(slot.index), slot.parity);
    const TileInfo info = smem.ring()[slot.index];
    if (info.rows == 0) break;

    const WarpgroupShare share = Share<T>(info.rows, consumer, args.gather);
    Accumulators<T> acc;
    if constexpr (T::kPingpong) ptx::NamedBarrierSync(kOrderBarrier + consumer, 256);
    RunMainloop<T>(smem, args.num_k_steps, share, lane, stage, acc);
    if constexpr (T::kPingpong) ptx::NamedBarrierArrive(kOrderBarrier + (consumer ^ 1), 256);
    __syncwarp();
    if (lane == 0) ptx::BarrierArrive(smem.ring_empty(slot.index));

    EpilogueSite site;
    site.weight = info.weight;
    site.row = info.row + share.first_token;
    site.rows = share.rows;
    site.feature = info.w_tile * (T::kGated ? T::kWeightTile / 2 : T::kWeightTile) +
                   (share.first_block / 2) * T::kOutFeatures;
    site.weight_row0 = WeightRow<T>(args, info.w_tile, share.first_block);
    site.weight_row1 = WeightRow<T>(args, info.w_tile, share.first_block + 1);
    site.consumer = consumer;
    site.thread = thread;
    Epilogue<T>(args, smem, site).Run(acc);

    slot.Advance();
    if constexpr (T::kPingpong) {
      slot.Advance();
      stage.Advance(args.num_k_steps);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kCtasPerSm)
    MoeGemmKernel(const __grid_constant__ MoeGemmArgs args) {
  extern __shared__ uint8_t raw_smem[];
  const SharedStorage<T> smem(raw_smem);
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;

  if (warp == 0 && lane == 0) {
    ptx::PrefetchTensorMap(&args.w_map);
    ptx::PrefetchTensorMap(&args.x_map);
    const bool by_threads = args.gather && T::kGatherByThreads;
    for (int s = 0; s < T::kStages; ++s) {
      ptx::BarrierInit(smem.full(s), by_threads ? 1 + T::kGatherThreads : 1);
      ptx::BarrierInit(smem.empty(s), 4 * T::kReaders);
    }
    for (int s = 0; s < T::kRing; ++s) {
      ptx::BarrierInit(smem.ring_full(s), 1);
      // The weight thread, the warps that load X and those of the consumers of this slot.
      ptx::BarrierInit(smem.ring_empty(s), (by_threads ? 3 : 2) + 4 * T::kReaders);
    }
    ptx::BarrierInitFence();
  }
  __syncthreads();

  // Each role is one branch, or ptxas ignores setmaxnreg.
  if (warp < 4) {
    if constexpr (T::kReconfigureRegisters) {
      cutlass::arch::warpgroup_reg_dealloc<T::kProducerRegisters>();
    }
    if (warp == 0) {
      if (!args.early_groups) GridDependencyWait();
      RunScheduler<T>(args, smem, lane);
    } else if (warp == 1) {
      if (lane == 0) RunWeightProducer<T>(args, smem);
    } else {
      if (warp == 3) {
        // The next kernel may start only when this one has seen the end of the one before: then it
        // may rely, before its own wait, on everything written two launches back.
        GridDependencyWait();
        GridDependencyLaunch();
      }
      if (T::kGatherByThreads && args.gather) {
        RunGatherProducer<T>(args, smem, threadIdx.x - 64);
      } else if (warp == 2) {
        RunTokenProducer<T>(args, smem, lane);
      }
    }
  } else {
    if constexpr (T::kReconfigureRegisters) {
      cutlass::arch::warpgroup_reg_alloc<T::kConsumerRegisters>();
    }
    RunConsumer<T>(args, smem, warp / 4 - 1);
  }
}

template <class T>
cudaError_t LaunchVariant(const MoeGemmArgs& args, int grid, bool pdl, cudaStream_t stream) {
  return LaunchKernel(
      &MoeGemmKernel<T>, dim3(grid), dim3(T::kThreads), T::kDynamicBytes, stream, pdl, args);
}

// The tile table of one element type and weight layout. Decode tiles (one consumer warpgroup, two
// CTAs an SM) keep >= 96 KB of weights in flight per SM; the others use the whole SM.
template <class Element,
          cute::SM90::GMMA::Major kMajor,
          bool kGated,
          int kWt,
          int kTt,
          int kStages,
          Split kSplit,
          int kCtas>
Variant MakeVariant(DType dtype, WeightLayout layout) {
  using T = Tile<Element, kMajor, kGated, kWt, kTt, kStages, kSplit, kCtas>;
  return {dtype, layout, kGated, kWt, kTt, T::kPingpong, kCtas, T::kBoxRows, &LaunchVariant<T>};
}

template <class Element, cute::SM90::GMMA::Major kMajor>
VariantTable MakeVariants(DType dtype, WeightLayout layout) {
#define JAXMOE_TILE(wt, tt, stages, split, ctas)                                         \
  MakeVariant<Element, kMajor, true, wt, tt, stages, Split::split, ctas>(dtype, layout), \
      MakeVariant<Element, kMajor, false, wt, tt, stages, Split::split, ctas>(dtype, layout)
  static const Variant rows[] = {
      JAXMOE_TILE(128, 8, 6, kNone, 2),
      JAXMOE_TILE(128, 16, 5, kNone, 2),
      JAXMOE_TILE(128, 32, 5, kNone, 2),
      JAXMOE_TILE(128, 192, 5, kTokens, 1),
      JAXMOE_TILE(128, 128, 6, kPingpong, 1),
      JAXMOE_TILE(256, 128, 4, kWeights, 1),
  };
#undef JAXMOE_TILE
  return {rows, static_cast<int>(sizeof(rows) / sizeof(rows[0]))};
}

}  // namespace jaxmoe
