// FFI handler of a training step's first product: activated, and what the activation is of.
#include "csrc/ffi/counters.h"
#include "csrc/ffi/mlp_product.h"

namespace jaxmoe {
namespace {

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
  JAXMOE_RETURN_IF_ERROR(CheckRank(kMlpProduct, "x", x, 2));
  JAXMOE_RETURN_IF_ERROR(CheckRank(kMlpProduct, "h", *h, 2));
  const int64_t rows = h->dimensions()[0], intermediate = h->dimensions()[1];
  const bool gated = activation.gated != 0, gathers = !IsAbsent(row_to_token);
  const int64_t n = gated ? 2 * intermediate : intermediate;
  JAXMOE_RETURN_IF_ERROR(
      CheckProduct(x, w, starts, sizes, *scratch, rows, n, weight_layout, activation, gate_up));
  for (const ffi::AnyBuffer& like_x : {bias, *h, *z}) {
    JAXMOE_RETURN_IF_ERROR(CheckDtype(kMlpProduct, "operand", like_x, {x.element_type()}));
  }
  JAXMOE_RETURN_IF_ERROR(
      CheckDtype(kMlpProduct, "row_to_token", row_to_token, {ffi::DataType::S32}));
  JAXMOE_RETURN_IF_ERROR(CheckShapeOrAbsent(kMlpProduct, "row_to_token", row_to_token, {rows}));
  JAXMOE_RETURN_IF_ERROR(CheckShapeOrAbsent(kMlpProduct, "bias", bias, {w.dimensions()[0], n}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kMlpProduct, "z", *z, {rows, n}));
  if (!gathers) {
    JAXMOE_RETURN_IF_ERROR(CheckShape(kMlpProduct, "x", x, {rows, x.dimensions()[1]}));
  }
  if (z->element_count() == 0) return ffi::Error::Success();

  JAXMOE_RETURN_IF_ERROR(ZeroRest({*z, *h}, starts, sizes, *scratch, stream));
  MoeGemmProblem gemm = Product(x, w, starts, sizes, *scratch, rows, n, weight_layout, activation);
  gemm.bias = IsAbsent(bias) ? nullptr : bias.untyped_data();
  gemm.out = h->untyped_data();
  gemm.z = z->untyped_data();
  gemm.gated = gated;
  gemm.gate_up = static_cast<GateUp>(gate_up);
  gemm.row_index = gathers ? row_to_token.typed_data<int32_t>() : nullptr;
  gemm.pdl = OverlapsPrevious(rows, starts.dimensions()[0]);
  TileConfig tile = config.config();
  tile.gather = gathers;
  if (const char* error = LaunchMoeGemm(gemm, tile, stream)) {
    return InvalidArgument(kMlpProduct, error);
  }
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
