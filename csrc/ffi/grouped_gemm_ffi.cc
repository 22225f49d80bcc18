// FFI handler of grouped products: zero the rows of no group, multiply and activate the others.
#include "csrc/ffi/gemm_attrs.h"
#include "csrc/kernels/zero_rows.h"

namespace jaxmoe {

struct GroupedGemmAttrs {
  int64_t layout;
  int64_t format;
  int64_t promoted;
  int64_t gate_up;
  ActivationAttrs activation;
  TileAttrs config;
};

}  // namespace jaxmoe

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jaxmoe::GroupedGemmAttrs,
    ::xla::ffi::StructMember<int64_t>("layout"),
    ::xla::ffi::StructMember<int64_t>("format"),
    ::xla::ffi::StructMember<int64_t>("promoted"),
    ::xla::ffi::StructMember<int64_t>("gate_up"),
    ::xla::ffi::StructMember<::jaxmoe::ActivationAttrs>("activation"),
    ::xla::ffi::StructMember<::jaxmoe::TileAttrs>("config"));

namespace jaxmoe {
namespace {

// B examples of R rows, which without row_index are the T rows of x; W arrays of E weights each.
// Group g of example b multiplies weight (b * G + g) mod (W * E). B and W may be left out. O
// outputs a row: N weight rows, or N / 2 when gated.
ffi::Error GroupedGemm(cudaStream_t stream,
                       In x,          // [B,T,K]
                       In x_scales,   // see TokenScales; absent if not quantized
                       In row_index,  // [B,R] rows of x, or absent; only with B = 1, without scales
                       In w,          // [W,E,K,N] or [W,E,N,K]
                       In w_scales,   // see WeightScales
                       In bias,       // [W,E,N] or absent
                       In starts,     // [B,G]
                       In sizes,      // [B,G]
                       Out out,       // [B,R,O]
                       Out z,         // [B,R,N] sums before the activation, or absent
                       Out scratch,   // [kGemmScratchInts]
                       GroupedGemmAttrs attrs) {
  Operands take("grouped_gemm");
  Dim B = Dim::Batch(), W = Dim::Batch();
  Dim T, R, K, E, G, O;
  CheckEnums(attrs.format, attrs.gate_up, attrs.activation, &take);
  const auto format = static_cast<WeightFormat>(attrs.format);
  CheckLayout("layout", attrs.layout, format, &take);
  const bool plain = !RowOf(format).scaled, packed = RowOf(format).is_packed();
  const bool kn = attrs.layout == static_cast<int64_t>(WeightLayout::kKN);
  const bool gated = attrs.activation.gated != 0, gathers = !take.IsAbsent(row_index);
  const Types tokens = !plain ? ffi::DataType::F8E4M3FN : packed ? kHalfs : kFloats;
  const Types narrow = plain ? Like(x) : Like(bias);  // bias has it, absent or not
  const bool out_f32 = out->element_type() == ffi::DataType::F32;

  MoeGemmProblem gemm;
  gemm.x = take.Any("x", x, {B, gathers ? T : R, K}, tokens);
  gemm.row_index = take.IntsOrNull("row_index", row_index, {B, R});
  gemm.out = take.Any("out", *out, {B, R, O}, gated ? narrow : narrow.Or(ffi::DataType::F32));
  const int64_t N = gated ? 2 * O : O;
  if (packed) take.Range("K", K, 1, kMaxColumns);
  if (take.failed()) return take.error();
  const Shape stored = packed ? PackedShape(format, {W, E}, N, K)
                       : kn   ? Shape{W, E, K, N}
                              : Shape{W, E, N, K};
  gemm.w = take.Any("w", w, stored, WeightTypes(format, Like(x)));
  gemm.packed = RowOf(format).packed;
  gemm.bias = take.AnyOrNull("bias", bias, {W, E, N}, narrow);
  gemm.z = take.AnyOrNull("z", *z, {B, R, N}, narrow);
  if (!plain) {
    // The kernel takes scales of gathered rows by indices that it does not check.
    if (gathers) take.Refuse("row_index is for weights without scales.");
    take.Type("bias", bias, kHalfs);
    gemm.scales.x = take.Floats("x_scales", x_scales, TokenScales(format, {B}, R, K));
  }
  if (!RowOf(format).is_plain()) {
    gemm.scales.w = take.Floats("w_scales", w_scales, WeightScales(format, {W, E}, N, K));
  }
  gemm.group_starts = take.Ints("starts", starts, {B, G});
  gemm.group_sizes = take.Ints("sizes", sizes, {B, G});
  gemm.tile_counter = take.Ints("scratch", *scratch, {kGemmScratchInts});
  gemm.x_rows = B * (gathers ? T : R);
  take.Range("rows of x", gemm.x_rows, 0, kMaxInt);
  take.Range("rows of out", B * R, 0, kMaxInt);
  take.Range("groups", B * G, 0, kMaxInt);
  take.Range("weights", W * E, 1, kMaxInt);
  take.Range("K", K, 0, kMaxColumns);
  take.Range("N", N, 0, kMaxColumns);
  // One list of indices, or one scale, is for one example.
  const bool one_scale = !plain && RowOf(format).tokens == Shared::kTensor;
  if (gathers || one_scale) take.Range("examples", B, 1, 1);
  if (take.failed()) return take.error();
  if (out->element_count() == 0) return ffi::Error::Success();

  ZeroRowsParams zero{};
  zero.out = gemm.out;
  zero.row_bytes = O * (out_f32 ? 4 : 2);
  zero.other = {gemm.z, gemm.z == nullptr ? 0 : 2 * N};
  zero.starts = gemm.group_starts;
  zero.sizes = gemm.group_sizes;
  zero.batch = B;
  zero.num_rows = R;
  zero.num_groups = G;
  zero.zero_counters = gemm.tile_counter;
  zero.num_zero_counters = kGemmScratchInts;
  if (cudaError_t status = LaunchZeroRows(zero, stream)) return take.Result(status);

  gemm.dtype = TypeOf(packed ? x : w);
  gemm.out_dtype = TypeOf(plain ? x : bias);
  gemm.layout = static_cast<WeightLayout>(attrs.layout);
  gemm.num_weights = static_cast<int>(W * E);
  gemm.num_groups = static_cast<int>(B * G);
  gemm.groups_per_batch = static_cast<int>(G);
  gemm.rows_per_batch = static_cast<int>(R);
  gemm.k = static_cast<int>(K);
  gemm.n = static_cast<int>(N);
  gemm.gated = gated;
  gemm.gate_up = static_cast<GateUp>(attrs.gate_up);
  gemm.out_f32 = out_f32;
  gemm.activation = attrs.activation.params();
  gemm.scales.shared = RowOf(format).weights;
  gemm.scales.promoted = attrs.promoted != 0;
  gemm.pdl = OverlapsPrevious(R, G);
  TileConfig tile = attrs.config.config();
  tile.gather = gathers;
  return take.Result(LaunchMoeGemm(gemm, tile, stream));
}

const Registered<GroupedGemm> registered("jaxmoe_grouped_gemm_v1");

}  // namespace
}  // namespace jaxmoe
