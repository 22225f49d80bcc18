// Launches and copies of an exchange beside products.
#include <algorithm>

#include "csrc/common/launch.h"
#include "csrc/peers/beside.cuh"
#include "csrc/peers/beside.h"
#include "csrc/peers/mapped.h"
#include "csrc/peers/tag.h"

namespace jaxmoe {
namespace {

int64_t PublishedBytes(const PeerBeside& p) { return PlacesOf(p).arrays[p.num_arrays]; }

int64_t SumBytes(const PeerBeside& p) { return p.sum.hidden * ElementSize(p.sum.dtype); }

// A CTA an SM, all of which run at once.
cudaError_t GetGrid(dim3* grid) {
  int sm_count = 0;
  JAXMOE_RETURN_IF_CUDA_ERROR(GetSmCount(&sm_count));
  *grid = dim3(static_cast<unsigned>(sm_count));
  return cudaSuccess;
}

uint32_t TagOf(int64_t kind, const PeerBeside& p) {
  return jaxmoe::TagOf({kind,
                        p.size.num_tokens,
                        p.size.top_k,
                        p.size.num_local,
                        PublishedBytes(p),
                        static_cast<int64_t>(p.sum.dtype),
                        p.sum.hidden});
}

// Of the half with the steps' parity, as it lies in a device's memory.
char* HalfAt(const Peers& peers, int device, int parity) {
  return peers.bases[device] + kPeerHeaderBytes + parity * peers.half_bytes;
}

template <typename T>
cudaError_t LaunchSumType(const PeerBeside& p, const dim3& grid, cudaStream_t stream) {
  const uintptr_t bits = reinterpret_cast<uintptr_t>(p.sum.own) |
                         reinterpret_cast<uintptr_t>(p.sum.residual) |
                         reinterpret_cast<uintptr_t>(p.sum.y) | static_cast<uintptr_t>(SumBytes(p));
  if (bits % 16 != 0) return cudaErrorMisalignedAddress;
  const int row_pieces = static_cast<int>(SumBytes(p) / 16);
  return LaunchKernel(PeerSumKernel<T>, grid, dim3(kManyThreads), 0, stream, false, p, row_pieces);
}

}  // namespace

int64_t PeerBesideBytes(const PeerBeside& p) {
  return std::max(PublishedBytes(p), PeerCombineBytes(p.size, SumBytes(p), 0));
}

cudaError_t LaunchPeerPublish(const PeerBeside& params, cudaStream_t stream) {
  if (TooLarge(params.size, SumBytes(params))) return cudaErrorInvalidValue;
  PeerBeside p = params;
  p.size.bytes = PeerBesideBytes(p);
  p.size.tag = TagOf(kPublishStep, p);
  dim3 grid;
  JAXMOE_RETURN_IF_CUDA_ERROR(GetGrid(&grid));
  const dim3 block(kManyThreads);
  JAXMOE_RETURN_IF_CUDA_ERROR(LaunchKernel(PeerPublishKernel, grid, block, 0, stream, false, p));
  return LaunchKernel(PeerChoicesKernel, grid, block, 0, stream, false, p);
}

cudaError_t CopyPeerTokens(
    const PeerBeside& p, const Peers& peers, int turn, int came_at, cudaStream_t stream) {
  const int device = (peers.rank + turn) % peers.num_devices;
  const BesidePlaces places = PlacesOf(p);
  for (int i = 0; i < p.num_arrays; ++i) {
    const PeerArray& array = p.arrays[i];
    const int64_t bytes = p.size.num_tokens * array.row_bytes;
    const char* from = HalfAt(peers, device, 1) + places.arrays[i];
    char* to = array.all + turn * bytes;
    JAXMOE_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
  }
  return WriteWord(p.came + came_at, 1, stream);
}

cudaError_t CopyPeerSums(
    const PeerBeside& p, const Peers& peers, int turn, const char* rows, cudaStream_t stream) {
  const int device = (peers.rank + turn) % peers.num_devices;
  const int64_t bytes = p.size.num_tokens * SumBytes(p);
  char* to = HalfAt(peers, device, 0) + peers.rank * bytes;
  return cudaMemcpyAsync(to, rows, bytes, cudaMemcpyDefault, stream);
}

cudaError_t LaunchPeerSum(const PeerBeside& params, cudaStream_t stream) {
  if (TooLarge(params.size, SumBytes(params))) return cudaErrorInvalidValue;
  PeerBeside p = params;
  p.size.bytes = PeerBesideBytes(p);
  p.size.tag = TagOf(kSumStep, p);
  p.sum.size = p.size;
  dim3 grid;
  JAXMOE_RETURN_IF_CUDA_ERROR(GetGrid(&grid));
  switch (p.sum.dtype) {
    case DType::kBFloat16:
      return LaunchSumType<__nv_bfloat16>(p, grid, stream);
    case DType::kFloat16:
      return LaunchSumType<__half>(p, grid, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t LoadPeerBesideKernels() {
  return LoadKernels(
      PeerPublishKernel, PeerChoicesKernel, PeerSumKernel<__nv_bfloat16>, PeerSumKernel<__half>);
}

}  // namespace jaxmoe
