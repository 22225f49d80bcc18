// FFI handler jaxmoe_dequantize_v1: packed weights as bf16 numbers.
#include "csrc/ffi/gemm_attrs.h"
#include "csrc/gemm/dequantize.h"

namespace jaxmoe {

struct DequantizeAttrs {
  int64_t format;
};

}  // namespace jaxmoe

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jaxmoe::DequantizeAttrs,
                                      ::xla::ffi::StructMember<int64_t>("format"));

namespace jaxmoe {
namespace {

ffi::Error Dequantize(cudaStream_t stream,
                      In values,  // [E, ..], see PackedShape
                      In scales,  // see WeightScales
                      Out out,    // [E,N,K]
                      DequantizeAttrs attrs) {
  Operands take("dequantize");
  Dim E, N, K;
  take.Range("format", attrs.format, 0, static_cast<int64_t>(std::size(kFormats)) - 1);
  if (take.failed()) return take.error();
  DequantizeParams params{};
  params.format = static_cast<WeightFormat>(attrs.format);
  if (!RowOf(params.format).is_packed()) take.Refuse("format must be a packed one.");
  params.out = take.Any("out", *out, {E, N, K}, ffi::DataType::BF16);
  if (take.failed()) return take.error();
  if (out->element_count() == 0) return ffi::Error::Success();
  const PackedLayout& layout = RowOf(params.format).packed;
  take.Range("N modulo 64", N % 64, 0, 0);
  take.Range("K modulo 64", K % 64, 0, 0);
  take.Range("K modulo the groups of a strip", K % layout.superblock_k(K), 0, 0);
  if (take.failed()) return take.error();
  const Shape stored = PackedShape(params.format, {E}, N, K);
  params.values = take.Any("values", values, stored, ffi::DataType::U8);
  params.scales = take.Floats("scales", scales, WeightScales(params.format, {E}, N, K));
  params.num_weights = E;
  params.n = N;
  params.k = K;
  if (take.failed()) return take.error();
  return take.Result(LaunchDequantize(params, stream));
}

const Registered<Dequantize> registered("jaxmoe_dequantize_v1");

}  // namespace
}  // namespace jaxmoe
