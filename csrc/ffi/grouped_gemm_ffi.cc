// FFI handler of grouped_gemm: zero the rows of no group, multiply the others.
#include "csrc/ffi/checks.h"
#include "csrc/ffi/counters.h"
#include "csrc/ffi/gemm_attrs.h"
#include "csrc/kernels/zero_rows.h"

namespace jaxmoe {
namespace {

constexpr char kOp[] = "grouped_gemm";

// int32 scratch: the tile counter. gmm_scratch_size in jaxmoe/_heuristics.py.
constexpr int64_t kScratchInts = 4;

ffi::Error GroupedGemm(cudaStream_t stream,
                       ffi::AnyBuffer lhs,               // [B,T,K]
                       ffi::AnyBuffer rhs,               // [W,E,K,N] or [W,E,N,K]
                       ffi::AnyBuffer starts,            // [B,G]
                       ffi::AnyBuffer sizes,             // [B,G]
                       ffi::AnyBuffer bias,              // [W,E,N] or absent
                       ffi::Result<ffi::AnyBuffer> out,  // [B,T,N]
                       ffi::Result<ffi::AnyBuffer> scratch,
                       int64_t weight_layout,
                       TileAttrs config) {
  CountExecution(Target::kGmm);
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "lhs", lhs, 3));
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "rhs", rhs, 4));
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "out", *out, 3));
  const int64_t batch = lhs.dimensions()[0];
  const int64_t rows = lhs.dimensions()[1];
  const int64_t k = lhs.dimensions()[2];
  const int64_t n = out->dimensions()[2];
  const int64_t weights = rhs.dimensions()[0];
  const int64_t experts = rhs.dimensions()[1];
  const auto layout = static_cast<WeightLayout>(weight_layout);
  const bool kn = layout == WeightLayout::kKN;
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "weight_layout", weight_layout, 0, 1));
  JAXMOE_RETURN_IF_ERROR(CheckDtype(kOp, "lhs", lhs, {ffi::DataType::BF16, ffi::DataType::F16}));
  JAXMOE_RETURN_IF_ERROR(CheckDtype(kOp, "rhs", rhs, {lhs.element_type()}));
  JAXMOE_RETURN_IF_ERROR(CheckDtype(kOp, "bias", bias, {lhs.element_type()}));
  JAXMOE_RETURN_IF_ERROR(CheckDtype(kOp, "out", *out, {lhs.element_type(), ffi::DataType::F32}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "rhs", rhs, {weights, experts, kn ? k : n, kn ? n : k}));
  for (const ffi::AnyBuffer& integers : {starts, sizes, *scratch}) {
    JAXMOE_RETURN_IF_ERROR(CheckDtype(kOp, "index operand", integers, {ffi::DataType::S32}));
  }
  // Group g of batch b multiplies weight (b * G + g) mod (W * E).
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "starts", starts, 2));
  const int64_t groups = starts.dimensions()[1];
  if (weights * experts == 0) return InvalidArgument(kOp, "rhs must hold at least one expert");
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "starts", starts, {batch, groups}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "sizes", sizes, {batch, groups}));
  JAXMOE_RETURN_IF_ERROR(CheckShapeOrAbsent(kOp, "bias", bias, {weights, experts, n}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "out", *out, {batch, rows, n}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "scratch", *scratch, {kScratchInts}));
  constexpr int64_t kMaxInt = (int64_t{1} << 31) - 1;
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "B*T", batch * rows, 0, kMaxInt));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "B*G", batch * groups, 0, kMaxInt));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "K", k, 0, kMaxInt / 4));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "N", n, 0, kMaxInt / 4));
  if (out->element_count() == 0) return ffi::Error::Success();

  const bool out_f32 = out->element_type() == ffi::DataType::F32;
  ZeroRowsParams zero{};
  zero.out = out->untyped_data();
  zero.starts = starts.typed_data<int32_t>();
  zero.sizes = sizes.typed_data<int32_t>();
  zero.batch = batch;
  zero.num_rows = rows;
  zero.row_bytes = n * (out_f32 ? 4 : 2);
  zero.num_groups = groups;
  zero.zero_counters = scratch->typed_data<int32_t>();
  zero.num_zero_counters = kScratchInts;
  JAXMOE_RETURN_IF_ERROR(CudaStatus(kOp, LaunchZeroRows(zero, stream)));

  MoeGemmProblem gemm;
  gemm.dtype = ToDType(lhs.element_type());
  gemm.layout = layout;
  gemm.x = lhs.untyped_data();
  gemm.w = rhs.untyped_data();
  gemm.bias = IsAbsent(bias) ? nullptr : bias.untyped_data();
  gemm.out = out->untyped_data();
  gemm.group_starts = starts.typed_data<int32_t>();
  gemm.group_sizes = sizes.typed_data<int32_t>();
  gemm.tile_counter = scratch->typed_data<int32_t>();
  gemm.x_rows = batch * rows;
  gemm.num_weights = static_cast<int>(weights * experts);
  gemm.num_groups = static_cast<int>(batch * groups);
  gemm.groups_per_batch = static_cast<int>(groups);
  gemm.rows_per_batch = static_cast<int>(rows);
  gemm.k = static_cast<int>(k);
  gemm.n = static_cast<int>(n);
  gemm.out_f32 = out_f32;
  gemm.pdl = OverlapsPrevious(rows, groups);
  TileConfig tile = config.config();
  tile.gather = false;  // the rows are there already
  if (const char* error = LaunchMoeGemm(gemm, tile, stream)) {
    return InvalidArgument(kOp, error);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxmoe

XLA_FFI_DEFINE_HANDLER_SYMBOL(GroupedGemmFfi,
                              jaxmoe::GroupedGemm,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()  // lhs
                                  .Arg<xla::ffi::AnyBuffer>()  // rhs
                                  .Arg<xla::ffi::AnyBuffer>()  // starts
                                  .Arg<xla::ffi::AnyBuffer>()  // sizes
                                  .Arg<xla::ffi::AnyBuffer>()  // bias
                                  .Ret<xla::ffi::AnyBuffer>()  // out
                                  .Ret<xla::ffi::AnyBuffer>()  // scratch
                                  .Attr<int64_t>("weight_layout")
                                  .Attr<jaxmoe::TileAttrs>("config"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
