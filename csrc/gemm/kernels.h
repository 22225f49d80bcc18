// List of the grouped GEMM's kernels, for the host to compare with.
#pragma once

#include <vector>

#include "csrc/gemm/moe_gemm.h"

namespace jaxmoe {

struct KernelInfo {
  Packing packing;
  DType dtype;  // of the weights
  WeightLayout layout;
  bool promoted;
  TileConfig tile;
  int ctas_per_sm;
  bool computes_layer;  // there is a kernel that goes on with the down product
  bool adds_low_rank;   // there is one that adds what adapters add
};

std::vector<KernelInfo> Kernels();

}  // namespace jaxmoe
