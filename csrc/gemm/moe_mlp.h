// Host contract of the fused layer: one call launches plan, both GEMMs and, if asked for, finalize.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/gemm/moe_gemm.h"
#include "csrc/kernels/plan.h"
#include "csrc/kernels/quantize.h"

namespace jaxmoe {

// Sub-arrays of the int32 scratch; each starts on 16 bytes. The same sum is mlp_index_size in
// jaxmoe/_heuristics.py.
struct MlpIndex {
  static constexpr int64_t kCounters = 4;  // tile counters of the two GEMMs
  int64_t expert_offsets;                  // [E_l + 1]
  int64_t row_to_token;                    // [R]
  int64_t slot_to_row;                     // [T, K]
  int64_t plan_scratch;
  int64_t size;

  MlpIndex(int64_t rows, int64_t local_experts) {
    expert_offsets = kCounters;
    row_to_token = expert_offsets + RoundUp(local_experts + 1, 4);
    slot_to_row = row_to_token + RoundUp(rows, 4);
    plan_scratch = slot_to_row + RoundUp(rows, 4);
    size = plan_scratch + PlanScratchInts(1, rows, local_experts);
  }
};

// Weights, X and the intermediate of a layer in FP8, see jaxmoe/_mlp_fp8.py. D is
// MoeMlpParams::dtype.
struct Fp8Layer {
  DType weight_dtype = DType::kFloat8E4M3;
  ScaleFormat format = ScaleFormat::kTensor;
  bool promoted1 = false;
  bool promoted2 = false;
  const float* w_gate_up = nullptr;  // scales, see Fp8Scales
  const float* w_down = nullptr;
  const float* x = nullptr;           // scales of MoeMlpParams::x, which is e4m3; null: it is D
  const float* static_x = nullptr;    // [1] (kTensor), or null: made from x
  const float* static_act = nullptr;  // [num_static_act] (kTensor), or null: made from act
  int64_t num_static_act = 0;         // 1 or E_l
  void* xq = nullptr;                 // e4m3 scratch: [T, H] if gemm1 gathers, else [R, H]
  void* act_q = nullptr;              // e4m3 scratch, [R, I]
  float* scratch = nullptr;           // [Fp8Floats::size]
};

// Sub-arrays of the float32 scratch; the same sum is _rows_scratch in jaxmoe/_mlp_fp8.py.
struct Fp8Floats {
  int64_t act_scales;
  int64_t partial;
  int64_t size;

  Fp8Floats(ScaleFormat format, int64_t tokens, int64_t rows, int64_t hidden, int64_t inner) {
    act_scales = RoundUp(Count(format, tokens, hidden), 4);
    partial = act_scales + RoundUp(Count(format, rows, inner), 4);
    size = partial + kMaxQuantPartials;
  }

 private:
  static int64_t Count(ScaleFormat format, int64_t rows, int64_t k) {
    if (format == ScaleFormat::kTensor) return 1;
    return format == ScaleFormat::kChannel ? rows : rows * CeilDiv(k, kQuantBlock);
  }
};

// T tokens, K choices, R = T * K rows, H hidden, I intermediate, E experts of which E_l are local.
struct MoeMlpParams {
  DType dtype = DType::kBFloat16;       // of every float array but `weights` and what `fp8` says
  const void* x = nullptr;              // [T, H]
  const int32_t* expert_ids = nullptr;  // [T, K]
  const float* weights = nullptr;       // [T, K], not read without y
  const void* w_gate_up = nullptr;      // [E1, H, N1] or [E1, N1, H], N1 = 2 I when gated, else I
  const void* w_down = nullptr;         // [E2, I, H] or [E2, H, I]
  const void* b_gate_up = nullptr;      // [E1, N1] or null
  const void* b_down = nullptr;         // [E2, H] or null
  const int32_t* expert_map = nullptr;  // [E] or null
  const void* residual = nullptr;       // [T, H] or null
  void* y = nullptr;                    // [T, H]; null: no finalize, `rows` is the result
  void* rows = nullptr;                 // [R, H] scratch; without y, 0 in the rows of no slot
  int32_t* slot_to_row = nullptr;       // [T, K], -1 for slots without a row; null: in `index`
  void* act = nullptr;                  // [R, I] scratch
  int32_t* index = nullptr;             // [MlpIndex::size] scratch
  int64_t num_tokens = 0;
  int64_t top_k = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t num_experts = 0;
  int64_t num_local_experts = 0;
  int64_t expert_offset = 0;
  int64_t num_gate_up_weights = 0;  // E1: group g uses weight g % E1
  int64_t num_down_weights = 0;     // E2
  WeightLayout layout = WeightLayout::kKN;
  bool gated = true;
  GateUp gate_up = GateUp::kGateUp;
  ActivationParams activation;
  TileConfig gemm1;
  TileConfig gemm2;
  const Fp8Layer* fp8 = nullptr;  // w_gate_up [E1, N1, H], w_down [E2, H, I] and perhaps x are FP8
};

// Returns null when everything was launched, otherwise the reason.
const char* LaunchMoeMlp(const MoeMlpParams& params, cudaStream_t stream);

}  // namespace jaxmoe
