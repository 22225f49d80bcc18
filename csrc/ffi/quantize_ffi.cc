// FFI handler jaxmoe_quantize_v1: FP8 values and the scales that give the numbers back.
#include "csrc/ffi/checks.h"
#include "csrc/kernels/quantize.h"

namespace jaxmoe {

struct QuantizeAttrs {
  int64_t shared;
  int64_t e8m0;
};

}  // namespace jaxmoe

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jaxmoe::QuantizeAttrs,
                                      ::xla::ffi::StructMember<int64_t>("shared"),
                                      ::xla::ffi::StructMember<int64_t>("e8m0"));

namespace jaxmoe {
namespace {

// Shape of the scales of x [B,R,C].
Shape ScalesOf(Shared format, int64_t b, int64_t r, int64_t c) {
  switch (format) {
    case Shared::kTensor:
      return {b};
    case Shared::kRow:
      return {b, r};
    case Shared::kGroup:
      return {b, r, CeilDiv(c, kQuantBlock)};
    default:
      return {b, CeilDiv(r, kQuantBlock), CeilDiv(c, kQuantBlock)};
  }
}

ffi::Error Quantize(cudaStream_t stream,
                    In x,
                    In static_scales,
                    Out values,
                    Out scales,
                    Out partial,
                    QuantizeAttrs attrs) {
  Operands take("quantize");
  Dim B, R, C, P;
  QuantizeParams params{};
  take.Range("shared", attrs.shared, 0, kNumOf<Shared> - 1);
  params.shared = static_cast<Shared>(attrs.shared);
  params.x = take.Any("x", x, {B, R, C}, kFloats);
  params.values = take.Any("values", *values, {B, R, C}, kFloat8s);
  const Shape shape = ScalesOf(params.shared, B, R, C);
  params.scales = take.Floats("scales", *scales, shape);
  params.static_scales = take.FloatsOrNull("static_scales", static_scales, shape);
  params.partial = take.Floats("partial", *partial, {P});
  params.dtype = TypeOf(x);
  params.batch = B;
  params.rows = R;
  params.cols = C;
  const bool e5m2 = TypeOf(*values) == DType::kFloat8E5M2;
  params.element = e5m2 ? ElementType::kE5M2 : ElementType::kE4M3;
  params.e8m0 = attrs.e8m0 != 0;
  const bool sums = params.shared == Shared::kTensor && params.static_scales == nullptr;
  take.Range("partial.shape[0]", P, sums ? B * kMaxQuantPartials : 0, kMaxInt);
  take.Range("rows of x", B * R, 0, kMaxInt);
  take.Range("bytes of a row modulo 16", C * ElementSize(params.dtype) % 16, 0, 0);
  if (take.failed()) return take.error();
  return take.Result(LaunchQuantize(params, stream));
}

const Registered<Quantize> registered("jaxmoe_quantize_v1");

}  // namespace
}  // namespace jaxmoe
