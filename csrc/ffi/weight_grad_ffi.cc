// FFI handler of the weight gradient: x^T dy of the rows of each group, added to what there is.
#include "csrc/ffi/gemm_attrs.h"
#include "csrc/kernels/zero_rows.h"
#include "csrc/weight_grad/tgmm.h"

namespace jaxmoe {

struct WeightGradAttrs {
  int64_t cluster;
};

}  // namespace jaxmoe

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jaxmoe::WeightGradAttrs,
                                      ::xla::ffi::StructMember<int64_t>("cluster"));

namespace jaxmoe {
namespace {

// B examples of T rows, W arrays of E weights each; group g of example b belongs to weight
// (b * G + g) mod (W * E). B and W may be left out.
ffi::Error WeightGrad(cudaStream_t stream,
                      In x,         // [B,T,K]
                      In dy,        // [B,T,N]
                      In starts,    // [B,G]
                      In sizes,     // [B,G]
                      In init,      // [W,E,K,N], the memory of dw, or absent
                      Out dw,       // [W,E,K,N]
                      Out scratch,  // [kGemmScratchInts]
                      WeightGradAttrs attrs) {
  Operands take("grouped_gemm_weight_grad");
  Dim B = Dim::Batch(), W = Dim::Batch();
  Dim T, K, N, G, E;
  TgmmProblem gemm;
  gemm.x = take.Any("x", x, {B, T, K}, kHalfs);
  gemm.dy = take.Any("dy", dy, {B, T, N}, Like(x));
  gemm.group_starts = take.Ints("starts", starts, {B, G});
  gemm.group_sizes = take.Ints("sizes", sizes, {B, G});
  gemm.dw = take.Any("dw", *dw, {W, E, K, N}, Like(x).Or(ffi::DataType::F32));
  const void* sum = take.AnyOrNull("init", init, {W, E, K, N}, Like(*dw));
  gemm.tile_counter = take.Ints("scratch", *scratch, {kGemmScratchInts});
  take.Range("rows", B * T, 0, kMaxInt);
  take.Range("groups", B * G, 0, kMaxInt);
  take.Range("weights", W * E, 0, kMaxInt);
  take.Range("K", K, 0, kMaxColumns);
  take.Range("N", N, 0, kMaxColumns);
  take.Range("cluster", attrs.cluster, 1, 2);
  if (sum != nullptr && sum != gemm.dw) take.Refuse("init must be the memory of dw.");
  if (take.failed()) return take.error();
  if (dw->element_count() == 0) return ffi::Error::Success();

  // The counter is cleared before the kernel, on which that then depends.
  ZeroRowsParams zero{};
  zero.zero_counters = gemm.tile_counter;
  zero.num_zero_counters = kGemmScratchInts;
  if (cudaError_t status = LaunchZeroRows(zero, stream)) return take.Result(status);

  gemm.dtype = TypeOf(x);
  gemm.out_f32 = dw->element_type() == ffi::DataType::F32;
  gemm.accumulate = sum != nullptr;
  gemm.num_weights = static_cast<int>(W * E);
  gemm.num_groups = static_cast<int>(B * G);
  gemm.groups_per_batch = static_cast<int>(G);
  gemm.rows_per_batch = static_cast<int>(T);
  gemm.k = static_cast<int>(K);
  gemm.n = static_cast<int>(N);
  gemm.pdl = true;
  TgmmConfig config;
  config.cluster = static_cast<int>(attrs.cluster);
  return take.Result(LaunchTgmm(gemm, config, stream));
}

const Registered<WeightGrad> registered("jaxmoe_weight_grad_v1");

}  // namespace
}  // namespace jaxmoe
