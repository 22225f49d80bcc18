// Launches zero_rows with the widest store that divides a row.
#include <algorithm>

#include "csrc/common/types.h"
#include "csrc/kernels/zero_rows.cuh"

namespace jaxmoe {

namespace {

template <typename Unit>
cudaError_t LaunchZeroRowsUnit(const ZeroRowsParams& p, cudaStream_t stream) {
  constexpr int64_t kMinPartBytes = 4096;  // one store a thread
  int sm_count = 0;
  JAXMOE_RETURN_IF_CUDA_ERROR(GetSmCount(&sm_count));
  int64_t row_blocks = std::max<int64_t>(1, CeilDiv(p.num_rows, kZeroRowsBlockRows));
  int64_t blocks = std::max<int64_t>(1, p.batch) * row_blocks;
  if (blocks > kMaxInt) return cudaErrorInvalidConfiguration;
  // Split columns only to keep all SMs busy.
  int64_t parts = std::clamp<int64_t>(
      sm_count / blocks, 1, std::max<int64_t>(1, CeilDiv(p.row_bytes, kMinPartBytes)));
  int64_t row_units = p.row_bytes / static_cast<int64_t>(sizeof(Unit));
  return LaunchKernel(ZeroRowsKernel<Unit>,
                      dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(parts)),
                      dim3(kZeroRowsThreads),
                      0,
                      stream,
                      p.pdl,
                      p,
                      static_cast<unsigned>(row_blocks),
                      static_cast<unsigned>(CeilDiv(row_units, parts)));
}

}  // namespace

cudaError_t LaunchZeroRows(const ZeroRowsParams& params, cudaStream_t stream) {
  ZeroRowsParams p = params;
  if (p.batch == 0 || p.num_rows == 0 || p.row_bytes == 0) {
    if (p.num_zero_counters == 0) return cudaSuccess;
    // Only the counters: one block without rows or groups.
    p.batch = p.num_rows = p.row_bytes = p.num_groups = 0;
  }
  uintptr_t bits = reinterpret_cast<uintptr_t>(p.out) | static_cast<uintptr_t>(p.row_bytes);
  bits |= reinterpret_cast<uintptr_t>(p.other.out) | static_cast<uintptr_t>(p.other.row_bytes);
  if (bits % 16 == 0) return LaunchZeroRowsUnit<uint4>(p, stream);
  if (bits % 2 == 0) return LaunchZeroRowsUnit<uint16_t>(p, stream);
  return LaunchZeroRowsUnit<uint8_t>(p, stream);
}

}  // namespace jaxmoe
