// FFI handler jaxmoe_permute_v1: token rows copied into expert order.
#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/ffi/checks.h"
#include "csrc/ffi/counters.h"
#include "csrc/kernels/permute.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmoe {
namespace {

ffi::Error Permute(cudaStream_t stream,
                   ffi::AnyBuffer x,                      // [T,H]
                   ffi::BufferR1<ffi::S32> row_to_token,  // [R]
                   ffi::Result<ffi::AnyBuffer> rows) {    // [R,H]
  CountExecution(Target::kPermute);
  constexpr const char* kOp = "permute";
  constexpr int64_t kMaxInt = 0x7fffffff;
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "x", x, 2));
  JAXMOE_RETURN_IF_ERROR(CheckFloatDtype(kOp, "x", x));
  int64_t num_tokens = x.dimensions()[0];
  int64_t hidden = x.dimensions()[1];
  int64_t num_rows = row_to_token.dimensions()[0];
  JAXMOE_RETURN_IF_ERROR(CheckShape(kOp, "rows", *rows, {num_rows, hidden}));
  JAXMOE_RETURN_IF_ERROR(CheckDtype(kOp, "rows", *rows, {x.element_type()}));
  int64_t row_bytes = hidden * ElementSize(ToDType(x.element_type()));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "x.shape[0]", num_tokens, 0, kMaxInt));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "row_to_token.shape[0]", num_rows, 0, kMaxInt));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "bytes of a row", row_bytes, 0, kMaxInt));

  PermuteParams params{};
  params.x = x.untyped_data();
  params.row_to_token = row_to_token.typed_data();
  params.rows = rows->untyped_data();
  params.num_tokens = num_tokens;
  params.num_rows = num_rows;
  params.row_bytes = row_bytes;
  return CudaStatus(kOp, LaunchPermute(params, stream));
}

}  // namespace
}  // namespace jaxmoe

XLA_FFI_DEFINE_HANDLER_SYMBOL(PermuteFfi,
                              jaxmoe::Permute,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::S32>>()
                                  .Ret<xla::ffi::AnyBuffer>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
