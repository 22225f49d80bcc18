// Launches permute with the widest unit that divides a row.
#include <algorithm>

#include "csrc/common/types.h"
#include "csrc/kernels/permute.cuh"

namespace jaxmoe {

namespace {

template <typename Unit>
cudaError_t LaunchPermuteUnit(const PermuteParams& p, cudaStream_t stream) {
  int sm_count = 0;
  JAXMOE_RETURN_IF_CUDA_ERROR(GetSmCount(&sm_count));
  int64_t row_units = p.row_bytes / static_cast<int64_t>(sizeof(Unit));
  int64_t units = p.num_tokens * row_units;
  // Small problems: small blocks, over as many SMs as possible.
  int64_t threads =
      std::clamp<int64_t>(RoundUp(CeilDiv(units, sm_count), 32), 32, kPermuteMaxThreads);
  int64_t slot_blocks = CeilDiv(units, threads);
  int64_t row_blocks = p.row_to_token == nullptr ? 0 : CeilDiv(p.num_rows, threads);
  if (slot_blocks + row_blocks > kMaxInt) return cudaErrorInvalidConfiguration;
  return LaunchKernel(PermuteKernel<Unit>,
                      dim3(static_cast<unsigned>(slot_blocks + row_blocks)),
                      dim3(static_cast<unsigned>(threads)),
                      0,
                      stream,
                      p.pdl,
                      p,
                      static_cast<unsigned>(row_units),
                      static_cast<unsigned>(slot_blocks));
}

}  // namespace

cudaError_t LaunchPermute(const PermuteParams& params, cudaStream_t stream) {
  if (params.num_tokens > kMaxInt || params.num_rows > kMaxInt || params.row_bytes > kMaxInt ||
      params.top_k > kMaxInt) {
    return cudaErrorInvalidValue;
  }
  if (params.num_rows == 0 || params.row_bytes == 0) return cudaSuccess;
  if (params.num_tokens == 0 && params.row_to_token == nullptr) return cudaSuccess;
  // The widest power of two that divides the row length and both addresses.
  uintptr_t bits = reinterpret_cast<uintptr_t>(params.x) |
                   reinterpret_cast<uintptr_t>(params.rows) |
                   static_cast<uintptr_t>(params.row_bytes);
  if (bits % 16 == 0) return LaunchPermuteUnit<uint4>(params, stream);
  if (bits % 8 == 0) return LaunchPermuteUnit<uint2>(params, stream);
  if (bits % 4 == 0) return LaunchPermuteUnit<uint32_t>(params, stream);
  if (bits % 2 == 0) return LaunchPermuteUnit<uint16_t>(params, stream);
  return LaunchPermuteUnit<uint8_t>(params, stream);
}

}  // namespace jaxmoe
