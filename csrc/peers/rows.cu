// Launches what surrounds a product that stores its rows in the memory of other devices.
#include <algorithm>

#include "csrc/common/launch.h"
#include "csrc/peers/rows.cuh"
#include "csrc/peers/rows.h"
#include "csrc/peers/tag.h"

namespace jaxmoe {
namespace {

// Up to so many pieces of 16 bytes finalize is one launch with the meeting before it, of CTAs that
// run at once whatever else does: half of the SMs, each of which has room for one.
constexpr int64_t kMostPiecesOfOne = 65536;
constexpr int64_t kMostCtasOfOne = 64;

template <typename T, int kUnroll>
cudaError_t LaunchUnrolled(const PeerRows& p, int sm_count, cudaStream_t stream) {
  const int64_t row_pieces = p.hidden * static_cast<int64_t>(sizeof(T)) / 16;
  const int64_t pieces = p.size.num_tokens * row_pieces;
  const unsigned per_row = static_cast<unsigned>(row_pieces);
  const dim3 block(kFinalizeMaxThreads);
  const int64_t ctas = CeilDiv(pieces, kFinalizeMaxThreads);
  if (pieces <= kMostPiecesOfOne) {
    const int64_t most = std::clamp<int64_t>(sm_count / 2, 1, kMostCtasOfOne);
    const dim3 grid(static_cast<unsigned>(std::min(ctas, most)));
    return LaunchKernel(
        PeerMeetFinalizeKernel<T, kUnroll>, grid, block, 0, stream, false, p, per_row);
  }
  if (ctas > kMaxInt) return cudaErrorInvalidConfiguration;
  JAXMOE_RETURN_IF_CUDA_ERROR(LaunchKernel(PeerMeetKernel, dim3(1), dim3(32), 0, stream, false, p));
  const dim3 grid(static_cast<unsigned>(ctas));
  return LaunchKernel(PeerFinalizeKernel<T, kUnroll>, grid, block, 0, stream, false, p, per_row);
}

// Row loads in flight: by K, 8 of many choices while all threads run at once. Nothing is read early
// here, so few choices keep their kernels, see LaunchFinalize.
template <typename T>
cudaError_t LaunchType(const PeerRows& p, cudaStream_t stream) {
  int sm_count = 0;
  JAXMOE_RETURN_IF_CUDA_ERROR(GetSmCount(&sm_count));
  const int64_t pieces = p.size.num_tokens * (p.hidden * static_cast<int64_t>(sizeof(T)) / 16);
  const int64_t at_once = int64_t{FinalizeBlocksPerSm(8)} * kFinalizeMaxThreads * sm_count;
  if (p.size.top_k <= 2) return LaunchUnrolled<T, 2>(p, sm_count, stream);
  if (p.size.top_k <= 4 || pieces > at_once) return LaunchUnrolled<T, 4>(p, sm_count, stream);
  return LaunchUnrolled<T, 8>(p, sm_count, stream);
}

// Rows and experts of all devices are counted in 31 bits.
bool IsValid(const PeerRows& p) {
  const ExchangeSize& size = p.size;
  const int64_t row_bytes = p.hidden * ElementSize(p.dtype);
  const uintptr_t bits = reinterpret_cast<uintptr_t>(p.residual) |
                         reinterpret_cast<uintptr_t>(p.y) | static_cast<uintptr_t>(row_bytes);
  const int64_t own_rows = kMaxInt / p.size.num_devices;
  return bits % 16 == 0 && row_bytes <= kMaxInt && size.num_local <= own_rows && size.top_k > 0 &&
         size.num_tokens <= own_rows / size.top_k &&
         (p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16);
}

bool IsEmpty(const PeerRows& p) { return p.size.num_tokens == 0 || p.hidden == 0; }

}  // namespace

cudaError_t LaunchPeerTargets(const PeerRows& rows,
                              const int32_t* slot_to_row,
                              bool pdl,
                              cudaStream_t stream) {
  if (!IsValid(rows)) return cudaErrorInvalidValue;
  if (IsEmpty(rows)) return cudaSuccess;
  int sm_count = 0;
  JAXMOE_RETURN_IF_CUDA_ERROR(GetSmCount(&sm_count));
  const int64_t slots = rows.size.num_tokens * rows.size.top_k * rows.size.num_devices;
  const int64_t ctas =
      std::clamp<int64_t>(CeilDiv(slots, kPeerTargetThreads), 1, int64_t{4} * sm_count);
  return LaunchKernel(PeerTargetsKernel,
                      dim3(static_cast<unsigned>(ctas)),
                      dim3(kPeerTargetThreads),
                      0,
                      stream,
                      pdl,
                      rows,
                      slot_to_row);
}

cudaError_t LaunchPeerFinalize(PeerRows rows, cudaStream_t stream) {
  if (!IsValid(rows)) return cudaErrorInvalidValue;
  if (IsEmpty(rows)) return cudaSuccess;
  rows.size.tag = TagOf({kRowsStep,
                         rows.size.num_tokens,
                         rows.size.top_k,
                         rows.size.num_local,
                         static_cast<int64_t>(rows.dtype),
                         rows.hidden});
  if (rows.dtype == DType::kFloat16) return LaunchType<__half>(rows, stream);
  return LaunchType<__nv_bfloat16>(rows, stream);
}

int64_t PeerRowsBytes(const ExchangeSize& size, int64_t row_bytes) {
  return PeerAligned(size.num_tokens * size.top_k * row_bytes);
}

cudaError_t LoadPeerRowsKernels() {
  return LoadKernels(PeerTargetsKernel,
                     PeerMeetKernel,
                     PeerFinalizeKernel<__nv_bfloat16, 2>,
                     PeerFinalizeKernel<__nv_bfloat16, 4>,
                     PeerFinalizeKernel<__nv_bfloat16, 8>,
                     PeerFinalizeKernel<__half, 2>,
                     PeerFinalizeKernel<__half, 4>,
                     PeerFinalizeKernel<__half, 8>,
                     PeerMeetFinalizeKernel<__nv_bfloat16, 2>,
                     PeerMeetFinalizeKernel<__nv_bfloat16, 4>,
                     PeerMeetFinalizeKernel<__nv_bfloat16, 8>,
                     PeerMeetFinalizeKernel<__half, 2>,
                     PeerMeetFinalizeKernel<__half, 4>,
                     PeerMeetFinalizeKernel<__half, 8>);
}

}  // namespace jaxmoe
