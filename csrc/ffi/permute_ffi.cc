// FFI handler jaxmoe_permute_v2: token rows copied into expert order.
#include "csrc/ffi/checks.h"
#include "csrc/kernels/permute.h"

namespace jaxmoe {
namespace {

ffi::Error Permute(cudaStream_t stream, In x, In row_to_token, In slot_to_row, Out rows) {
  Operands take("permute");
  Dim T, H, R, K;
  PermuteParams params{};
  params.x = take.Any("x", x, {T, H}, kFloats);
  params.row_to_token = take.Ints("row_to_token", row_to_token, {R});
  params.slot_to_row = take.Ints("slot_to_row", slot_to_row, {T, K});
  params.rows = take.Any("rows", *rows, {R, H}, Like(x));
  params.num_tokens = T;
  params.top_k = K;
  params.num_rows = R;
  params.row_bytes = H * ElementSize(TypeOf(x));
  take.Range("bytes of a row", params.row_bytes, 0, kMaxInt);
  if (take.failed()) return take.error();
  return take.Result(LaunchPermute(params, stream));
}

const Registered<Permute> registered("jaxmoe_permute_v2");

}  // namespace
}  // namespace jaxmoe
