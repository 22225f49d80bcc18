// FFI handler jaxmoe_finalize_v1: the weighted sum of each token's expert rows.
#include "csrc/ffi/checks.h"
#include "csrc/kernels/finalize.h"

namespace jaxmoe {
namespace {

ffi::Error Finalize(cudaStream_t stream, In rows, In slot_to_row, In weights, In residual, Out y) {
  Operands take("finalize");
  Dim R, H, T, K;
  FinalizeParams params{};
  params.rows = take.Any("rows", rows, {R, H}, kFloats);
  params.slot_to_row = take.Ints("slot_to_row", slot_to_row, {T, K});
  params.weights = take.Floats("weights", weights, {T, K});
  params.residual = take.AnyOrNull("residual", residual, {T, H}, Like(rows));
  params.y = take.Any("y", *y, {T, H}, Like(rows));
  if (take.failed()) return take.error();
  params.dtype = TypeOf(rows);
  params.num_tokens = T;
  params.top_k = K;
  params.num_rows = R;
  params.hidden = H;
  return take.Result(LaunchFinalize(params, stream));
}

const Registered<Finalize> registered("jaxmoe_finalize_v1");

}  // namespace
}  // namespace jaxmoe
