// Part of a tile that one consumer warpgroup computes.
#pragma once

#include "csrc/gemm/sm90/tile.cuh"

namespace jaxmoe {

// acc[b] is 64-row weight block b of the warpgroup by its tokens; if gated, blocks of gate and of
// up rows alternate. With tokens on M, acc[b] is block b of 64 tokens by the warpgroup's 128 weight
// rows.
template <class T>
using Accumulators = float[2][T::kWarpgroupTokens / 2];

// Weight blocks and tokens of a stage that a warpgroup multiplies.
struct WarpgroupShare {
  int first_block;  // first of two 64-row weight blocks
  int first_token;
  int rows;     // tokens that are stored
  int columns;  // tokens that wgmma's N must cover, at least
  bool copied;  // threads wrote the rows of X, not the copy engine
};

// Place of a warpgroup's part of a tile in the output.
struct EpilogueSite {
  int weight;       // index of the weight matrix, for bias and scales
  int row;          // first output row
  int rows;         // rows to store
  int feature;      // first output feature
  int weight_row0;  // first weight row of its first 64-row block, for bias and scales
  int weight_row1;  // first weight row of its second
  int consumer;     // for its staging buffer and named barrier
  int thread;       // 0..127
};

}  // namespace jaxmoe
