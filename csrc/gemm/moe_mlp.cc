// The fused layer as launches: [plan], [permute], gate-up GEMM, down GEMM, finalize or zero_rows;
// where tokens are quantized, also the quantization or the rounding of what each GEMM reads, and
// with adapters a product of low rank of it. Both GEMMs may be one launch, and of one token the
// down GEMM may finalize, or slices of both GEMMs and their sum are all. With peers a table of
// where rows go comes before them, and a meeting before finalize.
#include "csrc/gemm/moe_mlp.h"

#include "csrc/common/cuda_check.h"
#include "csrc/kernels/finalize.h"
#include "csrc/kernels/low_rank.h"
#include "csrc/kernels/permute.h"
#include "csrc/kernels/zero_rows.h"

namespace jaxmoe {
namespace {

constexpr int64_t kSms = 132;  // of an H100 or H200 SXM

// Places in the scratch of a call, and the choices that several launches follow.
struct Layer {
  const MoeMlpParams& p;
  int64_t rows;
  MlpIndex at;
  MlpFloats floats;
  bool quantized;    // products read quantized tokens
  bool quantizes_x;  // which x is not yet
  bool rounds;       // products read the numbers of quantized tokens
  bool given;        // which x has already
  bool gathers;      // the gate-up GEMM fetches rows of x

  explicit Layer(const MoeMlpParams& p)
      : p(p),
        rows(p.num_tokens * p.top_k),
        at(rows, p.num_local_experts, p.gate_up.tile.one_kernel),
        floats(p.format, p.rule, p.num_tokens, rows, p.hidden, p.intermediate),
        quantized(RowOf(p.format).scaled),
        quantizes_x(quantized && p.x_scales == nullptr),
        rounds(p.rule != TokenRule::kNone),
        given(rounds && p.x_scales != nullptr),
        gathers(p.gate_up.tile.gather) {}

  int32_t* slot_to_row() const {
    return p.slot_to_row != nullptr ? p.slot_to_row : p.index + at.slot_to_row;
  }
  // Something is made of x before the gate-up GEMM: numbers, or scales in expert order.
  bool prepares_x() const { return quantizes_x || (rounds && (!given || HasRowScales(p.rule))); }
  // X is read from a copy, quantized, rounded or in expert order.
  bool moves_x() const { return quantizes_x || (rounds && !given) || !gathers; }
  // That copy. Rows that are not quantized, [R, H] in expert order or [T, H], live in the buffer of
  // the down GEMM's rows: they are read for the last time before the first of those is written.
  void* moved_x() const { return quantized ? p.xq : p.rows; }
  // Whether no pass over the whole intermediate quantizes it: static scales, or of small groups.
  bool quantizes_inside() const {
    return !quantized || p.static_act != nullptr || RowOf(p.format).tokens == Shared::kGroup;
  }
  // Whether the rows that a product reads are e4m3 bytes, by which it multiplies codes.
  bool codes(const MlpWeights& weights) const {
    return !given && p.rule == TokenRule::kE4M3 && p.format == WeightFormat::kInt4G128 &&
           p.dtype == DType::kBFloat16 && weights.tile.weight_tile == kCodedWeightTile;
  }
  // Whether the down GEMM may begin while the gate-up GEMM comes to its end, though a launch
  // between them makes something of the intermediate. Before its wait it reads the plan alone,
  // which the gate-up GEMM has waited for if nothing else is between them. Its weights would keep
  // that launch waiting if more of its tiles began than run at once.
  bool down_begins_early() const {
    const bool only_that = p.arrivals == nullptr && p.sources == nullptr && p.adapters == nullptr;
    return only_that && down_is_one_round();
  }
  // Whether all tiles of the down GEMM, of few rows, run at once.
  bool down_is_one_round() const { return down_tiles() <= 2 * kSms; }
  // Whether clusters of them soon find places beside the gate-up GEMM: where they need nearly all,
  // they are later than a launch behind them.
  bool clusters_find_room() const { return 2 * down_tiles() <= 3 * kSms; }
  int64_t down_tiles() const { return rows * CeilDiv(p.hidden, 128); }
  // Scales that are made of the intermediate.
  float* act_scales() const { return p.floats + floats.act_scales; }
  float* partial() const { return p.floats + floats.partial; }
};

// X [T, H] -> [T, H] or, where the gate-up GEMM does not gather, [R, H] in expert order.
QuantizeParams QuantizeX(const Layer& layer) {
  const MoeMlpParams& p = layer.p;
  QuantizeParams q{};
  q.x = p.x;
  q.dtype = p.dtype;
  q.batch = 1;
  q.rows = p.num_tokens;
  q.cols = p.hidden;
  q.shared = RowOf(p.format).tokens;
  q.element = ElementType::kE4M3;
  q.values = p.xq;
  q.scales = p.floats;
  q.static_scales = p.static_x;
  q.slot_to_row = layer.gathers ? nullptr : layer.slot_to_row();
  q.top_k = p.top_k;
  q.num_out_rows = layer.rows;
  q.partial = layer.partial();
  return q;
}

// The intermediate's rows in use, unless the gate-up GEMM quantizes them.
QuantizeParams QuantizeAct(const Layer& layer) {
  const MoeMlpParams& p = layer.p;
  QuantizeParams q{};
  q.x = p.act;
  q.dtype = p.dtype;
  q.batch = 1;
  q.rows = layer.rows;
  q.cols = p.intermediate;
  q.shared = RowOf(p.format).tokens;
  q.element = ElementType::kE4M3;
  q.values = p.act_q;
  q.scales = layer.act_scales();
  q.num_rows = p.index + layer.at.expert_offsets + p.num_local_experts;
  q.partial = layer.partial();
  q.pdl = true;
  q.lets_start = layer.down_begins_early();
  return q;
}

// X [T, H] to its numbers, [T, H] or, where the gate-up GEMM does not gather, [R, H] in expert
// order. Scales are in that order either way. Numbers that are given are moved alone, and that if
// the GEMM does not gather. `plan`: one that is made here, or null.
RoundTokensParams RoundX(const Layer& layer, const PlanParams* plan) {
  const MoeMlpParams& p = layer.p;
  RoundTokensParams round{};
  round.x = p.x;
  round.dtype = p.dtype;
  round.rule = layer.given ? TokenRule::kNone : p.rule;
  round.rows = p.num_tokens;
  round.cols = p.hidden;
  round.numbers = layer.moves_x() ? layer.moved_x() : nullptr;
  round.scales = p.floats;
  round.given_scales = p.x_scales;
  round.num_given = p.num_x_scales;
  round.static_scales = p.static_x;
  round.num_static = 1;
  round.slot_to_row = plan == nullptr ? layer.slot_to_row() : nullptr;
  round.top_k = p.top_k;
  round.num_out_rows = layer.rows;
  round.scatters = !layer.gathers;
  round.codes = layer.codes(p.gate_up);
  round.plans = plan != nullptr;
  if (round.plans) round.plan = *plan;
  round.pdl = round.early_x = plan == nullptr;  // else the first launch, see LaunchClusters
  return round;
}

// The intermediate's rows in use to their numbers, where they are.
RoundTokensParams RoundAct(const Layer& layer) {
  const MoeMlpParams& p = layer.p;
  RoundTokensParams round{};
  round.x = p.act;
  round.dtype = p.dtype;
  round.rule = p.rule;
  round.rows = layer.rows;
  round.cols = p.intermediate;
  round.numbers = p.act;
  round.scales = layer.act_scales();
  round.static_scales = p.static_act;
  round.num_static = p.num_static_act;
  round.group_offsets = p.index + layer.at.expert_offsets;
  round.num_groups = p.num_local_experts;
  round.codes = layer.codes(p.down);
  round.pdl = true;
  round.lets_start = layer.down_begins_early();
  return round;
}

// X rows in expert order, as they are.
PermuteParams PermuteX(const Layer& layer) {
  const MoeMlpParams& p = layer.p;
  PermuteParams permute{};
  permute.x = p.x;
  permute.slot_to_row = layer.slot_to_row();
  permute.rows = layer.moved_x();  // rows of no group stay undefined: no tile stores any of them
  permute.num_tokens = p.num_tokens;
  permute.top_k = p.top_k;
  permute.num_rows = layer.rows;
  permute.row_bytes = p.hidden * (layer.quantized ? 1 : ElementSize(p.dtype));
  permute.pdl = true;
  return permute;
}

// Parts that both products have. X, the output, their sizes and `early_groups` are the caller's.
MoeGemmProblem Product(const Layer& layer, const MlpWeights& weights) {
  const MoeMlpParams& p = layer.p;
  MoeGemmProblem gemm;
  gemm.dtype = layer.codes(weights) ? DType::kFloat8E4M3 : p.weight_dtype;
  gemm.packed = RowOf(p.format).packed;
  gemm.out_dtype = p.dtype;
  gemm.layout = weights.layout;
  gemm.w = weights.values;
  gemm.w_up = weights.up;
  gemm.bias = weights.bias;
  gemm.group_starts = p.index + layer.at.expert_offsets;
  gemm.num_weights = static_cast<int>(weights.count);
  gemm.num_groups = static_cast<int>(p.num_local_experts);
  gemm.groups_per_batch = gemm.num_groups;
  gemm.rows_per_batch = static_cast<int>(layer.rows);
  gemm.scales.shared = RowOf(p.format).weights;
  gemm.scales.promoted = weights.promoted;
  gemm.scales.w = weights.scales;
  gemm.pdl = OverlapsPrevious(layer.rows, p.num_experts);
  return gemm;
}

MoeGemmProblem GateUpProblem(const Layer& layer) {
  const MoeMlpParams& p = layer.p;
  MoeGemmProblem gemm = Product(layer, p.gate_up);
  gemm.x = layer.moves_x() ? layer.moved_x() : p.x;
  gemm.x_rows = layer.gathers ? p.num_tokens : layer.rows;
  gemm.row_index = p.index + layer.at.row_to_token;
  gemm.tile_counter = p.index;
  gemm.k = static_cast<int>(p.hidden);
  gemm.n = static_cast<int>(p.gated ? 2 * p.intermediate : p.intermediate);
  gemm.gated = p.gated;
  gemm.gate_up = p.order;
  gemm.activation = p.activation;
  // Whether something ran since the plan.
  gemm.early_groups = gemm.pdl && (layer.moves_x() || layer.prepares_x() || p.peers != nullptr ||
                                   p.adapters != nullptr);
  gemm.out = p.act;
  if (HasRowScales(p.rule)) gemm.scales.x = p.floats;
  if (!layer.quantized) return gemm;
  gemm.scales.x = layer.quantizes_x ? p.floats : p.x_scales;
  gemm.scales.x_index = gemm.row_index;
  gemm.scales.out = p.static_act;
  gemm.scales.num_out = static_cast<int>(p.num_static_act);
  const bool by_groups = QuantizesGroups(gemm.scales.shared, p.gate_up.tile);
  if (by_groups) gemm.scales.out_groups = layer.act_scales();
  if (by_groups || p.static_act != nullptr) gemm.out = p.act_q;
  return gemm;
}

MoeGemmProblem DownProblem(const Layer& layer) {
  const MoeMlpParams& p = layer.p;
  MoeGemmProblem gemm = Product(layer, p.down);
  gemm.x = layer.quantized ? p.act_q : p.act;
  gemm.x_rows = layer.rows;
  gemm.out = p.rows;
  gemm.tile_counter = p.index + 1;
  gemm.k = static_cast<int>(p.intermediate);
  gemm.n = static_cast<int>(p.hidden);
  gemm.early_groups = gemm.pdl;  // the gate-up GEMM ran since the plan
  if (p.peers != nullptr) gemm.out_rows = p.peers->targets;
  if (HasRowScales(p.rule)) gemm.scales.x = layer.act_scales();
  if (!layer.quantized) return gemm;
  const bool given = p.static_act != nullptr;
  gemm.scales.x = given ? p.static_act : layer.act_scales();
  gemm.scales.num_x = given ? static_cast<int>(p.num_static_act) : 1;
  return gemm;
}

// What adapters add to a product: x a for all of its rows, and what its epilogue multiplies. Sums
// of packed weights are multiplied by the scale of each weight behind that: x a is divided by it.
LowRankParams Lower(const Layer& layer, const MoeGemmProblem& gemm, const void* a, int64_t rank) {
  LowRankParams low{};
  low.x = gemm.x;
  low.a = a;
  low.out = layer.p.adapters->low;
  low.group_offsets = gemm.group_starts;
  low.x_rows = gemm.x_rows;
  low.rows = layer.rows;
  low.k = gemm.k;
  low.rank = rank;
  low.num_groups = gemm.num_groups;
  low.scale = layer.p.adapters->scale;
  if (gemm.packed.packing != Packing::kNone) {
    low.scale /= SumFactor(gemm.packed.packing, gemm.dtype);
    low.divisors = gemm.scales.w;
  }
  low.pdl = true;
  return low;
}

LowRankProduct Added(const Layer& layer, const void* b, int64_t rank) {
  return {layer.p.adapters->low, b, static_cast<int>(rank)};
}

PlanParams MakePlan(const Layer& layer) {
  const MoeMlpParams& p = layer.p;
  const MlpIndex& at = layer.at;
  PlanParams plan{};
  plan.expert_ids = p.expert_ids;
  plan.expert_map = p.expert_map;
  plan.expert_offsets = p.index + at.expert_offsets;
  plan.row_to_token = p.index + at.row_to_token;
  plan.slot_to_row = layer.slot_to_row();
  plan.scratch = p.index + at.plan_scratch;
  plan.batch = 1;
  plan.num_tokens = p.num_tokens;
  plan.top_k = p.top_k;
  plan.num_experts = p.num_experts;
  plan.expert_offset = p.expert_offset;
  plan.num_local_experts = p.num_local_experts;
  plan.zero_counters = p.index;
  plan.num_zero_counters = at.expert_offsets;  // and all before it
  return plan;
}

FinalizeParams MakeFinalize(const Layer& layer) {
  const MoeMlpParams& p = layer.p;
  FinalizeParams finalize{};
  finalize.rows = p.rows;
  finalize.slot_to_row = layer.slot_to_row();
  finalize.weights = p.weights;
  finalize.residual = p.residual;
  finalize.y = p.y;
  finalize.dtype = p.dtype;
  finalize.num_tokens = p.num_tokens;
  finalize.top_k = p.top_k;
  finalize.num_rows = layer.rows;
  finalize.hidden = p.hidden;
  finalize.pdl = true;
  finalize.early_choices = true;  // the gate-up GEMM, or the plan, wrote them
  return finalize;
}

// The rows in use are one group: from expert_offsets[0], which is 0, to expert_offsets[E_l].
ZeroRowsParams MakeZeroRows(const Layer& layer) {
  const MoeMlpParams& p = layer.p;
  ZeroRowsParams zero{};
  zero.out = p.rows;
  zero.starts = p.index + layer.at.expert_offsets;
  zero.sizes = zero.starts + p.num_local_experts;
  zero.batch = 1;
  zero.num_rows = layer.rows;
  zero.row_bytes = p.hidden * ElementSize(p.dtype);
  zero.num_groups = 1;
  zero.pdl = true;
  return zero;
}

// The counters that a plan clears, where the products plan for themselves.
ZeroRowsParams MakeZeroCounters(const Layer& layer) {
  ZeroRowsParams zero{};
  zero.zero_counters = layer.p.index;
  zero.num_zero_counters = layer.at.expert_offsets;
  return zero;
}

// The product of tokens that are here, or come meanwhile.
const char* LaunchGateUp(const Layer& layer, MoeGemmProblem gemm, cudaStream_t stream) {
  const MoeMlpParams& p = layer.p;
  if (p.arrivals == nullptr) return LaunchMoeGemm(gemm, p.gate_up.tile, stream);
  gemm.sources_came = p.arrivals->came;
  gemm.groups_per_source = p.arrivals->experts;
  gemm.early_groups = gemm.pdl = true;  // the plan wrote them, before what `begin` has launched
  if (const char* error = p.arrivals->begin()) return error;
  if (const char* error = LaunchMoeGemm(gemm, p.gate_up.tile, stream)) return error;
  return p.arrivals->end();
}

}  // namespace

const char* LaunchMoeMlp(const MoeMlpParams& p, cudaStream_t stream) {
  const Layer layer(p);
  if (layer.rows == 0 || p.hidden == 0) return nullptr;

  const MlpAdapters* const adapters = p.adapters;
  const bool packed = RowOf(p.format).is_packed();
  if (adapters != nullptr && (layer.quantized || layer.rounds || p.dtype != DType::kBFloat16)) {
    return "adapters are for layers of bf16 tokens that are not quantized";
  }
  const bool one_scale = RowOf(p.format).weights == Shared::kTensor && p.gate_up.up == nullptr;
  if (adapters != nullptr && packed && !one_scale) {
    return "adapters beside packed weights are for those with one scale each";
  }
  const bool asks_for_one = p.gate_up.tile.one_kernel;
  if (p.sources != nullptr && (layer.quantizes_x || layer.rounds || adapters != nullptr ||
                               p.peers != nullptr || p.y == nullptr)) {
    return "tokens that come meanwhile are multiplied as they are, without adapters";
  }
  const bool fetches = layer.gathers && !layer.moves_x() && !layer.prepares_x();
  if (p.arrivals != nullptr && (!fetches || adapters != nullptr || p.peers == nullptr)) {
    return "tokens that come meanwhile are fetched by the product, without adapters";
  }
  if (asks_for_one && (adapters != nullptr || layer.rounds || !p.gated)) {
    return "one kernel for both products is for gated layers, neither rounded tokens nor adapters";
  }
  const PlanParams plan = MakePlan(layer);
  MoeGemmProblem gate_up = GateUpProblem(layer);
  MoeGemmProblem down = DownProblem(layer);
  // Programs and tunings may be older than this library: two kernels compute the same bits.
  const bool one_kernel = asks_for_one && p.sources == nullptr && p.arrivals == nullptr &&
                          !(packed && p.peers != nullptr) && layer.quantizes_inside() &&
                          HasLayerKernel(gate_up, down, p.gate_up.tile);
  if (p.slice_sums != nullptr && p.gated && packed && !layer.rounds && p.y != nullptr &&
      adapters == nullptr && p.sources == nullptr && p.peers == nullptr) {
    gate_up.x = p.x;
    gate_up.plan = down.plan = &plan;
    down.finalized = {p.weights, p.residual, p.y};
    return LaunchMoeSlices(gate_up, down, p.slice_sums, stream);
  }
  // Decoding a token or two: the GEMMs plan for themselves, which saves a launch. They write no
  // expert_offsets, which zero_rows reads, and a rounding by static scales of each expert; and
  // where rows go is known before they run.
  const bool reads_offsets =
      p.y == nullptr || adapters != nullptr || (layer.rounds && p.num_static_act > 1);
  const bool planned_inside = !reads_offsets && p.sources == nullptr &&
                              layer.rows <= kMaxPlannedSlots && layer.gathers &&
                              p.gate_up.tile.token_tile <= 32;
  if (planned_inside) {
    gate_up.plan = &plan;
    gate_up.writes_plan = true;
    gate_up.pdl = layer.prepares_x();  // else the first launch, see LaunchClusters
    gate_up.scales.x_index = nullptr;
    down.plan = &plan;
    if (one_kernel) {
      gate_up.pdl = true;
      if (const char* error = Reason(LaunchZeroRows(MakeZeroCounters(layer), stream))) return error;
    }
  } else if (const char* error = Reason(LaunchPlan(plan, stream))) {
    return error;
  }
  if (layer.quantizes_x) {
    QuantizeParams quantize = QuantizeX(layer);
    quantize.pdl = quantize.early_x = !planned_inside;
    if (const char* error = Reason(LaunchQuantize(quantize, stream))) return error;
  } else if (layer.prepares_x()) {
    const RoundTokensParams round = RoundX(layer, planned_inside ? &plan : nullptr);
    if (const char* error = Reason(LaunchRoundTokens(round, stream))) return error;
  } else if (!layer.gathers && p.sources == nullptr) {
    if (const char* error = Reason(LaunchPermute(PermuteX(layer), stream))) return error;
  }
  if (adapters != nullptr) {
    LowRankParams low = Lower(layer, gate_up, adapters->gate_up_a, adapters->gate_up_rank);
    low.x = p.x;  // as it is not copied in the order of experts, which L2 does not hold
    low.row_index = gate_up.row_index;
    low.x_rows = p.num_tokens;
    low.early_groups = low.early_x = !layer.gathers;  // beside that copy
    if (const char* error = Reason(LaunchLowRank(low, stream))) return error;
    gate_up.low = Added(layer, adapters->gate_up_b, adapters->gate_up_rank);
  }
  const auto begin_rows = [&] {
    return Reason(LaunchPeerTargets(*p.peers, layer.slot_to_row(), true, stream));
  };
  // Before the products, where nothing waits for it; but behind the step in which tokens come.
  if (p.peers != nullptr && p.arrivals == nullptr) {
    if (const char* error = begin_rows()) return error;
  }
  TileConfig down_tile = p.down.tile;
  down_tile.gather = false;
  if (one_kernel) {
    int32_t* stored = p.index + layer.at.stored;
    const char* error = LaunchMoeLayer(gate_up, p.gate_up.tile, down, down_tile, stored, stream);
    if (error != nullptr) return error;
  } else {
    const PermuteParams copy = PermuteX(layer);
    const char* error = p.sources == nullptr
                            ? LaunchGateUp(layer, gate_up, stream)
                            : LaunchGateUpOfSources(*p.sources,
                                                    p.index + layer.at.expert_offsets,
                                                    layer.gathers ? nullptr : &copy,
                                                    gate_up,
                                                    p.gate_up.tile,
                                                    stream);
    if (error == nullptr && p.arrivals != nullptr) error = begin_rows();
    if (error != nullptr) return error;
    if (layer.rounds) {
      if (const char* error = Reason(LaunchRoundTokens(RoundAct(layer), stream))) return error;
    } else if (gate_up.out != down.x) {
      if (const char* error = Reason(LaunchQuantize(QuantizeAct(layer), stream))) return error;
    }
    if (adapters != nullptr) {
      LowRankParams low = Lower(layer, down, adapters->down_a, adapters->down_rank);
      low.early_groups = true;
      if (const char* error = Reason(LaunchLowRank(low, stream))) return error;
      down.low = Added(layer, adapters->down_b, adapters->down_rank);
    }
    if (p.sources != nullptr) {
      return LaunchDownOfSources(*p.sources, down, down_tile, MakeFinalize(layer), stream);
    }
    const bool finalizes = p.peers == nullptr && layer.clusters_find_room();
    if (finalizes && HasFinalizedKernel(down, down_tile)) {
      down.finalized = {p.weights, p.residual, p.y};
      return LaunchMoeGemm(down, down_tile, stream);
    }
    if (const char* error = LaunchMoeGemm(down, down_tile, stream)) return error;
  }
  if (p.peers != nullptr) return Reason(LaunchPeerFinalize(*p.peers, stream));
  // NOTE: zero last: without gather the rows of X are in the same buffer.
  if (p.y == nullptr) return Reason(LaunchZeroRows(MakeZeroRows(layer), stream));
  FinalizeParams finalize = MakeFinalize(layer);
  if (one_kernel && planned_inside) finalize.early_choices = false;  // that launch wrote them
  return Reason(LaunchFinalize(finalize, stream));
}

}  // namespace jaxmoe
