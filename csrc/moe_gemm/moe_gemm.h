// Host contract of the grouped GEMM: what a launch needs, in plain types.
//
// Y[r, n] = epilogue(sum_k W[e(r)][n, k] * X[x_row(r), k]),  r a row of group e.
//
// Letters: r permuted rows (R of them), n output features (N), k contraction (K), e groups.
// wgmma's M side holds the weights (n) and its N side the rows (r), in every mode.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/common/types.h"
#include "csrc/kernels/plan.h"

namespace jaxmoe {

enum class WeightLayout : int { kKN = 0, kNK = 1 };  // [E, K, N] or [E, N, K]
enum class GateUp : int { kGateUp = 0, kUpGate = 1, kInterleaved = 2 };

// Kernel form of jaxmoe/activation.py; `kind` values are shared with it.
struct ActivationParams {
  enum Kind : int { kSigmoid = 0, kErf = 1, kRelu = 2, kRelu2 = 3, kIdentity = 4 };
  int kind = kIdentity;
  float c1 = 0.0f;
  float c3 = 0.0f;
  float limit = 0.0f;
  float beta = 0.0f;
};

// A row of the tile table (see dispatch.cc); chosen by jaxmoe/_heuristics.py.
struct TileConfig {
  int weight_tile = 128;  // weight rows per CTA tile
  int token_tile = 8;     // rows per CTA tile
  int cluster = 1;        // CTAs that share a weight tile, each with rows of its own
  int split_k = 1;        // CTAs that share the k loop of a tile
  int raster = 1;         // weight tiles per raster panel, 0 = all of them
  bool gather = false;    // X rows fetched through row_index
};

// Whether a GEMM is launched to overlap the end of the kernel before it. Those bound by reading
// weights gain 2-4 us; compute-bound ones measured slower (two streams share L2 and power).
constexpr bool OverlapsPrevious(int64_t rows, int64_t groups) { return rows <= 192 * groups; }

// Slots that a GEMM can plan by itself: a lane of a warp each.
inline constexpr int64_t kMaxPlannedSlots = 32;

// One grouped GEMM. Pointers are device pointers.
struct MoeGemmProblem {
  DType dtype = DType::kBFloat16;  // of x, w, bias and (unless out_f32) out
  WeightLayout layout = WeightLayout::kKN;
  const void* x = nullptr;            // [x_rows, k]
  const void* w = nullptr;            // [num_weights, k, n] or [num_weights, n, k]
  const void* bias = nullptr;         // [num_weights, n] or null
  void* out = nullptr;                // [batch * rows_per_batch, n_out]
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
  bool pdl = false;           // programmatic dependent launch
  bool early_groups = false;  // groups were written before the previous launch began
  // Instead of group_starts, group_sizes, row_index and tile_counter: at most kMaxPlannedSlots
  // slots whose plan the kernel makes. Gathers rows with tiles of up to 32 tokens only.
  const PlanParams* plan = nullptr;
  bool writes_plan = false;  // plan->slot_to_row
};

// Returns null when launched, otherwise a static or thread-local message. Never allocates.
const char* LaunchMoeGemm(const MoeGemmProblem& problem,
                          const TileConfig& tile,
                          cudaStream_t stream);

}  // namespace jaxmoe
