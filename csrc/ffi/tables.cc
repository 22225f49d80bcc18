// Numbers that the kernels share with the Python package, which compares them with its own.
#include "csrc/ffi/tables.h"

#include <iterator>

#include "csrc/ffi/gemm_attrs.h"
#include "csrc/gemm/kernels.h"
#include "csrc/gemm/moe_mlp.h"
#include "csrc/kernels/plan.h"
#include "csrc/kernels/quantize.h"
#include "csrc/kernels/route.h"
#include "csrc/peers/exchange.h"
#include "csrc/peers/rows.h"

namespace jaxmoe {
namespace {

namespace nb = nanobind;

template <class Enum>
nb::dict Codes() {
  nb::dict codes;
  for (int value = 0; value < kNumOf<Enum>; ++value) codes[EnumNames<Enum>::kAll[value]] = value;
  return codes;
}

nb::dict FormatCodes() {
  nb::dict codes;
  for (const FormatRow& row : kFormats) codes[row.name] = &row - kFormats;
  return codes;
}

// Kernels that are not there for every tile.
enum class Special { kNone, kLayer, kAdapted, kCoded };

// (weight_tile, token_tile, cluster, split_k) -> CTAs an SM of kernels for packed weights or not,
// whose sums are promoted or not, or of those that compute both products, add those of adapters or
// multiply codes as they are.
nb::dict Tiles(bool packed, bool promoted, Special special = Special::kNone) {
  nb::dict tiles;
  for (const KernelInfo& kernel : Kernels()) {
    const TileConfig& t = kernel.tile;
    if ((kernel.packing != Packing::kNone) != packed || kernel.promoted != promoted) continue;
    const bool coded = packed && IsFloat8(kernel.dtype);
    if (coded != (special == Special::kCoded)) continue;
    if (special == Special::kLayer && !kernel.computes_layer) continue;
    if (special == Special::kAdapted && !kernel.adds_low_rank) continue;
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
      for (bool one_kernel : {false, true}) {
        index[nb::make_tuple(rows, experts, one_kernel)] = MlpIndex(rows, experts, one_kernel).size;
      }
    }
  }
  for (int format = 0; format < static_cast<int>(std::size(kFormats)); ++format) {
    const int rules = kFormats[format].is_packed() ? kNumOf<TokenRule> : 1;
    for (int rule = 0; rule < rules; ++rule) {
      for (int64_t tokens : {0, 1, 6}) {
        for (int64_t k : {16, 128, 272}) {
          const MlpFloats size(static_cast<WeightFormat>(format),
                               static_cast<TokenRule>(rule),
                               tokens,
                               2 * tokens,
                               k,
                               k + 16);
          floats[nb::make_tuple(format, rule, tokens, 2 * tokens, k, k + 16)] = size.size;
        }
      }
    }
  }
  nb::dict sums;
  for (int64_t rows : {1, 8, 32}) {
    for (int64_t k : {512, 2880}) sums[nb::make_tuple(rows, k, 768)] = SliceSums(rows, k, 768);
  }
  tables["slice_sums"] = sums;
  tables["sliced_hidden"] = nb::make_tuple(kMinSlicedHidden, kMaxSlicedHidden);
  tables["plan_scratch"] = plan;
  tables["mlp_index"] = index;
  tables["mlp_floats"] = floats;
  tables["gemm_scratch"] = kGemmScratchInts;
}

// Bytes of a half of peer memory: (T, K, n, bytes of a row, small floats) -> of a dispatch, of a
// combine, and of the rows of a product.
nb::dict PeerBytes() {
  nb::dict bytes;
  for (int64_t tokens : {0, 1, 24, 4096}) {
    for (int64_t top_k : {1, 3, 8}) {
      for (int devices : {1, 2, 8}) {
        for (int64_t row : {2, 96, 14336}) {
          const ExchangeSize size{
              .num_tokens = tokens, .top_k = top_k, .num_local = 1, .num_devices = devices};
          const int64_t small = 2 * top_k;
          bytes[nb::make_tuple(tokens, top_k, devices, row, small)] =
              nb::make_tuple(PeerDispatchBytes(size, row, small),
                             PeerCombineBytes(size, row, small),
                             PeerRowsBytes(size, row));
        }
      }
    }
  }
  return bytes;
}

}  // namespace

nb::dict Tables() {
  nb::dict tables;
  tables["activation"] = Codes<ActivationParams::Kind>();
  tables["gate_up"] = Codes<GateUp>();
  tables["layout"] = Codes<WeightLayout>();
  tables["format"] = FormatCodes();
  tables["tokens"] = Codes<TokenRule>();
  tables["shared"] = Codes<Shared>();
  tables["score"] = Codes<RouteScore>();
  tables["normalize"] = Codes<RouteNormalize>();
  tables["group_value"] = Codes<RouteGroupValue>();
  tables["tiles"] = Tiles(false, false);
  tables["promoted_tiles"] = Tiles(false, true);
  tables["packed_tiles"] = Tiles(true, false);
  tables["coded_tiles"] = Tiles(true, false, Special::kCoded);
  tables["layer_tiles"] = Tiles(false, false, Special::kLayer);
  tables["packed_layer_tiles"] = Tiles(true, false, Special::kLayer);
  tables["adapted_tiles"] = Tiles(false, false, Special::kAdapted);
  tables["packed_adapted_tiles"] = Tiles(true, false, Special::kAdapted);
  tables["max_columns"] = kMaxColumns;
  tables["max_planned_slots"] = kMaxPlannedSlots;
  tables["max_finalized_choices"] = kMaxFinalizedChoices;
  tables["max_route_experts"] = kRouteMaxExperts;
  tables["quant_block"] = kQuantBlock;
  tables["max_quant_partials"] = kMaxQuantPartials;
  tables["peer_bytes"] = PeerBytes();
  tables["peer_header"] = kPeerHeaderBytes;
  tables["max_peers"] = kMaxPeers;
  AddScratch(tables);
  return tables;
}

}  // namespace jaxmoe
