// What a consumer warpgroup holds of a tile.
#pragma once

#include "csrc/gemm/sm90/tile.cuh"

namespace jaxmoe {

// acc[b] is the 64-row block b of the warpgroup by its tokens; gate and up rows when gated. Where
// tokens are on M: block b of 64 tokens by the warpgroup's 128 weight rows.
template <class T>
using Accumulators = float[2][T::kWarpgroupTokens / 2];

// What a warpgroup takes of each stage.
struct WarpgroupShare {
  int first_block;  // of its two 64-row weight blocks
  int first_token;
  int rows;       // tokens that are stored
  int columns;    // tokens that are multiplied, if on N: it covers at least these
  bool gathered;  // threads wrote the rows of X, not the copy engine
};

}  // namespace jaxmoe
