// FFI handler of the down product's cotangent: dy W^T, taken through the activation.
#include "csrc/ffi/counters.h"
#include "csrc/ffi/mlp_product.h"

namespace jaxmoe {
namespace {

ffi::Error DownDgrad(cudaStream_t stream,
                     ffi::AnyBuffer dy,               // [R,H]
                     ffi::AnyBuffer w,                // [E,H,I] or [E,I,H]: I rows are summed to
                     ffi::AnyBuffer z,                // [R,N]
                     ffi::AnyBuffer weights,          // [R]
                     ffi::AnyBuffer starts,           // [G]
                     ffi::AnyBuffer sizes,            // [G]
                     ffi::Result<ffi::AnyBuffer> dz,  // [R,N]
                     ffi::Result<ffi::AnyBuffer> weighted,  // [R,I]
                     ffi::Result<ffi::AnyBuffer> products,  // [R,ceil(I / 128)]
                     ffi::Result<ffi::AnyBuffer> scratch,
                     int64_t weight_layout,
                     int64_t gate_up,
                     ActivationAttrs activation,
                     TileAttrs config) {
  CountExecution(Target::kDownDgrad);
  JAXMOE_RETURN_IF_ERROR(CheckRank(kMlpProduct, "dy", dy, 2));
  JAXMOE_RETURN_IF_ERROR(CheckRank(kMlpProduct, "weighted", *weighted, 2));
  const int64_t rows = dy.dimensions()[0], n = weighted->dimensions()[1];
  const int64_t width = activation.gated != 0 ? 2 * n : n;
  JAXMOE_RETURN_IF_ERROR(
      CheckProduct(dy, w, starts, sizes, *scratch, rows, n, weight_layout, activation, gate_up));
  for (const ffi::AnyBuffer& like_dy : {z, *dz, *weighted}) {
    JAXMOE_RETURN_IF_ERROR(CheckDtype(kMlpProduct, "operand", like_dy, {dy.element_type()}));
  }
  JAXMOE_RETURN_IF_ERROR(CheckDtype(kMlpProduct, "weights", weights, {ffi::DataType::F32}));
  JAXMOE_RETURN_IF_ERROR(CheckDtype(kMlpProduct, "products", *products, {ffi::DataType::F32}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kMlpProduct, "z", z, {rows, width}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kMlpProduct, "weights", weights, {rows}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kMlpProduct, "dz", *dz, {rows, width}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kMlpProduct, "weighted", *weighted, {rows, n}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kMlpProduct, "products", *products, {rows, CeilDiv(n, 128)}));
  if (dz->element_count() == 0) return ffi::Error::Success();

  JAXMOE_RETURN_IF_ERROR(ZeroRest({*dz, *weighted, *products}, starts, sizes, *scratch, stream));
  ActivationGradient gradient;
  gradient.z = z.untyped_data();
  gradient.weights = weights.typed_data<float>();
  gradient.weighted = weighted->untyped_data();
  gradient.products = products->typed_data<float>();
  gradient.gated = activation.gated != 0;
  gradient.gate_up = static_cast<GateUp>(gate_up);
  MoeGemmProblem gemm = Product(dy, w, starts, sizes, *scratch, rows, n, weight_layout, activation);
  gemm.out = dz->untyped_data();
  gemm.gradient = &gradient;
  gemm.pdl = OverlapsPrevious(rows, starts.dimensions()[0]);
  TileConfig tile = config.config();
  tile.gather = false;  // the rows are there already
  if (const char* error = LaunchMoeGemm(gemm, tile, stream)) {
    return InvalidArgument(kMlpProduct, error);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxmoe

XLA_FFI_DEFINE_HANDLER_SYMBOL(DownDgradFfi,
                              jaxmoe::DownDgrad,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()  // dy
                                  .Arg<xla::ffi::AnyBuffer>()  // w
                                  .Arg<xla::ffi::AnyBuffer>()  // z
                                  .Arg<xla::ffi::AnyBuffer>()  // weights
                                  .Arg<xla::ffi::AnyBuffer>()  // starts
                                  .Arg<xla::ffi::AnyBuffer>()  // sizes
                                  .Ret<xla::ffi::AnyBuffer>()  // dz
                                  .Ret<xla::ffi::AnyBuffer>()  // weighted
                                  .Ret<xla::ffi::AnyBuffer>()  // products
                                  .Ret<xla::ffi::AnyBuffer>()  // scratch
                                  .Attr<int64_t>("weight_layout")
                                  .Attr<int64_t>("gate_up")
                                  .Attr<jaxmoe::ActivationAttrs>("activation")
                                  .Attr<jaxmoe::TileAttrs>("config"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
