// The fused layer as launches: [plan], [permute], gate-up GEMM, down GEMM, finalize or zero_rows.
#include "csrc/moe_gemm/moe_mlp.h"

#include "csrc/kernels/finalize.h"
#include "csrc/kernels/permute.h"
#include "csrc/kernels/zero_rows.h"

namespace jaxmoe {
namespace {

int32_t* SlotToRow(const MoeMlpParams& p, const MlpIndex& at) {
  return p.slot_to_row != nullptr ? p.slot_to_row : p.index + at.slot_to_row;
}

MoeGemmProblem GateUpProblem(const MoeMlpParams& p, const MlpIndex& at) {
  const int64_t rows = p.num_tokens * p.top_k;
  MoeGemmProblem gemm;
  gemm.dtype = p.dtype;
  gemm.layout = p.layout;
  // Rows of X in expert order live in the buffer of the down GEMM's rows: they are read for the
  // last time before the first of those is written.
  gemm.x = p.gemm1.gather ? p.x : p.rows;
  gemm.x_rows = p.gemm1.gather ? p.num_tokens : rows;
  gemm.w = p.w_gate_up;
  gemm.bias = p.b_gate_up;
  gemm.out = p.act;
  gemm.group_starts = p.index + at.expert_offsets;
  gemm.row_index = p.index + at.row_to_token;
  gemm.tile_counter = p.index;
  gemm.num_weights = static_cast<int>(p.num_gate_up_weights);
  gemm.num_groups = static_cast<int>(p.num_local_experts);
  gemm.groups_per_batch = gemm.num_groups;
  gemm.rows_per_batch = static_cast<int>(rows);
  gemm.k = static_cast<int>(p.hidden);
  gemm.n = static_cast<int>(p.gated ? 2 * p.intermediate : p.intermediate);
  gemm.gated = p.gated;
  gemm.gate_up = p.gate_up;
  gemm.activation = p.activation;
  gemm.pdl = OverlapsPrevious(rows, p.num_experts);
  gemm.early_groups = gemm.pdl && !p.gemm1.gather;  // the permute ran since the plan
  return gemm;
}

MoeGemmProblem DownProblem(const MoeMlpParams& p, const MlpIndex& at) {
  MoeGemmProblem gemm;
  gemm.dtype = p.dtype;
  gemm.layout = p.layout;
  gemm.x = p.act;
  gemm.x_rows = p.num_tokens * p.top_k;
  gemm.w = p.w_down;
  gemm.bias = p.b_down;
  gemm.out = p.rows;
  gemm.group_starts = p.index + at.expert_offsets;
  gemm.tile_counter = p.index + 1;
  gemm.num_weights = static_cast<int>(p.num_down_weights);
  gemm.num_groups = static_cast<int>(p.num_local_experts);
  gemm.groups_per_batch = gemm.num_groups;
  gemm.rows_per_batch = static_cast<int>(gemm.x_rows);
  gemm.k = static_cast<int>(p.intermediate);
  gemm.n = static_cast<int>(p.hidden);
  gemm.pdl = OverlapsPrevious(gemm.x_rows, p.num_experts);
  gemm.early_groups = gemm.pdl;  // the gate-up GEMM ran since the plan
  return gemm;
}

PlanParams MakePlan(const MoeMlpParams& p, const MlpIndex& at) {
  PlanParams plan{};
  plan.expert_ids = p.expert_ids;
  plan.expert_map = p.expert_map;
  plan.expert_offsets = p.index + at.expert_offsets;
  plan.row_to_token = p.index + at.row_to_token;
  plan.slot_to_row = SlotToRow(p, at);
  plan.scratch = p.index + at.plan_scratch;
  plan.batch = 1;
  plan.num_tokens = p.num_tokens;
  plan.top_k = p.top_k;
  plan.num_experts = p.num_experts;
  plan.expert_offset = p.expert_offset;
  plan.num_local_experts = p.num_local_experts;
  plan.zero_counters = p.index;
  plan.num_zero_counters = MlpIndex::kCounters;
  return plan;
}

FinalizeParams MakeFinalize(const MoeMlpParams& p, const MlpIndex& at) {
  FinalizeParams finalize{};
  finalize.rows = p.rows;
  finalize.slot_to_row = SlotToRow(p, at);
  finalize.weights = p.weights;
  finalize.residual = p.residual;
  finalize.y = p.y;
  finalize.dtype = p.dtype;
  finalize.num_tokens = p.num_tokens;
  finalize.top_k = p.top_k;
  finalize.num_rows = p.num_tokens * p.top_k;
  finalize.hidden = p.hidden;
  finalize.pdl = true;
  return finalize;
}

// The rows in use are one group: from expert_offsets[0], which is 0, to expert_offsets[E_l].
ZeroRowsParams MakeZeroRows(const MoeMlpParams& p, const MlpIndex& at) {
  ZeroRowsParams zero{};
  zero.out = p.rows;
  zero.starts = p.index + at.expert_offsets;
  zero.sizes = p.index + at.expert_offsets + p.num_local_experts;
  zero.batch = 1;
  zero.num_rows = p.num_tokens * p.top_k;
  zero.row_bytes = p.hidden * ElementSize(p.dtype);
  zero.num_groups = 1;
  zero.pdl = true;
  return zero;
}

const char* Reason(cudaError_t status) {
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

}  // namespace

const char* LaunchMoeMlp(const MoeMlpParams& p, cudaStream_t stream) {
  const int64_t rows = p.num_tokens * p.top_k;
  if (rows == 0 || p.hidden == 0) return nullptr;
  const MlpIndex at(rows, p.num_local_experts);

  const PlanParams plan = MakePlan(p, at);
  MoeGemmProblem gate_up = GateUpProblem(p, at);
  MoeGemmProblem down = DownProblem(p, at);
  // Decoding a token or two: the GEMMs plan for themselves, which saves a launch. They write no
  // expert_offsets, which zero_rows reads.
  if (p.y != nullptr && rows <= kMaxPlannedSlots && p.gemm1.gather && p.gemm1.token_tile <= 32) {
    gate_up.plan = &plan;
    gate_up.writes_plan = true;
    gate_up.pdl = false;  // the first launch, see LaunchClusters
    down.plan = &plan;
  } else if (const char* error = Reason(LaunchPlan(plan, stream))) {
    return error;
  }
  if (!p.gemm1.gather) {
    PermuteSlotsParams permute{};
    permute.x = p.x;
    permute.slot_to_row = SlotToRow(p, at);
    permute.rows = p.rows;  // those of no group stay undefined: no tile stores anything of them
    permute.num_tokens = p.num_tokens;
    permute.top_k = p.top_k;
    permute.num_rows = rows;
    permute.row_bytes = p.hidden * ElementSize(p.dtype);
    permute.pdl = true;
    if (const char* error = Reason(LaunchPermuteSlots(permute, stream))) return error;
  }
  if (const char* error = LaunchMoeGemm(gate_up, p.gemm1, stream)) return error;
  TileConfig down_tile = p.gemm2;
  down_tile.gather = false;
  if (const char* error = LaunchMoeGemm(down, down_tile, stream)) return error;
  // NOTE: zero last: without gather the rows of X are in the same buffer.
  if (p.y == nullptr) return Reason(LaunchZeroRows(MakeZeroRows(p, at), stream));
  return Reason(LaunchFinalize(MakeFinalize(p, at), stream));
}

}  // namespace jaxmoe
