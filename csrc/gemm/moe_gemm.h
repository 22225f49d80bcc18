// Host contract of the grouped GEMM: what a launch needs, in plain types.
//
// Y[r, n] = epilogue(sum_k W[e(r)][n, k] * X[x_row(r), k]),  r a row of group e.
//
// Letters: r permuted rows (R of them), n output features (N), k contraction (K), e groups.
// wgmma's M side holds the weights (n) and its N side the rows (r), but see promoted.cuh.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/common/types.h"
#include "csrc/gemm/formats.h"
#include "csrc/kernels/plan.h"

namespace jaxmoe {

enum class WeightLayout : int { kKN, kNK };  // [E, K, N] or [E, N, K]
enum class GateUp : int { kGateUp, kUpGate, kInterleaved };

template <>
struct EnumNames<WeightLayout> {
  static constexpr const char* kAll[] = {"kn", "nk"};
};

template <>
struct EnumNames<GateUp> {
  static constexpr const char* kAll[] = {"gate_up", "up_gate", "interleaved"};
};

// Activation in the kernel's form, see jaxmoe/activation.py.
struct ActivationParams {
  enum Kind : int { kSigmoid, kErf, kRelu, kRelu2, kIdentity, kStep, kSoftcap };
  int kind = kIdentity;
  float c1 = 0.0f;
  float c3 = 0.0f;
  float limit = 0.0f;
  float beta = 0.0f;
};

template <>
struct EnumNames<ActivationParams::Kind> {
  static constexpr const char* kAll[] = {
      "sigmoid", "erf", "relu", "relu2", "identity", "step", "softcap"};
};

// Tile of a kernel, chosen by jaxmoe/_gemm/tiles.py among those of sm90/kernel.cuh.
struct TileConfig {
  int weight_tile = 128;    // weight rows per CTA tile
  int token_tile = 8;       // rows per CTA tile
  int cluster = 1;          // CTAs that share a weight tile, each with rows of its own
  int split_k = 1;          // CTAs that share the k loop of a tile
  int raster = 1;           // weight tiles per raster panel, 0 = all of them
  bool gather = false;      // X rows fetched through row_index
  bool one_kernel = false;  // of the gate-up product: its kernel goes on with the down product
};

// True if a GEMM is launched to overlap the end of the kernel before it. GEMMs bound by reading
// weights gain 2-4 us; compute-bound ones measured slower (two streams share L2 and power).
constexpr bool OverlapsPrevious(int64_t rows, int64_t groups) { return rows <= 192 * groups; }

// Slots that a GEMM can plan by itself: a lane of a warp each.
inline constexpr int64_t kMaxPlannedSlots = 32;

// Choices of a token that a GEMM can finalize: CTAs that a cluster has on every card.
inline constexpr int64_t kMaxFinalizedChoices = 8;

// Mean rows of a group, and 128-byte steps of a weight row, from which on wide tiles bring weights
// into L2 before they have a stage for them.
inline constexpr int64_t kMinPrefetchRows = 32;
inline constexpr int kMinPrefetchSteps = 17;
// Mean rows of a group up to which, and groups among which a product looks for the largest one, see
// Tile::kFlexible.
inline constexpr int64_t kMaxNarrowRows = 48;
inline constexpr int kMaxNarrowGroups = 512;

// Scales of operands that are values times scales; of packed weights those outside of them, and of
// the rows they multiply, which are numbers times scales.
// jaxmoe/quantize.py defines the formats.
struct Fp8Scales {
  Shared shared = Shared::kTensor;  // of weights: kTensor, kRow or kBlock
  bool promoted = false;            // float32 sums over every 128 of k; always so with blocks
  const float* w = nullptr;         // [num_weights], [.., n] or [.., ceil(n / 128), ceil(k / 128)]
  // [], [x_rows] or [x_rows, ceil(k / 128)]; beside packed weights null or [rows], not of x's rows.
  const float* x = nullptr;
  // Row -> row of x, for its scales; null: the same. NOTE: used unchecked, so only of a plan.
  const int* x_index = nullptr;
  int num_x = 1;  // kTensor: scales in x, weight w uses number w % num_x
  // [num_out]: out is rounded to out_dtype and quantized to e4m3; n_out is a multiple of 16
  const float* out = nullptr;
  int num_out = 0;  // weight w uses number w % num_out
  // [rows, ceil(n_out / 128)]: scales of out's groups of 128, which is quantized to e4m3 by them;
  // or null. Only where QuantizesGroups.
  float* out_groups = nullptr;
};

// What is added to the sums of a product of bf16 or fp16 tokens before its activation: x w, of low
// rank. A multiple of 8.
struct LowRankProduct {
  const void* x = nullptr;  // [rows, rank] in the product's order of rows; null: nothing is added
  const void* w = nullptr;  // [num_weights, rank, n]
  int rank = 0;
};

// The output of a layer of one token, if the down product finalizes it: see kernels/finalize.cuh.
struct FinalizedToken {
  const float* weights = nullptr;  // [top_k]
  const void* residual = nullptr;  // [n] or null
  void* y = nullptr;               // [n] of out_dtype; null: rows are stored instead
};

// True if the epilogue of this tile quantizes groups of 128 output features.
constexpr bool QuantizesGroups(Shared shared, const TileConfig& tile) {
  return shared == Shared::kBlock && tile.weight_tile == 256;
}

// One grouped GEMM. Pointers are device pointers.
struct MoeGemmProblem {
  // Of x and w, kFloat32 for TF32; of w alone if that is FP8: then x is e4m3; of x alone if w is
  // packed: if e4m3, rows of x are as RoundTokensParams::codes has them, and w has kInt4 codes that
  // are multiplied so.
  DType dtype = DType::kBFloat16;
  DType out_dtype = DType::kBFloat16;  // of bias and (unless out_f32 or scales.out) out
  WeightLayout layout = WeightLayout::kKN;
  const void* x = nullptr;  // [x_rows, k]
  const void* w = nullptr;  // [num_weights, k, n] or [num_weights, n, k], or as `packed` says
  PackedLayout packed;
  // The up half, if w has the gate half alone: n / 2 rows each, in the order kGateUp. Bias, z and
  // scales are those of n rows, but kTensor scales are [num_weights, 2], and with kBlock each half
  // begins with a block of its own: [num_weights, 2 * ceil(n / 256), ceil(k / 128)].
  const void* w_up = nullptr;
  const void* bias = nullptr;  // [num_weights, n] or null
  void* out = nullptr;         // [batch * rows_per_batch, n_out]
  // [batch * rows_per_batch]: address where each row of bf16 or fp16 is stored instead, on this GPU
  // or another, 16-byte aligned, 0 for nowhere; or null. Of products without an activation.
  const uint64_t* out_rows = nullptr;
  const int* group_starts = nullptr;  // [num_groups]; with group_sizes null [num_groups + 1]
  const int* group_sizes = nullptr;   // [num_groups] or null: starts[g + 1] - starts[g]
  const int* row_index = nullptr;     // [rows_per_batch] row -> x row, when tile.gather
  int* tile_counter = nullptr;        // one int, zero when the kernel starts
  int64_t x_rows = 0;
  int num_weights = 0;  // group g multiplies weight g % num_weights
  int num_groups = 0;
  int groups_per_batch = 0;
  int rows_per_batch = 0;
  int k = 0;
  int n = 0;  // rows of the weight: 2 * n_out when gated
  bool gated = false;
  GateUp gate_up = GateUp::kGateUp;
  bool out_f32 = false;  // only when not gated
  ActivationParams activation;
  void* z = nullptr;  // [batch * rows_per_batch, n] for the sums before the activation, or null
  Fp8Scales scales;   // of FP8 operands; `w` of packed weights
  LowRankProduct low;
  FinalizedToken finalized;
  bool pdl = false;           // programmatic dependent launch
  bool early_groups = false;  // groups were written before the previous launch began
  // Rows that are copied while the kernel runs: those of groups [s g, s g + g), g
  // groups_per_source, are there when sources_came[s] is not 0. Or null.
  const uint32_t* sources_came = nullptr;
  int groups_per_source = 0;
  // Instead of group_starts, group_sizes, row_index and tile_counter: at most kMaxPlannedSlots
  // slots whose plan the kernel makes. Gathers rows with tiles of up to 32 tokens only.
  const PlanParams* plan = nullptr;
  bool writes_plan = false;  // plan->slot_to_row and the last of plan->expert_offsets
};

// Returns null when launched, otherwise a static or thread-local message. Never allocates.
const char* LaunchMoeGemm(const MoeGemmProblem& problem,
                          const TileConfig& tile,
                          cudaStream_t stream);

// Features of the intermediate that a CTA computes of an expert where a layer of one token runs by
// slices, see sm90/slices.cuh; the H that those kernels have: each of four groups of warps needs
// 128 rows of the down weight, and x has room in shared memory.
inline constexpr int kSliceFeatures = 64;
inline constexpr int64_t kMinSlicedHidden = 512;
inline constexpr int64_t kMaxSlicedHidden = 32768;

// Floats of the sums that slices leave.
constexpr int64_t SliceSums(int64_t rows, int64_t hidden, int64_t intermediate) {
  return intermediate / kSliceFeatures * rows * hidden;
}

// Runs a gated layer of one token and packed weights, whose products plan for themselves and whose
// down product is finalized. `sums` has SliceSums floats.
const char* LaunchMoeSlices(const MoeGemmProblem& gate_up,
                            const MoeGemmProblem& down,
                            float* sums,
                            cudaStream_t stream);

// Whether a product that plans for itself has a kernel which finalizes its one token.
bool HasFinalizedKernel(const MoeGemmProblem& down, const TileConfig& tile);

// Whether there is a kernel for both products.
bool HasLayerKernel(const MoeGemmProblem& gate_up,
                    const MoeGemmProblem& down,
                    const TileConfig& tile);

// Both products of a layer in one launch, with tiles of one shape, of the same groups and plan.
// `stored` [rows] and the tile counter of `gate_up` are zero when the kernel starts; that one
// counter is for both. `pdl` and the plan are those of `gate_up`. With blocks of scales the kernel
// quantizes what `gate_up` writes to what `down` reads, x and its scales.
const char* LaunchMoeLayer(const MoeGemmProblem& gate_up,
                           const TileConfig& gate_up_tile,
                           const MoeGemmProblem& down,
                           const TileConfig& down_tile,
                           int* stored,
                           cudaStream_t stream);

}  // namespace jaxmoe
