// FFI handler of the weight gradient of gathered rows, added to what there is.
#include "csrc/ffi/counters.h"
#include "csrc/ffi/tgmm_checks.h"

namespace jaxmoe {
namespace {

constexpr auto& kOp = kTgmmOp;
constexpr int64_t kMaxInt = (int64_t{1} << 31) - 1;

ffi::Error TgmmRows(cudaStream_t stream,
                    ffi::AnyBuffer x,                // [T,K], or [X,K] if it is gathered
                    ffi::AnyBuffer dy,               // [T,N], or [Y,N]
                    ffi::AnyBuffer starts,           // [E]
                    ffi::AnyBuffer sizes,            // [E]
                    ffi::AnyBuffer row_index,        // [T], absent if nothing is gathered
                    ffi::AnyBuffer init,             // [E,K,N] or absent; the memory of dw
                    ffi::Result<ffi::AnyBuffer> dw,  // [E,K,N]
                    ffi::Result<ffi::AnyBuffer> scratch,
                    int64_t gathered,
                    int64_t cluster) {
  CountExecution(Target::kTgmmRows);
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "x", x, 2));
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "dy", dy, 2));
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "row_index", row_index, 1));
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "dw", *dw, 3));
  JAXMOE_RETURN_IF_ERROR(CheckTgmm(x, dy, starts, sizes, *dw, *scratch));
  JAXMOE_RETURN_IF_ERROR(CheckDtype(kOp, "row_index", row_index, {ffi::DataType::S32}));
  JAXMOE_RETURN_IF_ERROR(CheckDtype(kOp, "init", init, {dw->element_type()}));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "gathered", gathered, 0, 2));
  const auto operand = static_cast<GatheredOperand>(gathered);
  const ffi::AnyBuffer& in_order = operand == GatheredOperand::kX ? dy : x;
  const ffi::AnyBuffer& other = operand == GatheredOperand::kX ? x : dy;
  const int64_t rows = in_order.dimensions()[0], weights = dw->dimensions()[0];
  const int64_t k = x.dimensions()[1], n = dy.dimensions()[1];
  const int64_t indices = operand == GatheredOperand::kNone ? 0 : rows;
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "row_index", row_index, {indices}));
  if (operand == GatheredOperand::kNone) {
    JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "dy", dy, {rows, n}));
  }
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "starts", starts, {weights}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "sizes", sizes, {weights}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "dw", *dw, {weights, k, n}));
  JAXMOE_RETURN_IF_ERROR(CheckShapeOrAbsent(kOp, "init", init, {weights, k, n}));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "T", rows, 0, kMaxInt));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "E", weights, 0, kMaxInt));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "K", k, 0, kMaxInt / 4));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "N", n, 0, kMaxInt / 4));

  TgmmProblem gemm;
  gemm.x = x.untyped_data();
  gemm.dy = dy.untyped_data();
  gemm.dw = dw->untyped_data();
  gemm.accumulate = !IsAbsent(init);
  if (gemm.accumulate && init.untyped_data() != gemm.dw) {
    return InvalidArgument(kOp, "init must be the memory of dw");
  }
  gemm.group_starts = starts.typed_data<int32_t>();
  gemm.group_sizes = sizes.typed_data<int32_t>();
  gemm.gathered = operand;
  gemm.row_index = row_index.typed_data<int32_t>();
  gemm.gathered_rows = other.dimensions()[0];
  gemm.num_weights = static_cast<int>(weights);
  gemm.num_groups = static_cast<int>(weights);
  gemm.groups_per_batch = static_cast<int>(weights);
  gemm.rows_per_batch = static_cast<int>(rows);
  gemm.k = static_cast<int>(k);
  gemm.n = static_cast<int>(n);
  return LaunchTgmmFfi(gemm, x, *dw, *scratch, cluster, stream);
}

}  // namespace
}  // namespace jaxmoe

XLA_FFI_DEFINE_HANDLER_SYMBOL(TgmmRowsFfi,
                              jaxmoe::TgmmRows,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Arg<xla::ffi::AnyBuffer>()  // dy
                                  .Arg<xla::ffi::AnyBuffer>()  // starts
                                  .Arg<xla::ffi::AnyBuffer>()  // sizes
                                  .Arg<xla::ffi::AnyBuffer>()  // row_index
                                  .Arg<xla::ffi::AnyBuffer>()  // init
                                  .Ret<xla::ffi::AnyBuffer>()  // dw
                                  .Ret<xla::ffi::AnyBuffer>()  // scratch
                                  .Attr<int64_t>("gathered")
                                  .Attr<int64_t>("cluster"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
