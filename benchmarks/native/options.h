// Command line of gemm_bench: what to measure, checked before the device is touched.
#pragma once

#include <string>
#include <vector>

#include "csrc/gemm/moe_gemm.h"

namespace jaxmoe::bench {

// The shape of one layer: H, I, E, K. All run as plain SwiGLU without biases.
struct Model {
  const char* name;
  int hidden;
  int intermediate;
  int num_experts;
  int top_k;
};

enum class Skew { kUniform, kZipf, kOneExpert };
enum class Op { kGemm1, kGemm2, kLayer };

struct Options {
  std::vector<Model> models;
  std::vector<int> tokens = {1, 64, 1024, 4096};
  std::vector<Op> ops = {Op::kGemm1, Op::kGemm2, Op::kLayer};
  std::vector<TileConfig> tiles;  // empty: those that make sense, see TilesToTry
  std::vector<TileConfig> down;   // at most one; empty: as the gate-up product
  Skew skew = Skew::kUniform;
  WeightLayout layout = WeightLayout::kNK;
  int sustained_ms = 0;
  bool check = false;
  bool help = false;
};

extern const char kUsage[];

// Throws std::invalid_argument with a message that says what is allowed.
Options ParseOptions(int argc, char** argv);

// Every tile with a kernel, raster 1, without gather.
std::vector<TileConfig> InstantiatedTiles(WeightLayout layout);

const char* Name(Op op);
const char* Name(Skew skew);
const char* Name(WeightLayout layout);
std::string Name(const TileConfig& tile);  // as --tiles takes it

}  // namespace jaxmoe::bench
