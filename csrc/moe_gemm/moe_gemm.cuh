// The grouped GEMM kernel: roles of the warps and the launch of one variant.
//
//   Y[r, n] = epilogue(sum_k W[e(r)][n, k] * X[x_row(r), k])
//
// Persistent CTAs of one producer warpgroup (warp 0 schedules, one thread of warp 1 loads weights,
// warp 2 loads rows of X) and one or two consumer warpgroups. Weights sit on wgmma's M side and
// tokens on N, for decode and prefill alike, so the token tile goes down to 8 and one tensor map
// serves all experts (the expert is a coordinate). Measurements behind the tile shapes are in
// docs/notes.md.
#pragma once

#include "csrc/moe_gemm/epilogue.cuh"
#include "csrc/moe_gemm/producer.cuh"
#include "csrc/moe_gemm/scheduler.cuh"

namespace jaxmoe {

template <class T>
__device__ __forceinline__ void RunConsumer(const MoeGemmArgs& args, const SharedStorage<T>& smem,
                                            int consumer) {
  const int thread = threadIdx.x % 128;
  const int lane = thread % 32;
  // Named barriers: 1 + consumer is the epilogue's, 3 + consumer orders ping-pong k loops.
  constexpr int kOrderBarrier = 3;
  PipelineState<T::kStages> stage;
  PipelineState<T::kRing> slot;
  const int first_block = T::kPingpong ? 0 : 2 * consumer;
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

    Accumulators<T> acc;
    if constexpr (T::kPingpong) ptx::NamedBarrierSync(kOrderBarrier + consumer, 256);
    RunMainloop<T>(smem, args.num_k_steps, first_block, lane, stage, acc);
    if constexpr (T::kPingpong) ptx::NamedBarrierArrive(kOrderBarrier + (consumer ^ 1), 256);
    __syncwarp();
    if (lane == 0) ptx::BarrierArrive(smem.ring_empty(slot.index));

    EpilogueSite site;
    site.tile = info;
    site.feature = info.w_tile * (T::kGated ? T::kWeightTile / 2 : T::kWeightTile) +
                   (first_block / 2) * T::kOutFeatures;
    site.weight_row0 = WeightRow<T>(args, info.w_tile, first_block);
    site.weight_row1 = WeightRow<T>(args, info.w_tile, first_block + 1);
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
    for (int s = 0; s < T::kStages; ++s) {
      ptx::BarrierInit(smem.full(s), 1);
      ptx::BarrierInit(smem.empty(s), 4 * (T::kPingpong ? 1 : T::kConsumers));
    }
    for (int s = 0; s < T::kRing; ++s) {
      ptx::BarrierInit(smem.ring_full(s), 1);
      // The weight producer, the token producer and the warps of the consumers of this slot.
      ptx::BarrierInit(smem.ring_empty(s), 2 + 4 * (T::kPingpong ? 1 : T::kConsumers));
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
    } else if (warp == 2) {
      RunTokenProducer<T>(args, smem, lane);
    } else {
      // The next kernel may start only when this one has seen the end of the one before: then it
      // may rely, before its own wait, on everything written two launches back.
      GridDependencyWait();
      GridDependencyLaunch();
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
  return LaunchKernel(&MoeGemmKernel<T>, dim3(grid), dim3(T::kThreads), T::kDynamicBytes, stream,
                      pdl, args);
}

// The tile table of one element type and weight layout. Decode tiles (one consumer warpgroup, two
// CTAs an SM) keep >= 96 KB of weights in flight per SM; prefill tiles use the whole SM.
template <class Element, cute::SM90::GMMA::Major kMajor, bool kGated, int kWt, int kTt, int kStages,
          bool kPingpong, int kCtas>
Variant MakeVariant(DType dtype, WeightLayout layout) {
  using T = Tile<Element, kMajor, kGated, kWt, kTt, kStages, kPingpong, kCtas>;
  return {dtype, layout, kGated, kWt, kTt, kPingpong, kCtas, &LaunchVariant<T>};
}

template <class Element, cute::SM90::GMMA::Major kMajor>
VariantTable MakeVariants(DType dtype, WeightLayout layout) {
#define JAXMOE_TILE(gated, wt, tt, stages, pingpong, ctas) \
  MakeVariant<Element, kMajor, gated, wt, tt, stages, pingpong, ctas>(dtype, layout)
  static const Variant rows[] = {
      JAXMOE_TILE(true, 128, 8, 6, false, 2),    JAXMOE_TILE(false, 128, 8, 6, false, 2),
      JAXMOE_TILE(true, 128, 16, 5, false, 2),   JAXMOE_TILE(false, 128, 16, 5, false, 2),
      JAXMOE_TILE(true, 128, 32, 5, false, 2),   JAXMOE_TILE(false, 128, 32, 5, false, 2),
      JAXMOE_TILE(true, 128, 64, 4, false, 2),   JAXMOE_TILE(false, 128, 64, 4, false, 2),
      JAXMOE_TILE(true, 256, 64, 5, false, 1),   JAXMOE_TILE(false, 256, 64, 5, false, 1),
      JAXMOE_TILE(true, 256, 96, 4, false, 1),   JAXMOE_TILE(false, 256, 96, 4, false, 1),
      JAXMOE_TILE(true, 128, 128, 6, true, 1),   JAXMOE_TILE(false, 128, 128, 6, true, 1),
      JAXMOE_TILE(true, 256, 128, 4, false, 1),  JAXMOE_TILE(false, 256, 128, 4, false, 1),
  };
#undef JAXMOE_TILE
  return {rows, static_cast<int>(sizeof(rows) / sizeof(rows[0]))};
}

}  // namespace jaxmoe
