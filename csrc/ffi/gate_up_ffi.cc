// FFI handler of a training step's first product: activated, and what the activation is of.
#include "csrc/ffi/checks.h"
#include "csrc/ffi/counters.h"
#include "csrc/ffi/gemm_attrs.h"
#include "csrc/kernels/zero_rows.h"

namespace jaxmoe {
namespace {

constexpr char kOp[] = "moe_mlp";
constexpr int64_t kScratchInts = 4;  // the tile counter, gmm_scratch_size in _heuristics.py
constexpr int64_t kMaxInt = (int64_t{1} << 31) - 1;

ffi::Error GateUpProduct(cudaStream_t stream,
                         ffi::AnyBuffer x,               // [T,H], or without row_to_token [R,H]
                         ffi::AnyBuffer row_to_token,    // [R] or absent
                         ffi::AnyBuffer w,               // [E,H,N] or [E,N,H]
                         ffi::AnyBuffer bias,            // [E,N] or absent
                         ffi::AnyBuffer starts,          // [G]
                         ffi::AnyBuffer sizes,           // [G]
                         ffi::Result<ffi::AnyBuffer> h,  // [R,I]
                         ffi::Result<ffi::AnyBuffer> z,  // [R,N]
                         ffi::Result<ffi::AnyBuffer> scratch,
                         int64_t weight_layout,
                         int64_t gate_up,
                         ActivationAttrs activation,
                         TileAttrs config) {
  CountExecution(Target::kGateUp);
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "x", x, 2));
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "w", w, 3));
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "starts", starts, 1));
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "h", *h, 2));
  const int64_t rows = h->dimensions()[0], intermediate = h->dimensions()[1];
  const int64_t hidden = x.dimensions()[1], experts = w.dimensions()[0];
  const int64_t groups = starts.dimensions()[0];
  const bool gated = activation.gated != 0, gathers = !IsAbsent(row_to_token);
  const int64_t n = gated ? 2 * intermediate : intermediate;
  const bool kn = weight_layout == static_cast<int64_t>(WeightLayout::kKN);
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "weight_layout", weight_layout, 0, 1));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "gate_up", gate_up, 0, 2));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "activation kind", activation.kind, 0, 4));
  JAXMOE_RETURN_IF_ERROR(CheckDtype(kOp, "x", x, {ffi::DataType::BF16, ffi::DataType::F16}));
  for (const ffi::AnyBuffer& like_x : {w, bias, *h, *z}) {
    JAXMOE_RETURN_IF_ERROR(CheckDtype(kOp, "operand", like_x, {x.element_type()}));
  }
  for (const ffi::AnyBuffer& integers : {row_to_token, starts, sizes, *scratch}) {
    JAXMOE_RETURN_IF_ERROR(CheckDtype(kOp, "index operand", integers, {ffi::DataType::S32}));
  }
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "x", x, {gathers ? x.dimensions()[0] : rows, hidden}));
  JAXMOE_RETURN_IF_ERROR(CheckShapeOrAbsent(kOp, "row_to_token", row_to_token, {rows}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "w", w, {experts, kn ? hidden : n, kn ? n : hidden}));
  JAXMOE_RETURN_IF_ERROR(CheckShapeOrAbsent(kOp, "bias", bias, {experts, n}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "sizes", sizes, {groups}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "z", *z, {rows, n}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "scratch", *scratch, {kScratchInts}));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "rows", rows, 0, kMaxInt));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "x.shape[0]", x.dimensions()[0], 0, kMaxInt));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "groups", groups, 0, kMaxInt));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "w.shape[0]", experts, 1, kMaxInt));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "hidden", hidden, 0, kMaxInt / 4));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "N", n, 0, kMaxInt / 4));
  if (z->element_count() == 0) return ffi::Error::Success();

  ZeroRowsParams zero{};
  zero.out = z->untyped_data();
  zero.row_bytes = 2 * n;
  zero.other = {h->untyped_data(), 2 * intermediate};
  zero.starts = starts.typed_data<int32_t>();
  zero.sizes = sizes.typed_data<int32_t>();
  zero.batch = 1;
  zero.num_rows = rows;
  zero.num_groups = groups;
  zero.zero_counters = scratch->typed_data<int32_t>();
  zero.num_zero_counters = kScratchInts;
  JAXMOE_RETURN_IF_ERROR(CudaStatus(kOp, LaunchZeroRows(zero, stream)));

  MoeGemmProblem gemm;
  gemm.dtype = ToDType(x.element_type());
  gemm.layout = static_cast<WeightLayout>(weight_layout);
  gemm.x = x.untyped_data();
  gemm.w = w.untyped_data();
  gemm.bias = IsAbsent(bias) ? nullptr : bias.untyped_data();
  gemm.out = h->untyped_data();
  gemm.z = z->untyped_data();
  gemm.group_starts = starts.typed_data<int32_t>();
  gemm.group_sizes = sizes.typed_data<int32_t>();
  gemm.row_index = gathers ? row_to_token.typed_data<int32_t>() : nullptr;
  gemm.tile_counter = scratch->typed_data<int32_t>();
  gemm.x_rows = x.dimensions()[0];
  gemm.num_weights = static_cast<int>(experts);
  gemm.num_groups = static_cast<int>(groups);
  gemm.groups_per_batch = gemm.num_groups;
  gemm.rows_per_batch = static_cast<int>(rows);
  gemm.k = static_cast<int>(hidden);
  gemm.n = static_cast<int>(n);
  gemm.gated = gated;
  gemm.gate_up = static_cast<GateUp>(gate_up);
  gemm.activation = activation.params();
  gemm.pdl = OverlapsPrevious(rows, groups);
  TileConfig tile = config.config();
  tile.gather = gathers;
  if (const char* error = LaunchMoeGemm(gemm, tile, stream)) return InvalidArgument(kOp, error);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxmoe

XLA_FFI_DEFINE_HANDLER_SYMBOL(GateUpFfi,
                              jaxmoe::GateUpProduct,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Arg<xla::ffi::AnyBuffer>()  // row_to_token
                                  .Arg<xla::ffi::AnyBuffer>()  // w
                                  .Arg<xla::ffi::AnyBuffer>()  // bias
                                  .Arg<xla::ffi::AnyBuffer>()  // starts
                                  .Arg<xla::ffi::AnyBuffer>()  // sizes
                                  .Ret<xla::ffi::AnyBuffer>()  // h
                                  .Ret<xla::ffi::AnyBuffer>()  // z
                                  .Ret<xla::ffi::AnyBuffer>()  // scratch
                                  .Attr<int64_t>("weight_layout")
                                  .Attr<int64_t>("gate_up")
                                  .Attr<jaxmoe::ActivationAttrs>("activation")
                                  .Attr<jaxmoe::TileAttrs>("config"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
