// Launches both forms of permute with the widest unit that divides a row.
#include <algorithm>

#include "csrc/common/types.h"
#include "csrc/kernels/permute.cuh"

namespace jaxmoe {

namespace {

constexpr int64_t kMaxInt = 0x7fffffff;

template <typename Unit>
cudaError_t LaunchPermuteUnit(const PermuteParams& p, cudaStream_t stream) {
  int sm_count = 0;
  JAXMOE_RETURN_IF_CUDA_ERROR(GetSmCount(&sm_count));
  int64_t row_units = p.row_bytes / static_cast<int64_t>(sizeof(Unit));
  int64_t units = p.num_rows * row_units;
  // Small problems: one unit a thread, over as many SMs as possible.
  int64_t threads = std::clamp<int64_t>(RoundUp(CeilDiv(units, sm_count), 32), 32, 256);
  int64_t blocks = std::min<int64_t>(CeilDiv(units, threads), sm_count * kPermuteBlocksPerSm);
  return LaunchKernel(PermuteKernel<Unit>,
                      dim3(static_cast<unsigned>(blocks)),
                      dim3(static_cast<unsigned>(threads)),
                      0,
                      stream,
                      p.pdl,
                      p,
                      static_cast<unsigned>(row_units));
}

template <typename Unit>
cudaError_t LaunchPermuteUnit(const PermuteSlotsParams& p, cudaStream_t stream) {
  int sm_count = 0;
  JAXMOE_RETURN_IF_CUDA_ERROR(GetSmCount(&sm_count));
  int64_t row_units = p.row_bytes / static_cast<int64_t>(sizeof(Unit));
  int64_t units = p.num_tokens * row_units;
  int64_t threads =
      std::clamp<int64_t>(RoundUp(CeilDiv(units, sm_count), 32), 32, kPermuteMaxThreads);
  int64_t blocks = CeilDiv(units, threads);
  if (blocks > kMaxInt) return cudaErrorInvalidConfiguration;
  return LaunchKernel(PermuteSlotsKernel<Unit>,
                      dim3(static_cast<unsigned>(blocks)),
                      dim3(static_cast<unsigned>(threads)),
                      0,
                      stream,
                      p.pdl,
                      p,
                      static_cast<unsigned>(row_units));
}

// Launches with the widest power of two that divides the row length and both addresses.
template <typename Params>
cudaError_t LaunchWidest(const Params& params, cudaStream_t stream) {
  uintptr_t bits = reinterpret_cast<uintptr_t>(params.x) |
                   reinterpret_cast<uintptr_t>(params.rows) |
                   static_cast<uintptr_t>(params.row_bytes);
  if (bits % 16 == 0) return LaunchPermuteUnit<uint4>(params, stream);
  if (bits % 8 == 0) return LaunchPermuteUnit<uint2>(params, stream);
  if (bits % 4 == 0) return LaunchPermuteUnit<uint32_t>(params, stream);
  if (bits % 2 == 0) return LaunchPermuteUnit<uint16_t>(params, stream);
  return LaunchPermuteUnit<uint8_t>(params, stream);
}

}  // namespace

cudaError_t LaunchPermute(const PermuteParams& params, cudaStream_t stream) {
  if (params.num_tokens > kMaxInt || params.num_rows > kMaxInt || params.row_bytes > kMaxInt) {
    return cudaErrorInvalidValue;
  }
  if (params.num_rows == 0 || params.row_bytes == 0) return cudaSuccess;
  return LaunchWidest(params, stream);
}

cudaError_t LaunchPermuteSlots(const PermuteSlotsParams& params, cudaStream_t stream) {
  if (params.num_tokens > kMaxInt || params.num_rows > kMaxInt || params.row_bytes > kMaxInt ||
      params.top_k > kMaxInt) {
    return cudaErrorInvalidValue;
  }
  if (params.num_tokens == 0 || params.row_bytes == 0) return cudaSuccess;
  return LaunchWidest(params, stream);
}

}  // namespace jaxmoe
