// FFI handler jaxmoe_quantize_v1: FP8 values and the scales that give the numbers back.
#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/ffi/checks.h"
#include "csrc/ffi/counters.h"
#include "csrc/kernels/quantize.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmoe {
namespace {

// `scales` has the shape that x [batch, rows, cols] and the format ask for.
template <typename Buffer>
ffi::Error CheckScales(const char* arg, const Buffer& scales, const QuantizeParams& p) {
  constexpr const char* kOp = "quantize";
  int64_t col_blocks = CeilDiv(p.cols, kQuantBlock);
  switch (p.format) {
    case QuantFormat::kTensor:
      return CheckShape(kOp, arg, scales, {p.batch});
    case QuantFormat::kRow:
      return CheckShape(kOp, arg, scales, {p.batch, p.rows});
    case QuantFormat::kGroup:
      return CheckShape(kOp, arg, scales, {p.batch, p.rows, col_blocks});
    case QuantFormat::kBlock:
      return CheckShape(kOp, arg, scales, {p.batch, CeilDiv(p.rows, kQuantBlock), col_blocks});
  }
  return ffi::Error::Internal("unreachable: `shared` has been checked");
}

ffi::Error Quantize(cudaStream_t stream,
                    ffi::AnyBuffer x,                           // [B,R,C]
                    ffi::Buffer<ffi::F32> static_scales,        // shape of scales, or [0]
                    ffi::Result<ffi::AnyBuffer> values,         // [B,R,C]
                    ffi::Result<ffi::Buffer<ffi::F32>> scales,  // see QuantizeParams
                    ffi::ResultBufferR1<ffi::F32> partial,      // [B * kMaxQuantPartials] or [0]
                    int64_t shared,
                    int64_t e8m0) {
  CountExecution(Target::kQuantize);
  constexpr const char* kOp = "quantize";
  constexpr int64_t kMaxInt = 0x7fffffff;
  JAXMOE_RETURN_IF_ERROR(CheckRank(kOp, "x", x, 3));
  JAXMOE_RETURN_IF_ERROR(CheckFloatDtype(kOp, "x", x));
  JAXMOE_RETURN_IF_ERROR(
      CheckDtype(kOp, "values", *values, {ffi::DataType::F8E4M3FN, ffi::DataType::F8E5M2}));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "shared", shared, 0, 3));
  QuantizeParams params{};
  params.x = x.untyped_data();
  params.dtype = ToDType(x.element_type());
  params.batch = x.dimensions()[0];
  params.rows = x.dimensions()[1];
  params.cols = x.dimensions()[2];
  params.format = static_cast<QuantFormat>(shared);
  params.element =
      values->element_type() == ffi::DataType::F8E5M2 ? ElementType::kE5M2 : ElementType::kE4M3;
  params.e8m0 = e8m0 != 0;
  params.values = values->untyped_data();
  params.scales = scales->typed_data();
  params.static_scales = IsAbsent(static_scales) ? nullptr : static_scales.typed_data();
  params.partial = partial->typed_data();

  JAXMOE_RETURN_IF_ERROR(
      CheckShape(kOp, "values", *values, {params.batch, params.rows, params.cols}));
  JAXMOE_RETURN_IF_ERROR(CheckScales("scales", *scales, params));
  if (params.static_scales != nullptr) {
    JAXMOE_RETURN_IF_ERROR(CheckScales("static_scales", static_scales, params));
  }
  bool dynamic_tensor = params.format == QuantFormat::kTensor && params.static_scales == nullptr;
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp,
                                    "partial.shape[0]",
                                    partial->dimensions()[0],
                                    dynamic_tensor ? params.batch * kMaxQuantPartials : 0,
                                    INT64_MAX));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "rows of x", params.batch * params.rows, 0, kMaxInt));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "x.shape[2]", params.cols, 0, kMaxInt));
  int64_t row_bytes = params.cols * ElementSize(params.dtype);
  JAXMOE_RETURN_IF_ERROR(CheckRange(kOp, "bytes of a row modulo 16", row_bytes % 16, 0, 0));
  return CudaStatus(kOp, LaunchQuantize(params, stream));
}

}  // namespace
}  // namespace jaxmoe

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizeFfi,
                              jaxmoe::Quantize,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::BufferR1<xla::ffi::F32>>()
                                  .Attr<int64_t>("shared")
                                  .Attr<int64_t>("e8m0"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
