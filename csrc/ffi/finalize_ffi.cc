// FFI handler jaxmoe_finalize_v1: the weighted sum of each token's expert rows.
#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/ffi/checks.h"
#include "csrc/ffi/counters.h"
#include "csrc/kernels/finalize.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmoe {
namespace {

ffi::Error Finalize(cudaStream_t stream,
                    ffi::AnyBuffer rows,                  // [R,H]
                    ffi::BufferR2<ffi::S32> slot_to_row,  // [T,K]
                    ffi::BufferR2<ffi::F32> weights,      // [T,K]
                    ffi::AnyBuffer residual,              // [T,H] or no elements
                    ffi::Result<ffi::AnyBuffer> y) {      // [T,H]
  CountExecution(Target::kFinalize);
  constexpr const char* kOp = "finalize";
  constexpr int64_t kMaxInt = 0x7fffffff;
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "rows", rows, 2));
  JAXMOE_RETURN_IF_ERROR(CheckFloatDtype(kOp, "rows", rows));
  int64_t num_rows = rows.dimensions()[0];
  int64_t hidden = rows.dimensions()[1];
  int64_t num_tokens = slot_to_row.dimensions()[0];
  int64_t top_k = slot_to_row.dimensions()[1];
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "weights", weights, {num_tokens, top_k}));
  JAXMOE_RETURN_IF_ERROR(CheckShapeOrAbsent(kOp, "residual", residual, {num_tokens, hidden}));
  JAXMOE_RETURN_IF_ERROR(CheckDtype(kOp, "residual", residual, {rows.element_type()}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "y", *y, {num_tokens, hidden}));
  JAXMOE_RETURN_IF_ERROR(CheckDtype(kOp, "y", *y, {rows.element_type()}));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "rows.shape[0]", num_rows, 0, kMaxInt));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "rows.shape[1]", hidden, 0, kMaxInt));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "slot_to_row.shape[1]", top_k, 0, kMaxInt));

  FinalizeParams params{};
  params.rows = rows.untyped_data();
  params.slot_to_row = slot_to_row.typed_data();
  params.weights = weights.typed_data();
  params.residual = IsAbsent(residual) ? nullptr : residual.untyped_data();
  params.y = y->untyped_data();
  params.dtype = ToDType(rows.element_type());
  params.num_tokens = num_tokens;
  params.top_k = top_k;
  params.num_rows = num_rows;
  params.hidden = hidden;
  return CudaStatus(kOp, LaunchFinalize(params, stream));
}

}  // namespace
}  // namespace jaxmoe

XLA_FFI_DEFINE_HANDLER_SYMBOL(FinalizeFfi,
                              jaxmoe::Finalize,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::S32>>()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
