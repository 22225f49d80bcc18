// Host contract of the weight gradient: a product that contracts over the rows of each group.
//
//   dw[i][k, n] (+)= sum over the rows t of the groups of weight i of x[t, k] * dy[t, n]
//
// Letters as in the primitive: t rows, k columns of x, n columns of dy, i weights. Groups g, g +
// num_weights, ... belong to weight g. A weight without rows is zero, or with `accumulate` stays.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/common/types.h"

namespace jaxmoe {

// Pointers are device pointers.
struct TgmmProblem {
  DType dtype = DType::kBFloat16;     // of x and dy: bf16 or fp16
  const void* x = nullptr;            // [rows, k]
  const void* dy = nullptr;           // [rows, n]
  void* dw = nullptr;                 // [num_weights, k, n]
  bool out_f32 = false;               // of dw; else as the operands
  bool accumulate = false;            // adds to dw, in float32 with one rounding
  const int* group_starts = nullptr;  // [num_groups]; with group_sizes null [num_groups + 1]
  const int* group_sizes = nullptr;   // [num_groups] or null: starts[g + 1] - starts[g]
  int* tile_counter = nullptr;        // one int, zero when the kernel starts
  int num_weights = 0;
  int num_groups = 0;
  int groups_per_batch = 0;
  int rows_per_batch = 0;
  int k = 0;
  int n = 0;
  bool pdl = false;  // programmatic dependent launch
};

// A row of the tile table in tgmm.cu.
struct TgmmConfig {
  int cluster = 2;  // CTAs that share an operand, each with columns of its own of the other
};

// Returns null when launched, otherwise a static or thread-local message. Never allocates.
const char* LaunchTgmm(const TgmmProblem& problem, const TgmmConfig& config, cudaStream_t stream);

}  // namespace jaxmoe
