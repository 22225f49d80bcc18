// The products that one launch computes: one, or both of a layer, where CTAs go on with the down
// product while tiles of the gate-up product are still being computed.
//
// Tiles are numbered, those of the gate-up product first, and drawn in order from one counter. A
// tile of the down product reads what gate-up tiles of its rows store; the warps that bring
// its tokens and their scales wait until all of those are counted. Weights wait for nothing, so
// they stream while the gate-up product comes to its end. A tile waits for smaller numbers alone,
// which CTAs have drawn that run: none waits for ever, however few CTAs run at once. That is why
// the first tile of a CTA is drawn as well.
//
// Both products divide groups into the same token tiles, so the first row of one names it. Rows of
// X may lie where the down product stores its own: those of a group are read before any is written.
#pragma once

#include <type_traits>

#include "csrc/common/pipeline.cuh"
#include "csrc/gemm/args.h"

namespace jaxmoe {

__device__ __forceinline__ const MoeGemmArgs& First(const MoeGemmArgs& args) { return args; }
__device__ __forceinline__ const MoeGemmArgs& First(const MoeLayerArgs& args) {
  return args.products[0];
}

__device__ __forceinline__ const MoeGemmArgs& Second(const MoeGemmArgs& args) { return args; }
__device__ __forceinline__ const MoeGemmArgs& Second(const MoeLayerArgs& args) {
  return args.products[1];
}

// Whether a kernel with these arguments computes both products. That is known when it is compiled:
// a kernel of one product reads its arguments at fixed addresses, which saves a microsecond at one
// token.
template <class Args>
inline constexpr bool kGoesOn = std::is_same_v<Args, MoeLayerArgs>;

__device__ __forceinline__ constexpr bool IsSecond(const MoeGemmArgs&, const TileInfo&) {
  return false;
}
__device__ __forceinline__ bool IsSecond(const MoeLayerArgs&, const TileInfo& info) {
  return info.second();
}

// The product that a tile belongs to.
template <class Args>
__device__ __forceinline__ const MoeGemmArgs& ProductOf(const Args& args, const TileInfo& info) {
  return IsSecond(args, info) ? Second(args) : First(args);
}

// The tile in the numbers of its product.
template <class Args>
__device__ __forceinline__ TileInfo InProduct(const Args& args, const TileInfo& info) {
  return {info.weight, info.row, info.rows, IsSecond(args, info) ? ~info.w_tile : info.w_tile};
}

}  // namespace jaxmoe
