// Numbers that the kernels share with the Python package, which compares them with its own.
#include "csrc/ffi/tables.h"

#include <utility>

#include "csrc/ffi/gemm_attrs.h"
#include "csrc/gemm/kernels.h"
#include "csrc/gemm/moe_mlp.h"
#include "csrc/kernels/plan.h"
#include "csrc/kernels/quantize.h"
#include "csrc/kernels/route.h"

namespace jaxmoe {
namespace {

namespace nb = nanobind;

template <class Enum>
nb::dict Codes(std::initializer_list<std::pair<const char*, Enum>> names) {
  nb::dict codes;
  for (const auto& [name, value] : names) codes[name] = static_cast<int>(value);
  return codes;
}

// (weight_tile, token_tile, cluster, split_k) -> CTAs an SM of kernels whose sums are promoted, or
// of those whose sums are not.
nb::dict Tiles(bool promoted) {
  nb::dict tiles;
  for (const KernelInfo& kernel : Kernels()) {
    const TileConfig& t = kernel.tile;
    if (kernel.promoted != promoted) continue;
    tiles[nb::make_tuple(t.weight_tile, t.token_tile, t.cluster, t.split_k)] = kernel.ctas_per_sm;
  }
  return tiles;
}

// Sizes of scratch at points where their formulas change: arguments -> elements.
void AddScratch(nb::dict& tables) {
  nb::dict plan, index, floats;
  for (int64_t rows : {0, 1, 30, 8192, 8193, 262144, 262145, 1 << 21}) {
    for (int64_t experts : {1, 7, 128, 1024, 1025}) {
      plan[nb::make_tuple(3, rows, experts)] = PlanScratchInts(3, rows, experts);
      index[nb::make_tuple(rows, experts)] = MlpIndex(rows, experts).size;
    }
  }
  for (int format = 0; format <= static_cast<int>(WeightFormat::kFp8Block); ++format) {
    for (int64_t tokens : {0, 1, 6}) {
      for (int64_t k : {16, 128, 272}) {
        const MlpFloats size(static_cast<WeightFormat>(format), tokens, 2 * tokens, k, k + 16);
        floats[nb::make_tuple(format, tokens, 2 * tokens, k, k + 16)] = size.size;
      }
    }
  }
  tables["plan_scratch"] = plan;
  tables["mlp_index"] = index;
  tables["mlp_floats"] = floats;
  tables["gemm_scratch"] = kGemmScratchInts;
}

}  // namespace

nb::dict Tables() {
  nb::dict tables;
  tables["activation"] = Codes<ActivationParams::Kind>({{"sigmoid", ActivationParams::kSigmoid},
                                                        {"erf", ActivationParams::kErf},
                                                        {"relu", ActivationParams::kRelu},
                                                        {"relu2", ActivationParams::kRelu2},
                                                        {"identity", ActivationParams::kIdentity}});
  tables["gate_up"] = Codes<GateUp>({{"gate_up", GateUp::kGateUp},
                                     {"up_gate", GateUp::kUpGate},
                                     {"interleaved", GateUp::kInterleaved}});
  tables["layout"] = Codes<WeightLayout>({{"kn", WeightLayout::kKN}, {"nk", WeightLayout::kNK}});
  tables["format"] = Codes<WeightFormat>({{"plain", WeightFormat::kPlain},
                                          {"fp8_tensor", WeightFormat::kFp8Tensor},
                                          {"fp8_channel", WeightFormat::kFp8Channel},
                                          {"fp8_block", WeightFormat::kFp8Block}});
  tables["shared"] = Codes<QuantFormat>({{"tensor", QuantFormat::kTensor},
                                         {"row", QuantFormat::kRow},
                                         {"group", QuantFormat::kGroup},
                                         {"block", QuantFormat::kBlock}});
  tables["score"] = Codes<RouteScore>({{"logits", RouteScore::kLogits},
                                       {"softmax", RouteScore::kSoftmax},
                                       {"sigmoid", RouteScore::kSigmoid},
                                       {"sqrtsoftplus", RouteScore::kSqrtSoftplus}});
  tables["normalize"] = Codes<RouteNormalize>({{"none", RouteNormalize::kNone},
                                               {"softmax", RouteNormalize::kSoftmax},
                                               {"sum", RouteNormalize::kSum},
                                               {"clamped_sum", RouteNormalize::kClampedSum}});
  tables["group_value"] =
      Codes<RouteGroupValue>({{"top2", RouteGroupValue::kTop2}, {"max", RouteGroupValue::kMax}});
  tables["tiles"] = Tiles(false);
  tables["promoted_tiles"] = Tiles(true);
  tables["max_route_experts"] = kRouteMaxExperts;
  tables["quant_block"] = kQuantBlock;
  tables["max_quant_partials"] = kMaxQuantPartials;
  AddScratch(tables);
  return tables;
}

}  // namespace jaxmoe
