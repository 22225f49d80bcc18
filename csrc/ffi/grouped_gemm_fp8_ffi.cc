// FFI handler of grouped_gemm with FP8 operands: zero the rows of no group, multiply the others.
#include "csrc/ffi/counters.h"
#include "csrc/ffi/fp8_checks.h"
#include "csrc/ffi/gemm_attrs.h"
#include "csrc/kernels/zero_rows.h"

namespace jaxmoe {
namespace {

constexpr char kOp[] = "grouped_gemm";

// int32 scratch: the tile counter. gmm_scratch_size in jaxmoe/_heuristics.py.
constexpr int64_t kScratchInts = 4;

ffi::Error GroupedGemmFp8(cudaStream_t stream,
                          ffi::AnyBuffer lhs,  // [R,K]
                          Floats lhs_scales,
                          ffi::AnyBuffer rhs,  // [E,N,K]
                          Floats rhs_scales,
                          ffi::AnyBuffer starts,            // [E]
                          ffi::AnyBuffer sizes,             // [E]
                          ffi::AnyBuffer bias,              // [E,N] or absent
                          ffi::Result<ffi::AnyBuffer> out,  // [R,N]
                          ffi::Result<ffi::AnyBuffer> scratch,
                          int64_t format,
                          int64_t promoted,
                          TileAttrs config) {
  CountExecution(Target::kGmmFp8);
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "lhs", lhs, 2));
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "rhs", rhs, 3));
  const int64_t rows = lhs.dimensions()[0];
  const int64_t k = lhs.dimensions()[1];
  const int64_t experts = rhs.dimensions()[0];
  const int64_t n = rhs.dimensions()[1];
  const bool out_f32 = out->element_type() == ffi::DataType::F32;
  const ffi::DataType dtype = out_f32 ? bias.element_type() : out->element_type();
  JAXMOE_RETURN_IF_ERROR(CheckDtype(kOp, "lhs", lhs, {ffi::DataType::F8E4M3FN}));
  JAXMOE_RETURN_IF_ERROR(
      CheckDtype(kOp, "rhs", rhs, {ffi::DataType::F8E4M3FN, ffi::DataType::F8E5M2}));
  JAXMOE_RETURN_IF_ERROR(CheckDtype(kOp, "bias", bias, {ffi::DataType::BF16, ffi::DataType::F16}));
  JAXMOE_RETURN_IF_ERROR(CheckDtype(kOp, "out", *out, {bias.element_type(), ffi::DataType::F32}));
  for (const ffi::AnyBuffer& integers : {starts, sizes, *scratch}) {
    JAXMOE_RETURN_IF_ERROR(CheckDtype(kOp, "index operand", integers, {ffi::DataType::S32}));
  }
  constexpr int64_t kMaxInt = (int64_t{1} << 31) - 1;
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "format", format, 0, 2));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "R", rows, 0, kMaxInt));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "E", experts, 1, kMaxInt));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "K", k, 0, kMaxInt / 4));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "N", n, 0, kMaxInt / 4));
  const auto scaling = static_cast<ScaleFormat>(format);
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "rhs", rhs, {experts, n, k}));
  JAXMOE_RETURN_IF_ERROR(CheckScales(kOp, "lhs.scales", lhs_scales, scaling, 0, rows, k));
  JAXMOE_RETURN_IF_ERROR(CheckScales(kOp, "rhs.scales", rhs_scales, scaling, experts, n, k));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "starts", starts, {experts}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "sizes", sizes, {experts}));
  JAXMOE_RETURN_IF_ERROR(CheckShapeOrAbsent(kOp, "bias", bias, {experts, n}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "out", *out, {rows, n}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "scratch", *scratch, {kScratchInts}));
  if (out->element_count() == 0) return ffi::Error::Success();

  ZeroRowsParams zero{};
  zero.out = out->untyped_data();
  zero.starts = starts.typed_data<int32_t>();
  zero.sizes = sizes.typed_data<int32_t>();
  zero.batch = 1;
  zero.num_rows = rows;
  zero.row_bytes = n * (out_f32 ? 4 : 2);
  zero.num_groups = experts;
  zero.zero_counters = scratch->typed_data<int32_t>();
  zero.num_zero_counters = kScratchInts;
  JAXMOE_RETURN_IF_ERROR(CudaStatus(kOp, LaunchZeroRows(zero, stream)));

  MoeGemmProblem gemm;
  gemm.dtype = ToDType(rhs.element_type());
  gemm.out_dtype = ToDType(dtype);
  gemm.layout = WeightLayout::kNK;
  gemm.x = lhs.untyped_data();
  gemm.w = rhs.untyped_data();
  gemm.bias = IsAbsent(bias) ? nullptr : bias.untyped_data();
  gemm.out = out->untyped_data();
  gemm.group_starts = starts.typed_data<int32_t>();
  gemm.group_sizes = sizes.typed_data<int32_t>();
  gemm.tile_counter = scratch->typed_data<int32_t>();
  gemm.x_rows = rows;
  gemm.num_weights = static_cast<int>(experts);
  gemm.num_groups = static_cast<int>(experts);
  gemm.groups_per_batch = static_cast<int>(experts);
  gemm.rows_per_batch = static_cast<int>(rows);
  gemm.k = static_cast<int>(k);
  gemm.n = static_cast<int>(n);
  gemm.out_f32 = out_f32;
  gemm.scales.format = scaling;
  gemm.scales.promoted = promoted != 0;
  gemm.scales.w = rhs_scales.typed_data();
  gemm.scales.x = lhs_scales.typed_data();
  gemm.pdl = OverlapsPrevious(rows, experts);
  TileConfig tile = config.config();
  tile.gather = false;  // the rows are there already
  if (const char* error = LaunchMoeGemm(gemm, tile, stream)) return InvalidArgument(kOp, error);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxmoe

XLA_FFI_DEFINE_HANDLER_SYMBOL(GroupedGemmFp8Ffi,
                              jaxmoe::GroupedGemmFp8,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()  // lhs
                                  .Arg<jaxmoe::Floats>()       // lhs_scales
                                  .Arg<xla::ffi::AnyBuffer>()  // rhs
                                  .Arg<jaxmoe::Floats>()       // rhs_scales
                                  .Arg<xla::ffi::AnyBuffer>()  // starts
                                  .Arg<xla::ffi::AnyBuffer>()  // sizes
                                  .Arg<xla::ffi::AnyBuffer>()  // bias
                                  .Ret<xla::ffi::AnyBuffer>()  // out
                                  .Ret<xla::ffi::AnyBuffer>()  // scratch
                                  .Attr<int64_t>("format")
                                  .Attr<int64_t>("promoted")
                                  .Attr<jaxmoe::TileAttrs>("config"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
