// FFI handler of the weight gradient: x^T dy of the rows of each group.
#include "csrc/ffi/counters.h"
#include "csrc/ffi/tgmm_checks.h"

namespace jaxmoe {
namespace {

constexpr auto& kOp = kTgmmOp;
constexpr int64_t kMaxInt = (int64_t{1} << 31) - 1;

ffi::Error Tgmm(cudaStream_t stream,
                ffi::AnyBuffer x,                // [B,T,K]
                ffi::AnyBuffer dy,               // [B,T,N]
                ffi::AnyBuffer starts,           // [B,G]
                ffi::AnyBuffer sizes,            // [B,G]
                ffi::Result<ffi::AnyBuffer> dw,  // [W,E,K,N]
                ffi::Result<ffi::AnyBuffer> scratch,
                int64_t cluster) {
  CountExecution(Target::kTgmm);
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "x", x, 3));
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "dy", dy, 3));
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "starts", starts, 2));
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "dw", *dw, 4));
  JAXMOE_RETURN_IF_ERROR(CheckTgmm(x, dy, starts, sizes, *dw, *scratch));
  const int64_t batch = x.dimensions()[0], rows = x.dimensions()[1], k = x.dimensions()[2];
  const int64_t n = dy.dimensions()[2], groups = starts.dimensions()[1];
  const int64_t weights = dw->dimensions()[0] * dw->dimensions()[1];
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "dy", dy, {batch, rows, n}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "starts", starts, {batch, groups}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "sizes", sizes, {batch, groups}));
  JAXMOE_RETURN_IF_ERROR(
      CheckShape(kOp, "dw", *dw, {dw->dimensions()[0], dw->dimensions()[1], k, n}));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "B*T", batch * rows, 0, kMaxInt));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "B*G", batch * groups, 0, kMaxInt));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "W*E", weights, 0, kMaxInt));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "K", k, 0, kMaxInt / 4));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "N", n, 0, kMaxInt / 4));

  TgmmProblem gemm;
  gemm.x = x.untyped_data();
  gemm.dy = dy.untyped_data();
  gemm.dw = dw->untyped_data();
  gemm.group_starts = starts.typed_data<int32_t>();
  gemm.group_sizes = sizes.typed_data<int32_t>();
  gemm.num_weights = static_cast<int>(weights);
  gemm.num_groups = static_cast<int>(batch * groups);
  gemm.groups_per_batch = static_cast<int>(groups);
  gemm.rows_per_batch = static_cast<int>(rows);
  gemm.k = static_cast<int>(k);
  gemm.n = static_cast<int>(n);
  return LaunchTgmmFfi(gemm, x, *dw, *scratch, cluster, stream);
}

}  // namespace
}  // namespace jaxmoe

XLA_FFI_DEFINE_HANDLER_SYMBOL(TgmmFfi,
                              jaxmoe::Tgmm,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Arg<xla::ffi::AnyBuffer>()  // dy
                                  .Arg<xla::ffi::AnyBuffer>()  // starts
                                  .Arg<xla::ffi::AnyBuffer>()  // sizes
                                  .Ret<xla::ffi::AnyBuffer>()  // dw
                                  .Ret<xla::ffi::AnyBuffer>()  // scratch
                                  .Attr<int64_t>("cluster"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
