// The fused layer as launches: [plan], [permute], gate-up GEMM, down GEMM, finalize or zero_rows;
// of FP8 weights also the quantization of what each GEMM reads.
#include "csrc/gemm/moe_mlp.h"

#include "csrc/kernels/finalize.h"
#include "csrc/kernels/permute.h"
#include "csrc/kernels/zero_rows.h"

namespace jaxmoe {
namespace {

constexpr QuantFormat kTokenFormats[] = {
    QuantFormat::kTensor, QuantFormat::kRow, QuantFormat::kGroup};  // by ScaleFormat

int32_t* SlotToRow(const MoeMlpParams& p, const MlpIndex& at) {
  return p.slot_to_row != nullptr ? p.slot_to_row : p.index + at.slot_to_row;
}

// Where the scales of the intermediate lie in the float scratch.
Fp8Floats Floats(const MoeMlpParams& p) {
  return {p.fp8->format, p.num_tokens, p.num_tokens * p.top_k, p.hidden, p.intermediate};
}

int64_t ActScales(const MoeMlpParams& p) { return Floats(p).act_scales; }

// Of x, [T, H] -> [T, H] or, where the gate-up GEMM does not gather, [R, H] in expert order.
QuantizeParams QuantizeX(const MoeMlpParams& p, const MlpIndex& at) {
  QuantizeParams q{};
  q.x = p.x;
  q.dtype = p.dtype;
  q.batch = 1;
  q.rows = p.num_tokens;
  q.cols = p.hidden;
  q.format = kTokenFormats[static_cast<int>(p.fp8->format)];
  q.element = ElementType::kE4M3;
  q.values = p.fp8->xq;
  q.scales = p.fp8->scratch;
  q.static_scales = p.fp8->static_x;
  q.slot_to_row = p.gemm1.gather ? nullptr : SlotToRow(p, at);
  q.top_k = p.top_k;
  q.num_out_rows = p.num_tokens * p.top_k;
  q.partial = p.fp8->scratch + Floats(p).partial;
  return q;
}

// Of the intermediate, the rows in use, unless the gate-up GEMM does it.
QuantizeParams QuantizeAct(const MoeMlpParams& p, const MlpIndex& at) {
  QuantizeParams q{};
  q.x = p.act;
  q.dtype = p.dtype;
  q.batch = 1;
  q.rows = p.num_tokens * p.top_k;
  q.cols = p.intermediate;
  q.format = kTokenFormats[static_cast<int>(p.fp8->format)];
  q.element = ElementType::kE4M3;
  q.values = p.fp8->act_q;
  q.scales = p.fp8->scratch + ActScales(p);
  q.num_rows = p.index + at.expert_offsets + p.num_local_experts;
  q.partial = p.fp8->scratch + Floats(p).partial;
  q.pdl = true;
  return q;
}

MoeGemmProblem GateUpProblem(const MoeMlpParams& p, const MlpIndex& at) {
  const int64_t rows = p.num_tokens * p.top_k;
  MoeGemmProblem gemm;
  gemm.dtype = p.dtype;
  gemm.out_dtype = p.dtype;
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
  if (p.fp8 != nullptr) {
    const Fp8Layer& fp8 = *p.fp8;
    const bool reads_x = fp8.x != nullptr && p.gemm1.gather;
    gemm.dtype = fp8.weight_dtype;
    gemm.x = reads_x ? p.x : fp8.xq;
    gemm.early_groups = gemm.pdl && !reads_x;
    gemm.scales.format = fp8.format;
    gemm.scales.promoted = fp8.promoted1;
    gemm.scales.w = fp8.w_gate_up;
    gemm.scales.x = fp8.x != nullptr ? fp8.x : fp8.scratch;
    gemm.scales.x_index = p.index + at.row_to_token;
    gemm.scales.out = fp8.static_act;
    gemm.scales.num_out = static_cast<int>(fp8.num_static_act);
    const bool by_groups = QuantizesGroups(fp8.format, p.gemm1);
    if (by_groups) gemm.scales.out_groups = fp8.scratch + ActScales(p);
    if (by_groups || fp8.static_act != nullptr) gemm.out = fp8.act_q;
  }
  return gemm;
}

MoeGemmProblem DownProblem(const MoeMlpParams& p, const MlpIndex& at) {
  MoeGemmProblem gemm;
  gemm.dtype = p.dtype;
  gemm.out_dtype = p.dtype;
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
  if (p.fp8 != nullptr) {
    const Fp8Layer& fp8 = *p.fp8;
    const bool given = fp8.static_act != nullptr;
    gemm.dtype = fp8.weight_dtype;
    gemm.x = fp8.act_q;
    gemm.scales.format = fp8.format;
    gemm.scales.promoted = fp8.promoted2;
    gemm.scales.w = fp8.w_down;
    gemm.scales.x = given ? fp8.static_act : fp8.scratch + ActScales(p);
    gemm.scales.num_x = given ? static_cast<int>(fp8.num_static_act) : 1;
  }
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
  const bool quantizes_x = p.fp8 != nullptr && p.fp8->x == nullptr;
  const bool planned_inside =
      p.y != nullptr && rows <= kMaxPlannedSlots && p.gemm1.gather && p.gemm1.token_tile <= 32;
  if (planned_inside) {
    gate_up.plan = &plan;
    gate_up.writes_plan = true;
    gate_up.pdl = quantizes_x;  // else the first launch, see LaunchClusters
    gate_up.scales.x_index = nullptr;
    down.plan = &plan;
  } else if (const char* error = Reason(LaunchPlan(plan, stream))) {
    return error;
  }
  if (quantizes_x) {
    QuantizeParams quantize = QuantizeX(p, at);
    quantize.pdl = !planned_inside;
    if (const char* error = Reason(LaunchQuantize(quantize, stream))) return error;
  } else if (!p.gemm1.gather) {
    PermuteSlotsParams permute{};
    permute.x = p.x;
    permute.slot_to_row = SlotToRow(p, at);
    // Rows of no group stay undefined: no tile stores anything of them.
    permute.rows = p.fp8 != nullptr ? p.fp8->xq : p.rows;
    permute.num_tokens = p.num_tokens;
    permute.top_k = p.top_k;
    permute.num_rows = rows;
    permute.row_bytes = p.hidden * (p.fp8 != nullptr ? 1 : ElementSize(p.dtype));
    permute.pdl = true;
    if (const char* error = Reason(LaunchPermuteSlots(permute, stream))) return error;
  }
  if (const char* error = LaunchMoeGemm(gate_up, p.gemm1, stream)) return error;
  if (p.fp8 != nullptr && gate_up.out != p.fp8->act_q) {
    if (const char* error = Reason(LaunchQuantize(QuantizeAct(p, at), stream))) return error;
  }
  TileConfig down_tile = p.gemm2;
  down_tile.gather = false;
  if (const char* error = LaunchMoeGemm(down, down_tile, stream)) return error;
  // NOTE: zero last: without gather the rows of X are in the same buffer.
  if (p.y == nullptr) return Reason(LaunchZeroRows(MakeZeroRows(p, at), stream));
  return Reason(LaunchFinalize(MakeFinalize(p, at), stream));
}

}  // namespace jaxmoe
