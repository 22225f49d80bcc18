// From a problem and a tile to a launched kernel: the one table of variants, unknown rows refused.
#include <algorithm>
#include <cstdint>
#include <cstdio>

#include "csrc/common/launch.h"
#include "csrc/common/tensor_map.h"
#include "csrc/gemm/args.h"
#include "csrc/gemm/kernels.h"

namespace jaxmoe {
namespace {

constexpr VariantTable (*kTables[])() = {
    &Bf16KnVariants,       &Bf16NkVariants,    &Fp16KnVariants,       &Fp16NkVariants,
    &Tf32Variants,         &E4M3Variants,      &E4M3PromotedVariants, &E5M2Variants,
    &E5M2PromotedVariants, &Mxfp4Bf16Variants, &Mxfp4Fp16Variants,    &Nvfp4Bf16Variants,
    &Nvfp4Fp16Variants,    &Int4Bf16Variants,  &Int4Fp16Variants,     &Int4E4M3Variants,
    &Int8Bf16Variants,     &Int8Fp16Variants,  &Mxfp8Bf16Variants,    &Mxfp8Fp16Variants};

const Variant* FindVariant(const MoeGemmProblem& p, const TileConfig& tile) {
  for (const auto& table_of : kTables) {
    const VariantTable table = table_of();
    for (int i = 0; i < table.size; ++i) {
      const Variant& v = table.rows[i];
      if (v.packing == p.packed.packing && v.dtype == p.dtype && v.layout == p.layout &&
          v.promoted == p.scales.promoted && v.weight_tile == tile.weight_tile &&
          v.token_tile == tile.token_tile && v.cluster == tile.cluster &&
          v.split_k == tile.split_k) {
        return &v;
      }
    }
  }
  return nullptr;
}

// The tile asked for, or one of the same bits where programs and tunings that are older than this
// library ask for one that is gone.
TileConfig Current(const MoeGemmProblem& p, const TileConfig& asked) {
  TileConfig tile = asked;
  if (p.packed.packing != Packing::kNone || p.scales.promoted) return tile;
  if (tile.weight_tile == 256 && tile.token_tile == 128) tile.token_tile = 160;
  if (p.low.x != nullptr && tile.weight_tile == 128 && tile.token_tile == 192) {
    tile.weight_tile = 256;
    tile.token_tile = 160;
    tile.cluster = 2;
  }
  return tile;
}

// Codes of packed weights are multiplied as they are, by tokens of FP8.
bool IsCoded(const MoeGemmProblem& p) {
  return p.packed.packing != Packing::kNone && IsFloat8(p.dtype);
}

// Weights of 64 rows a block; w and w_up have as many.
PackedArgs MakePacked(const MoeGemmProblem& p, int rows, int step_k) {
  PackedArgs packed = PackedArgsOf(p.packed, p.k);
  packed.superblock_steps = p.packed.superblock_k(p.k) / step_k;
  packed.w = static_cast<const uint8_t*>(p.w);
  packed.w_up = static_cast<const uint8_t*>(p.w_up);
  packed.weight_bytes = rows / 64 * packed.block_bytes;
  return packed;
}

// With step scales, so promoted sums.
bool ByStep(const MoeGemmProblem& p) { return p.scales.shared == Shared::kBlock; }

// Groups of 128 elements of a row of X, which share a scale.
int StoredGroups(const MoeGemmProblem& down) { return static_cast<int>(CeilDiv(down.k, 128)); }

ScaleArgs MakeScales(const MoeGemmProblem& p) {
  constexpr int kBlock = 128;
  const int blocks = static_cast<int>(CeilDiv(p.k, kBlock));
  const bool two_arrays = p.w_up != nullptr;
  ScaleArgs s{};
  s.w = p.scales.w;
  s.x = p.scales.x;
  s.out = p.scales.out;
  s.out_groups = p.scales.out_groups;
  s.x_index = p.scales.x_index;
  s.num_x = 1;
  s.num_out = p.scales.num_out;
  s.by_step = ByStep(p);
  s.half = p.out_dtype == DType::kFloat16;
  switch (p.scales.shared) {
    case Shared::kTensor:
      s.w_stride = two_arrays ? 2 : 1;
      s.w_up = two_arrays ? 1 : 0;
      s.num_x = p.scales.num_x;
      break;
    case Shared::kRow:
      s.w_stride = p.n;
      s.w_row_stride = 1;
      s.w_up = two_arrays ? p.n / 2 : 0;
      s.x_row_stride = 1;
      break;
    case Shared::kGroup:  // of tokens alone
    case Shared::kBlock:
      s.w_row_stride = blocks;
      s.w_up = two_arrays ? static_cast<int>(CeilDiv(p.n / 2, kBlock)) * blocks : 0;
      s.w_stride = two_arrays ? 2 * s.w_up : CeilDiv(p.n, kBlock) * blocks;
      s.x_row_stride = blocks;
      break;
  }
  return s;
}

template <class... Args>
const char* Message(const char* format, Args... args) {
  thread_local char text[160];
  std::snprintf(text, sizeof(text), format, args...);
  return text;
}

const char* NoKernel(const MoeGemmProblem& p, const TileConfig& tile, const char* what) {
  return Message("no kernel with weight_tile=%d token_tile=%d cluster=%d split_k=%d%s%s",
                 tile.weight_tile,
                 tile.token_tile,
                 tile.cluster,
                 tile.split_k,
                 p.scales.promoted ? ", promoted sums" : "",
                 what);
}

// A product without rows, columns or groups.
bool IsEmpty(const MoeGemmProblem& p) {
  return p.num_groups == 0 || p.rows_per_batch == 0 || p.n == 0;
}

// Arguments of a product that is not empty, or the reason why its kernel cannot run it.
const char* MakeArgs(const MoeGemmProblem& p,
                     const TileConfig& tile,
                     const Variant* variant,
                     MoeGemmArgs* out) {
  const bool two_arrays = p.w_up != nullptr;
  if (two_arrays && (!p.gated || p.gate_up != GateUp::kGateUp)) {
    return "a second weight array has the up half of a gated product, gate first";
  }
  const int unit = 16 / ElementSize(p.dtype);
  if (p.k % unit != 0 || (p.gated ? p.n / 2 : p.n) % 8 != 0 || p.n % 8 != 0 || p.k == 0) {
    return Message("k=%d must be a positive multiple of %d and n=%d%s of 8 (16-byte rows)",
                   p.k,
                   unit,
                   p.n,
                   p.gated ? " (both halves)" : "");
  }
  const bool is_packed = p.packed.packing != Packing::kNone;
  const bool halves = p.gated && p.gate_up != GateUp::kInterleaved;
  if (is_packed && ((halves ? p.n / 2 : p.n) % 64 != 0 || p.k % p.packed.superblock_k(p.k) != 0 ||
                    p.k % 64 != 0)) {
    return Message("packed weights are whole blocks of 64 x %d, not k=%d n=%d%s",
                   p.packed.superblock_k(p.k),
                   p.k,
                   p.n,
                   halves ? " (both halves)" : "");
  }
  if (IsCoded(p) && (p.packed.k != variant->step_k || p.packed.has_zeros)) {
    return "codes are multiplied as they are where 128 share a scale, without zero points";
  }
  if (p.z != nullptr && (!variant->stores_sums || p.out_f32)) {
    return "sums beside the activation are those of bf16 and fp16 products";
  }
  if (p.dtype == DType::kFloat32 && (p.gated || !p.out_f32)) {
    return "products of float32 have float32 results and no gate";
  }
  const bool has_activation = p.gated || p.activation.kind != ActivationParams::kIdentity;
  const bool quantizes = p.scales.out != nullptr || p.scales.out_groups != nullptr;
  if (p.out_rows != nullptr && (has_activation || quantizes || p.out_f32 || p.z != nullptr)) {
    return "rows stored elsewhere are the sums of bf16 and fp16 products";
  }
  if (p.low.x != nullptr && p.out_rows != nullptr) {
    return "rows stored elsewhere have no adapters";
  }
  if (p.low.x != nullptr && (p.scales.x != nullptr || p.low.rank % 8 != 0)) {
    return "adapters have a rank of whole 8 beside tokens without scales";
  }
  if (is_packed && p.scales.x != nullptr && !variant->scales_rows) {
    return "tokens have no scales beside these packed weights";
  }
  if (tile.gather && !variant->gathers) {
    return "wide tiles of packed weights or promoted sums do not gather";
  }
  if (ByStep(p) && (!p.scales.promoted || p.x_rows * CeilDiv(p.k, variant->step_k) > INT32_MAX)) {
    return "block scales need promoted sums and at most 2^31 scales of X";
  }
  if (ByStep(p) && p.gated && !two_arrays && p.n % 32 != 0)
    return "with block scales n / 2 is a multiple of 16";

  MoeGemmArgs& args = *out;
  args = {};
  args.up_origin = two_arrays ? p.n / 2 : 0;
  const auto encode_weight = [&](const void* w, CUtensorMap* map) {
    constexpr int kBoxRows = 64;
    const int rows = p.n - args.up_origin;
    const bool k_inner = p.layout == WeightLayout::kNK;
    return EncodeMatricesMap(
        p.dtype, w, p.num_weights, k_inner ? rows : p.k, k_inner ? p.k : rows, kBoxRows, map);
  };
  if (is_packed) {
    args.packed = MakePacked(p, p.n - args.up_origin, variant->step_k);
  } else if (const char* error = encode_weight(p.w, &args.w_map)) {
    return error;
  }
  if (two_arrays && !is_packed) {
    if (const char* error = encode_weight(p.w_up, &args.w_up_map)) return error;
  }
  const int x_box_rows = tile.gather ? 1 : variant->box_rows;
  const int64_t x_cols = IsCoded(p) ? 2 * p.k : p.k;
  if (const char* error =
          EncodeMatrixMap(p.dtype, p.x, p.x_rows, x_cols, x_box_rows, &args.x_map)) {
    return error;
  }
  args.group_starts = p.group_starts;
  args.group_sizes = p.group_sizes;
  args.row_index = p.row_index;
  args.tile_counter = p.tile_counter;
  args.x = p.x;
  args.x_rows = p.x_rows;
  args.bias = p.bias;
  args.out = p.out;
  args.out_rows = p.out_rows;
  args.sources_came = p.sources_came;
  args.groups_per_source = p.groups_per_source;
  args.num_groups = p.num_groups;
  args.groups_per_batch = p.groups_per_batch;
  args.rows_per_batch = p.rows_per_batch;
  args.num_weights = p.num_weights;
  args.k = p.k;
  args.n = p.n;
  args.n_out = p.gated ? p.n / 2 : p.n;
  args.num_k_steps = static_cast<int>(CeilDiv(p.k, variant->step_k));
  if (args.num_k_steps < variant->split_k) {
    return Message(
        "split_k=%d needs k > %d, not %d", tile.split_k, (tile.split_k - 1) * variant->step_k, p.k);
  }
  if (p.plan != nullptr && (p.plan->num_tokens * p.plan->top_k > kMaxPlannedSlots ||
                            (tile.gather && tile.token_tile > 32))) {
    return "too many slots or rows a tile to plan inside the product";
  }
  if (p.sources_came != nullptr && (!tile.gather || variant->ctas_per_sm > 1)) {
    return "only tiles that have an SM each, and fetch rows, wait for sources";
  }
  args.num_w_tiles = static_cast<int>(CeilDiv(p.n, tile.weight_tile));
  args.raster = tile.raster <= 0 ? args.num_w_tiles : std::min(tile.raster, args.num_w_tiles);
  args.gated = p.gated;
  args.interleaved = p.gated && !halves;
  args.pair_rows = halves ? 64 : 128;
  args.block_base[0] = halves && p.gate_up == GateUp::kUpGate ? args.n_out : 0;
  args.block_base[1] = !halves ? 64 : p.gate_up == GateUp::kUpGate ? 0 : args.n_out;
  args.gather = tile.gather;
  args.out_f32 = p.out_f32;
  args.early_groups = p.early_groups;
  const int tile_rows = tile.token_tile * variant->cluster;
  const int64_t mean_rows = CeilDiv(p.rows_per_batch, p.groups_per_batch);
  args.stream_weights = mean_rows <= tile_rows;  // about one token tile a group
  // Of few rows a tile soon has its stages back; of several tiles others may have been there.
  args.prefetch_weights =
      args.stream_weights && mean_rows >= kMinPrefetchRows && args.num_k_steps >= kMinPrefetchSteps;
  args.may_narrow = mean_rows <= kMaxNarrowRows && args.num_groups <= kMaxNarrowGroups;
  args.activation = p.activation;
  args.z = p.z;
  args.low = p.low;
  args.plans = p.plan != nullptr;
  args.writes_plan = p.writes_plan;
  if (args.plans) args.plan = *p.plan;
  if (IsFloat8(p.dtype) || is_packed) args.scales = MakeScales(p);

  // A thread takes one scale for its warpgroup's 64 gate rows and one for the up rows.
  if (ByStep(p) && p.gated && !two_arrays && !args.interleaved && args.n_out % 64 != 0 &&
      (tile.weight_tile == 256 || tile.token_tile == 256)) {
    return "block scales and a tile of 256 need halves of a multiple of 64 rows";
  }
  if (quantizes && args.n_out % 16 != 0) {
    return "a quantized output has rows of a multiple of 16 features";
  }
  if (p.scales.out_groups != nullptr && !QuantizesGroups(p.scales.shared, tile)) {
    return "this tile has no whole groups to quantize";
  }
  return nullptr;
}

// Cluster tiles of a product, at most: of all groups together there is at most one ragged token
// tile a group beyond the full ones.
int64_t MaxTiles(const MoeGemmProblem& p, const MoeGemmArgs& args, const Variant& variant) {
  const int tile_rows = variant.token_tile * variant.cluster;
  const int64_t batches = CeilDiv(p.num_groups, p.groups_per_batch);
  const int64_t rows = batches * p.rows_per_batch;
  const int64_t token_tiles = rows / tile_rows + std::min<int64_t>(p.num_groups, rows);
  return token_tiles * args.num_w_tiles;
}

// CTAs for so many cluster tiles: no more than run at once.
cudaError_t GridOf(int64_t tiles, const Variant& variant, int* grid) {
  int sm_count = 0;
  JAXMOE_RETURN_IF_CUDA_ERROR(GetSmCount(&sm_count));
  const int cluster_ctas = variant.cluster * variant.split_k;
  const int64_t clusters = std::min<int64_t>(tiles, sm_count * variant.ctas_per_sm / cluster_ctas);
  *grid = static_cast<int>(clusters) * cluster_ctas;
  return cudaSuccess;
}

// Whether the kernel looks how many tiles there are, see EvenTileRows: where each CTA may have but
// a few of them, if rows are in few groups.
bool HasFewTiles(const MoeGemmProblem& p,
                 const MoeGemmArgs& args,
                 const Variant& variant,
                 int grid) {
  const int64_t rows = CeilDiv(p.num_groups, p.groups_per_batch) * p.rows_per_batch;
  const int64_t tiles = rows / (variant.token_tile * variant.cluster) * args.num_w_tiles;
  return p.num_groups <= kMaxNarrowGroups && tiles <= kFewTiles * (grid / variant.cluster);
}

}  // namespace

const char* LaunchMoeGemm(const MoeGemmProblem& p, const TileConfig& asked, cudaStream_t stream) {
  const TileConfig tile = Current(p, asked);
  const Variant* variant = FindVariant(p, tile);
  if (variant == nullptr) return NoKernel(p, tile, "");
  const bool finalizes = p.finalized.y != nullptr;
  if (finalizes && !HasFinalizedKernel(p, tile)) return NoKernel(p, tile, " that finalizes");
  const auto launch = p.low.x != nullptr ? variant->launch_adapted : variant->launch;
  if (launch == nullptr) return NoKernel(p, tile, ", adapters");
  if (IsEmpty(p)) return nullptr;
  MoeGemmArgs args;
  if (const char* error = MakeArgs(p, tile, variant, &args)) return error;
  if (finalizes) return Reason(variant->launch_finalized({args, p.finalized}, p.pdl, stream));
  int grid = 0;
  if (const char* error = Reason(GridOf(MaxTiles(p, args, *variant), *variant, &grid))) {
    return error;
  }
  args.few_tiles = !args.plans && HasFewTiles(p, args, *variant, grid);
  return Reason(launch(args, grid, p.pdl, stream));
}

bool HasFinalizedKernel(const MoeGemmProblem& down, const TileConfig& tile) {
  const Variant* variant = FindVariant(down, tile);
  if (variant == nullptr || variant->launch_finalized == nullptr || down.plan == nullptr) {
    return false;
  }
  const PlanParams& plan = *down.plan;
  const bool has_form = !down.gated && down.activation.kind == ActivationParams::kIdentity &&
                        !down.out_f32 && down.out_rows == nullptr && down.low.x == nullptr;
  return has_form && plan.num_tokens == 1 && plan.top_k > 1 && plan.top_k <= kMaxFinalizedChoices;
}

bool HasLayerKernel(const MoeGemmProblem& gate_up,
                    const MoeGemmProblem& down,
                    const TileConfig& tile) {
  const Variant* variant = FindVariant(gate_up, tile);
  if (variant == nullptr || variant->launch_layer == nullptr) return false;
  if (gate_up.scales.promoted != down.scales.promoted) return false;
  return !ByStep(down) || StoredGroups(down) <= kMaxStoredGroups;
}

const char* LaunchMoeLayer(const MoeGemmProblem& gate_up,
                           const TileConfig& gate_up_tile,
                           const MoeGemmProblem& down,
                           const TileConfig& down_tile,
                           int* stored,
                           cudaStream_t stream) {
  const Variant* first = FindVariant(gate_up, gate_up_tile);
  const Variant* second = FindVariant(down, down_tile);
  if (second == nullptr || !HasLayerKernel(gate_up, down, gate_up_tile)) {
    return NoKernel(gate_up, gate_up_tile, " for both products");
  }
  if (gate_up.layout != down.layout || gate_up_tile.weight_tile != down_tile.weight_tile ||
      gate_up_tile.token_tile != down_tile.token_tile ||
      gate_up_tile.cluster != down_tile.cluster || gate_up_tile.split_k != down_tile.split_k) {
    return "one kernel for both products needs one tile and one layout of weights";
  }
  if (gate_up.out_f32 || down.out_f32 || gate_up.z != nullptr || down.gated) {
    return "one kernel for both products is gate-up, activation and down";
  }
  if (down.out_rows != nullptr && down.packed.packing != Packing::kNone) {
    return "one kernel for both products of packed weights stores no rows elsewhere";
  }
  if (IsEmpty(gate_up) || IsEmpty(down)) return "one kernel for both products needs both";
  MoeLayerArgs args{};
  if (const char* error = MakeArgs(gate_up, gate_up_tile, first, &args.products[0])) return error;
  if (const char* error = MakeArgs(down, down_tile, second, &args.products[1])) return error;
  args.stored = stored;
  args.count_mask = INT32_MAX;
  args.complete = args.products[0].num_w_tiles;
  if (ByStep(down)) {  // the kernel writes what it then reads
    args.count_mask = (1 << kStoredCountBits) - 1;
    args.complete = StoredGroups(down);
    args.act_values = const_cast<void*>(down.x);
    args.act_scales = const_cast<float*>(down.scales.x);
  }
  const int64_t tiles =
      MaxTiles(gate_up, args.products[0], *first) + MaxTiles(down, args.products[1], *second);
  int grid = 0;
  if (const char* error = Reason(GridOf(tiles, *first, &grid))) return error;
  return Reason(first->launch_layer(args, grid, gate_up.pdl, stream));
}

const char* LaunchMoeSlices(const MoeGemmProblem& gate_up,
                            const MoeGemmProblem& down,
                            float* sums,
                            cudaStream_t stream) {
  TileConfig tile;
  tile.token_tile = 16;
  const Variant* variant = FindVariant(gate_up, tile);
  if (variant == nullptr || variant->launch_slices == nullptr) {
    return NoKernel(gate_up, tile, " for slices");
  }
  const bool has_plan = gate_up.plan != nullptr && down.plan != nullptr;
  if (!has_plan || gate_up.plan->num_tokens != 1 || down.finalized.y == nullptr) {
    return "slices are of layers of one token, which plan for themselves and finalize";
  }
  if (!gate_up.gated || down.k % kSliceFeatures != 0 || down.n < kMinSlicedHidden ||
      down.n > kMaxSlicedHidden) {
    return Message("slices of a gated layer need k=%d of whole %d, and n=%d in [%d, %d]",
                   down.k,
                   kSliceFeatures,
                   down.n,
                   static_cast<int>(kMinSlicedHidden),
                   static_cast<int>(kMaxSlicedHidden));
  }
  SliceArgs args{};
  if (const char* error = MakeArgs(gate_up, tile, variant, &args.products[0])) return error;
  if (const char* error = MakeArgs(down, tile, variant, &args.products[1])) return error;
  args.token = down.finalized;
  args.sums = sums;
  args.slices = down.k / kSliceFeatures;
  return Reason(variant->launch_slices(args, stream));
}

std::vector<KernelInfo> Kernels() {
  std::vector<KernelInfo> kernels;
  for (const auto& table_of : kTables) {
    const VariantTable table = table_of();
    for (int i = 0; i < table.size; ++i) {
      const Variant& v = table.rows[i];
      TileConfig tile;
      tile.weight_tile = v.weight_tile;
      tile.token_tile = v.token_tile;
      tile.cluster = v.cluster;
      tile.split_k = v.split_k;
      const bool computes_layer = v.launch_layer != nullptr, adds = v.launch_adapted != nullptr;
      kernels.push_back(
          {v.packing, v.dtype, v.layout, v.promoted, tile, v.ctas_per_sm, computes_layer, adds});
    }
  }
  return kernels;
}

}  // namespace jaxmoe
