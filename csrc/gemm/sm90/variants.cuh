// The kernels of one format: their tiles, and how each is launched.
#pragma once

#include <algorithm>

#include "csrc/gemm/sm90/kernel.cuh"
#include "csrc/gemm/sm90/slices.cuh"

namespace jaxmoe {

// Launches a persistent kernel on at most `grid` CTAs, none of which waits for another to end.
template <class T, class Args>
cudaError_t LaunchPersistent(const Args& args, int grid, bool pdl, cudaStream_t stream) {
  constexpr auto kKernel = &MoeGemmKernel<T, Args>;
  const dim3 block(T::kThreads);
  if constexpr (T::kCluster > 1) {
    int most = 0;
    JAXMOE_RETURN_IF_CUDA_ERROR(
        GetMaxClusters<kKernel>(block, T::kCluster, T::kSharedBytes, &most));
    grid = std::min(grid, most * T::kCluster);
  }
  return LaunchClusters(
      kKernel, dim3(grid), block, T::kCluster, T::kSharedBytes, stream, pdl, args);
}

template <class T>
cudaError_t LaunchProduct(const MoeGemmArgs& args, int grid, bool pdl, cudaStream_t stream) {
  if constexpr (!T::kSplitsByProduct) {
    return LaunchPersistent<T, MoeGemmArgs>(args, grid, pdl, stream);
  } else {
    using Gated = typename T::template Only<Products::kGated>;
    using Ungated = typename T::template Only<Products::kUngated>;
    return args.gated ? LaunchPersistent<Gated, MoeGemmArgs>(args, grid, pdl, stream)
                      : LaunchPersistent<Ungated, MoeGemmArgs>(args, grid, pdl, stream);
  }
}

// Launches clusters of as many CTAs as the token has experts, each of them for one tile.
template <class T>
cudaError_t LaunchFinalized(const FinalizedArgs& args, bool pdl, cudaStream_t stream) {
  using Finalized = typename T::template Only<Products::kFinalized>;
  const int cluster = static_cast<int>(args.plan.top_k);
  return LaunchClusters(&MoeGemmKernel<Finalized, FinalizedArgs>,
                        dim3(args.num_w_tiles * cluster),
                        dim3(Finalized::kThreads),
                        cluster,
                        Finalized::kSharedBytes,
                        stream,
                        pdl,
                        args);
}

template <class T, WeightLayout kLayout>
Variant MakeVariant() {
  Variant v{};
  v.dtype = DTypeOf<typename T::Weight>();
  v.layout = kLayout;
  v.packing = T::kPacking;
  v.promoted = T::kPromoted;
  v.weight_tile = T::kWeightTile;
  v.token_tile = T::kTokenTile;
  v.ctas_per_sm = T::kCtasPerSm;
  v.cluster = T::kMulticast;
  v.split_k = T::kSplitK;
  v.step_k = T::kStepK;
  v.box_rows = T::kBoxRows;
  v.gathers = T::kGatherByThreads || (T::kPacked ? T::kWarpProducts : T::kDecode);
  v.stores_sums = !T::kScaled;
  v.scales_rows = TakesRowScales<T>();
  v.launch = &LaunchProduct<T>;
  if constexpr (T::kHasAdaptedKernel) {
    v.launch_adapted = &LaunchPersistent<typename T::Adapted, MoeGemmArgs>;
  }
  if constexpr (T::kHasLayerKernel) {
    v.launch_layer = &LaunchPersistent<typename T::Layer, MoeLayerArgs>;
  }
  if constexpr (T::kHasFinalizedKernel) v.launch_finalized = &LaunchFinalized<T>;
  if constexpr (T::kHasLayerKernel && T::kPacked) {
    v.launch_slices = &LaunchSlices<typename T::Decoder>;
  }
  return v;
}

// The tile table of one format and weight layout. Of weights as they are, decode tiles (one
// consumer warpgroup, two CTAs an SM) keep >= 96 KB in flight per SM; the others use the whole SM.
// Promoted sums of 256 x 160 would not fit the registers.
template <class Format, WeightLayout kLayout>
VariantTable MakeVariants() {
  constexpr auto kMajor =
      kLayout == WeightLayout::kNK ? cute::SM90::GMMA::Major::K : cute::SM90::GMMA::Major::MN;
#define JAXMOE_TILE(wt, tt, stages, split, ...) \
  MakeVariant<Tile<Format, kMajor, wt, tt, stages, Split::split, __VA_ARGS__>, kLayout>()
  if constexpr (Format::kScaling == Scaling::kStep) {
    static const Variant rows[] = {
        JAXMOE_TILE(128, 8, 6, kNone, 2, 1, 1),
        JAXMOE_TILE(128, 8, 6, kNone, 2, 1, 2),
        JAXMOE_TILE(128, 32, 5, kNone, 2, 1, 1),
        JAXMOE_TILE(128, 192, 5, kTokens, 1, 1, 1),
        JAXMOE_TILE(128, 256, 4, kTokens, 1, 1, 1),
        JAXMOE_TILE(256, 128, 4, kWeights, 1, 1, 1),
    };
    return {rows, static_cast<int>(std::size(rows))};
  } else if constexpr (HasTokenSums<Format>()) {
    static const Variant rows[] = {
        JAXMOE_TILE(256, 128, 5, kWeights, 1, 1, 1),
    };
    return {rows, static_cast<int>(std::size(rows))};
  } else if constexpr (Format::kPacking != Packing::kNone) {
    // Decoding takes time that hides behind that of other CTAs: none has an SM for itself.
    constexpr bool kNarrow = Format::kValueBytes == 2048;
    static const Variant rows[] = {
        JAXMOE_TILE(128, 16, (kNarrow ? 9 : 6), kNone, 3, 1, 1),
        JAXMOE_TILE(128, 16, (kNarrow ? 8 : 5), kNone, 3, 1, 2),
        JAXMOE_TILE(128, 16, (kNarrow ? 6 : 4), kNone, 3, 1, 4),
        JAXMOE_TILE(128, 32, (kNarrow ? 3 : 2), kNone, 3, 1, 1),
        JAXMOE_TILE(128, 64, (kNarrow ? 4 : 3), kNone, 2, 1, 1),
        JAXMOE_TILE(128, 128, 4, kNone, 2, 1, 1),
        JAXMOE_TILE(128, 160, (kNarrow ? 4 : 3), kNone, 2, 1, 1),
    };
    return {rows, static_cast<int>(std::size(rows))};
  } else {
    constexpr Products kOf =
        std::is_same_v<typename Format::Out, float> ? Products::kUngated : Products::kAny;
    static const Variant rows[] = {
        JAXMOE_TILE(128, 8, 6, kNone, 2, 1, 1, kOf),
        JAXMOE_TILE(128, 8, 6, kNone, 2, 1, 2, kOf),
        JAXMOE_TILE(128, 32, 5, kNone, 2, 1, 1, kOf),
        JAXMOE_TILE(128, 192, 5, kTokens, 1, 1, 1, kOf),
        JAXMOE_TILE(256, 160, 4, kWeights, 1, 1, 1, kOf),
        JAXMOE_TILE(256, 160, 4, kWeights, 1, 2, 1, kOf),
    };
    return {rows, static_cast<int>(std::size(rows))};
  }
#undef JAXMOE_TILE
}

}  // namespace jaxmoe
