// Host contract of the fused layer: one call launches plan, both GEMMs and, if asked for, finalize,
// of rows that are here or that devices have stored in each other's memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>

#include "csrc/gemm/moe_gemm.h"
#include "csrc/gemm/sources.h"
#include "csrc/kernels/plan.h"
#include "csrc/kernels/quantize.h"
#include "csrc/kernels/round_tokens.h"
#include "csrc/peers/rows.h"

namespace jaxmoe {

// Sub-arrays of the int32 scratch; each starts on 16 bytes. The same sum is mlp_index_size in
// jaxmoe/_gemm/scratch.py.
struct MlpIndex {
  static constexpr int64_t kCounters = 4;  // tile counters of the two GEMMs
  int64_t stored;                          // [R] if one kernel computes both, see MoeLayerArgs
  int64_t expert_offsets;                  // [E_l + 1]
  int64_t row_to_token;                    // [R]
  int64_t slot_to_row;                     // [T, K]
  int64_t plan_scratch;
  int64_t size;

  MlpIndex(int64_t rows, int64_t local_experts, bool one_kernel) {
    stored = kCounters;
    expert_offsets = stored + (one_kernel ? RoundUp(rows, 4) : 0);
    row_to_token = expert_offsets + RoundUp(local_experts + 1, 4);
    slot_to_row = row_to_token + RoundUp(rows, 4);
    plan_scratch = slot_to_row + RoundUp(rows, 4);
    size = plan_scratch + PlanScratchInts(1, rows, local_experts);
  }
};

// Sub-arrays of the float32 scratch: scales of X, those of the intermediate, and partial maxima.
// Empty if tokens have no scales. Beside packed weights both are those of rows in expert order. The
// same sum is `scratch_floats` in jaxmoe/_formats.
struct MlpFloats {
  int64_t act_scales = 0;
  int64_t partial = 0;
  int64_t size = 0;

  MlpFloats(WeightFormat format,
            TokenRule rule,
            int64_t tokens,
            int64_t rows,
            int64_t hidden,
            int64_t inner) {
    if (HasRowScales(rule)) {
      act_scales = RoundUp(rows, 4);
      size = 2 * act_scales;
    }
    if (!RowOf(format).scaled) return;
    act_scales = RoundUp(Count(RowOf(format).tokens, tokens, hidden), 4);
    partial = act_scales + RoundUp(Count(RowOf(format).tokens, rows, inner), 4);
    size = partial + kMaxQuantPartials;
  }

 private:
  static int64_t Count(Shared shared, int64_t rows, int64_t k) {
    if (shared == Shared::kTensor) return 1;
    return shared == Shared::kRow ? rows : rows * CeilDiv(k, kQuantBlock);
  }
};

// Weight rows of the tile that multiplies codes of kInt4G128 as they are, by tokens of kE4M3 in a
// layer of bf16: those of other packed weights have fewer.
inline constexpr int kCodedWeightTile = 256;

// Weights of one product, and how it is computed.
struct MlpWeights {
  const void* values = nullptr;   // [count, k, n] or [count, n, k], or packed
  const void* up = nullptr;       // the up half if `values` is the gate half, n / 2 rows each
  const float* scales = nullptr;  // of both halves, see Fp8Scales and MoeGemmProblem::w_up
  const void* bias = nullptr;     // [count, n] or null
  int64_t count = 0;              // group g uses weight g % count
  WeightLayout layout = WeightLayout::kKN;
  bool promoted = false;
  TileConfig tile;
};

// Adapters of low rank: the weights of both products are W + scale a b. One for each local expert.
struct MlpAdapters {
  const void* gate_up_a = nullptr;  // [E_l, H, gate_up_rank]
  const void* gate_up_b = nullptr;  // [E_l, gate_up_rank, 2 I or I], in the order of the weight
  const void* down_a = nullptr;     // [E_l, I, down_rank]
  const void* down_b = nullptr;     // [E_l, down_rank, H]
  void* low = nullptr;              // [R, the larger rank] scratch
  int64_t gate_up_rank = 0;         // multiples of 8
  int64_t down_rank = 0;
  float scale = 1.0f;
};

// Tokens come while the gate-up GEMM runs, in the order of their first local experts: it waits for
// those of each expert.
struct MlpArrivals {
  const uint32_t* came = nullptr;  // [E_l / experts], not 0 when rows of its experts are there
  int experts = 1;                 // that a word is of
  // Lets the stream wait until the GEMM may wait for the rest, and until that has ended.
  std::function<const char*()> begin;
  std::function<const char*()> end;
};

// T tokens, K choices, R = T * K rows, H hidden, I intermediate, E experts of which E_l are local.
// Where the format quantizes tokens, both products read them quantized, as e4m3. Beside packed
// weights they read the numbers of `rule`, if there is one, or their bytes, and multiply sums by
// the scales of rows.
struct MoeMlpParams {
  WeightFormat format = WeightFormat::kPlain;
  TokenRule rule = TokenRule::kNone;
  DType dtype = DType::kBFloat16;         // of float arrays, but for weights and quantized tokens
  DType weight_dtype = DType::kBFloat16;  // `dtype` if they are plain or packed
  const void* x = nullptr;                // [T, H]
  const float* x_scales = nullptr;        // of x if that is quantized already: numbers by a rule,
  int64_t num_x_scales = 0;               // which have 1 or T; those without row scales have 1.0f
  const float* static_x = nullptr;        // [1] or null: the scale is made from x
  const float* static_act = nullptr;      // [num_static_act] or null: made from act
  int64_t num_static_act = 0;             // 1 or E_l
  const int32_t* expert_ids = nullptr;    // [T, K]
  const float* weights = nullptr;         // [T, K], not read without y
  MlpWeights gate_up;                     // k = H, n = 2 I when gated, else I
  MlpWeights down;                        // k = I, n = H
  const int32_t* expert_map = nullptr;    // [E] or null
  const void* residual = nullptr;         // [T, H] or null
  void* y = nullptr;                      // [T, H]; null: no finalize, `rows` is the result
  void* rows = nullptr;                   // [R, H] scratch; without y, 0 in the rows of no slot
  int32_t* slot_to_row = nullptr;         // [T, K], -1 for slots without a row; null: in `index`
  void* act = nullptr;                    // [R, I] scratch
  void* xq = nullptr;                     // scratch for quantized X: [T, H] if gate_up gathers
                                          // (none of x that has scales), else [R, H]
  void* act_q = nullptr;                  // [R, I] scratch for the quantized intermediate
  float* floats = nullptr;                // [MlpFloats::size] scratch
  float* slice_sums = nullptr;            // [SliceSums] scratch, if one token is to run by slices
  int32_t* index = nullptr;               // [MlpIndex::size] scratch
  int64_t num_tokens = 0;
  int64_t top_k = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t num_experts = 0;
  int64_t num_local_experts = 0;
  int64_t expert_offset = 0;
  bool gated = true;
  GateUp order = GateUp::kGateUp;
  ActivationParams activation;
  // If not null, tokens are those of all devices, and rows go to their sources, which finalize: its
  // weights, residual and y, not those above.
  const PeerRows* peers = nullptr;
  // If not null, tokens are those of all sources, as the gate-up GEMM reads them.
  const MlpSources* sources = nullptr;
  const MlpArrivals* arrivals = nullptr;  // or null; with peers
  const MlpAdapters* adapters = nullptr;  // or null; where tokens are not quantized or rounded
};

// Rows of x that a layer copies to where otherwise those of the down product lie. The same number
// is `moved_rows` in jaxmoe/_mlp/op.py.
inline int64_t MovedRows(const MoeMlpParams& p) {
  const bool gathers = p.gate_up.tile.gather;
  const bool rounds = p.rule != TokenRule::kNone && p.x_scales == nullptr;
  if (RowOf(p.format).scaled || (gathers && !rounds)) return 0;
  return gathers ? p.num_tokens : p.num_tokens * p.top_k;
}

// Returns null when everything was launched, otherwise the reason.
const char* LaunchMoeMlp(const MoeMlpParams& params, cudaStream_t stream);

}  // namespace jaxmoe
