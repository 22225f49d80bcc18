// Argument block of the grouped GEMM's kernels, passed by value in constant memory.
#pragma once

#include <cuda.h>

#include "csrc/gemm/moe_gemm.h"

namespace jaxmoe {

// Scales of an FP8 product, in floats and strides of floats. Steps are those of k.
struct ScaleArgs {
  const float* w;
  const float* x;
  const float* out;    // null: the output is not quantized
  float* out_groups;   // scales of the output's groups of 128, to be written; or null
  const int* x_index;  // row -> row of x's scales; null: the same
  int64_t w_stride;    // from a weight to the next
  int w_row_stride;    // from a weight row (128 of them, if by_step) to the next
  int w_up;            // from a weight's first scale to that of its up rows, if apart; else 0
  int x_row_stride;
  int num_x;     // weight w starts at x[w % num_x]
  int num_out;   // the output of weight w is quantized by out[w % num_out]
  bool by_step;  // a scale for each step
  bool half;     // bias and output are fp16, else bf16
};

// Packed weights, see PackedLayout.
struct PackedArgs {
  const uint8_t* w;
  const uint8_t* w_up;       // the up half, if it is an array of its own
  int64_t weight_bytes;      // from a weight to the next
  int64_t block_bytes;       // from 64 rows to the next
  int64_t superblock_bytes;  // from a superblock to the next along k
  int superblock_steps;      // pipeline steps of a superblock
  int strip_bytes;           // of a superblock
  bool by_32;                // int4: two scales a step
  bool has_zeros;            // int4
};

// Those of a layout, but for where weights are.
inline PackedArgs PackedArgsOf(const PackedLayout& layout, int64_t k) {
  PackedArgs packed{};
  packed.superblock_bytes = layout.superblock_bytes(k);
  packed.superblock_steps = layout.superblock_k(k) / 64;
  packed.block_bytes = k / layout.superblock_k(k) * packed.superblock_bytes;
  packed.strip_bytes = layout.strip_bytes;
  packed.by_32 = layout.groups == 2;
  packed.has_zeros = layout.has_zeros;
  return packed;
}

struct MoeGemmArgs {
  CUtensorMap w_map;  // (k, n, weight) or (n, k, weight): boxes of 128 bytes x 64 x 1
  CUtensorMap x_map;  // (k, row): boxes of 128 bytes x box_rows, or x 1 if boxes gather
  const int* group_starts;
  const int* group_sizes;
  const int* row_index;
  int* tile_counter;
  const void* x;
  const void* bias;
  void* out;
  const uint64_t* out_rows;  // addresses of rows that are stored elsewhere than in `out`, or null
  int num_groups;
  int groups_per_batch;
  int rows_per_batch;
  int num_weights;
  int k;
  int n;      // weight rows, those of w_up included
  int n_out;  // output features
  int num_k_steps;
  int num_w_tiles;
  int raster;  // weight tiles per panel, >= 1
  // Two 64-row blocks of a tile make a pair. With gate and up in halves, one is of each half.
  int pair_rows;      // weight rows from a pair's first block to the next pair's
  int block_base[2];  // weight rows of the first pair's blocks
  bool gated;
  bool interleaved;  // gate and up alternate by row
  bool gather;
  bool out_f32;
  bool early_groups;
  bool stream_weights;    // L2 may drop weights first
  bool prefetch_weights;  // tiles without a cluster and k along rows: ahead, into L2
  bool plans;             // groups and row_index come from `plan`, see slot_plan.cuh
  bool writes_plan;       // the kernel writes slot_to_row and the number of rows for later ones
  PlanParams plan;
  ActivationParams activation;
  void* z;           // sums before the activation, to be written; or null. Not FP8
  ScaleArgs scales;  // FP8; packed weights: w, x of rows or null, num_x and half only
  PackedArgs packed;
  CUtensorMap w_up_map;          // like w_map, for up rows in an array of their own
  int up_origin;                 // weight row of the first row of that array, 0 if there is none
  int64_t x_rows;                // rows of X that row_index may name; others are zeros
  LowRankProduct low;            // of kernels that add it
  const uint32_t* sources_came;  // or null, see MoeGemmProblem
  int groups_per_source;
  bool may_narrow;  // most groups have few rows, see Tile::kFlexible
  bool few_tiles;   // a CTA may have but a few, see EvenTileRows
};

// The down product of one token and where its sum goes, see sm90/token_finalize.cuh.
struct FinalizedArgs : MoeGemmArgs {
  FinalizedToken token;
};

// Both products of a layer of one token, and where its sum goes, see sm90/slices.cuh.
struct SliceArgs {
  MoeGemmArgs products[2];
  FinalizedToken token;
  float* sums;  // [slices, top_k, H]: of each expert, at the first choice that names it
  int slices;   // of an expert's intermediate
};

// Both products of a layer, see sm90/products.cuh.
struct MoeLayerArgs {
  MoeGemmArgs products[2];  // gate-up and down, with as many rows in the same groups
  int* stored;              // [rows]: at a token tile's first row, see sm90/stored.cuh; zero first
  int count_mask;           // the bits of that which are a count,
  int complete;             // and what it is when the down product may read the rows
  // The intermediate quantized by groups of 128, which is what the down product reads, or null.
  void* act_values;   // [rows, n_out], e4m3
  float* act_scales;  // [rows, ceil(n_out / 128)]
};

// Of MoeLayerArgs::stored, where groups of 128 features are quantized: the low bits are the count,
// each of the others belongs to a group, see sm90/stored.cuh.
inline constexpr int kStoredCountBits = 8;
inline constexpr int kMaxStoredGroups = 32 - kStoredCountBits;

// Tiles a CTA up to which the scheduler chooses how many rows they have, see EvenTileRows.
inline constexpr int kFewTiles = 4;

// One instantiated kernel. `launch` sets attributes and launches on `grid` CTAs.
struct Variant {
  DType dtype;
  WeightLayout layout;
  Packing packing;
  bool promoted;
  int weight_tile;
  int token_tile;
  int ctas_per_sm;
  int cluster;       // CTAs that share a tile of cluster * token_tile rows
  int split_k;       // CTAs that share the k loop of a tile
  int step_k;        // elements of k in a pipeline step
  int box_rows;      // rows of X a bulk copy brings
  bool gathers;      // rows of X through row_index
  bool stores_sums;  // MoeGemmArgs::z
  bool scales_rows;  // scales of rows of X beside packed weights
  cudaError_t (*launch)(const MoeGemmArgs&, int grid, bool pdl, cudaStream_t);
  // The kernel that adds MoeGemmArgs::low, or null.
  cudaError_t (*launch_adapted)(const MoeGemmArgs&, int grid, bool pdl, cudaStream_t);
  // The kernel that goes on with the down product, or null.
  cudaError_t (*launch_layer)(const MoeLayerArgs&, int grid, bool pdl, cudaStream_t);
  // The kernel that adds up the rows of one token, or null.
  cudaError_t (*launch_finalized)(const FinalizedArgs&, bool pdl, cudaStream_t);
  // The kernels of a layer of one token, or null.
  cudaError_t (*launch_slices)(const SliceArgs&, cudaStream_t);
};

struct VariantTable {
  const Variant* rows;
  int size;
};

// The tables of sm90/inst_*.cu; dispatch.cc searches them all.
VariantTable Bf16KnVariants();
VariantTable Bf16NkVariants();
VariantTable Fp16KnVariants();
VariantTable Fp16NkVariants();
VariantTable Tf32Variants();
VariantTable E4M3Variants();
VariantTable E4M3PromotedVariants();
VariantTable E5M2Variants();
VariantTable E5M2PromotedVariants();
VariantTable Mxfp4Bf16Variants();
VariantTable Mxfp4Fp16Variants();
VariantTable Nvfp4Bf16Variants();
VariantTable Nvfp4Fp16Variants();
VariantTable Int4Bf16Variants();
VariantTable Int4Fp16Variants();
VariantTable Int4E4M3Variants();
VariantTable Int8Bf16Variants();
VariantTable Int8Fp16Variants();
VariantTable Mxfp8Bf16Variants();
VariantTable Mxfp8Fp16Variants();

}  // namespace jaxmoe
