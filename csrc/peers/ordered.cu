// Launches a dispatch in the order of experts.
#include <algorithm>

#include "csrc/common/launch.h"
#include "csrc/peers/ordered.cuh"
#include "csrc/peers/tag.h"

namespace jaxmoe {
namespace {

// Of choices, which are few bytes.
constexpr int64_t kOfferCtas = 32;
// So few fill the links, see ordered.cuh, the one that waits among them; in pairs.
constexpr int kPushCtas = 16;

// Sizes that all devices have alike.
cudaError_t Prepare(PeerOrdered* p) {
  const int64_t row_bytes = p->arrays[0].row_bytes;
  if (TooLarge(p->size, row_bytes) || row_bytes % 16 != 0 || p->parts.count < 1 || p->unit < 1) {
    return cudaErrorInvalidValue;
  }
  if (p->size.num_local > kMaxInt / p->size.num_devices) return cudaErrorInvalidValue;
  if (reinterpret_cast<uintptr_t>(p->arrays[0].own) % 16 != 0) return cudaErrorMisalignedAddress;
  p->size.bytes = PeerOrderedBytes(*p);
  p->size.tag = jaxmoe::TagOf({kOrderedStep,
                               p->size.num_tokens,
                               p->size.top_k,
                               p->size.num_local,
                               p->parts.count,
                               row_bytes,
                               p->size.bytes});
  return cudaSuccess;
}

}  // namespace

int64_t PeerOrderedBytes(const PeerOrdered& params) {
  return PlacesOf(params).arrays[params.num_arrays];
}

char* OrderedRows(const PeerOrdered& params, const Peers& peers, int array) {
  return peers.bases[peers.rank] + kPeerHeaderBytes + peers.half_bytes +
         PlacesOf(params).arrays[array];
}

cudaError_t LaunchPeerOffer(const PeerOrdered& params, cudaStream_t stream) {
  PeerOrdered p = params;
  JAXMOE_RETURN_IF_CUDA_ERROR(Prepare(&p));
  const int64_t threads = p.size.num_tokens * p.size.top_k;
  const dim3 grid(
      static_cast<unsigned>(std::clamp<int64_t>(CeilDiv(threads, kManyThreads), 1, kOfferCtas)));
  return LaunchKernel(PeerOfferKernel, grid, dim3(kManyThreads), 0, stream, false, p);
}

cudaError_t LaunchPeerPush(const PeerOrdered& params, cudaStream_t stream) {
  PeerOrdered p = params;
  JAXMOE_RETURN_IF_CUDA_ERROR(Prepare(&p));
  return LaunchClusters(
      PeerPushKernel, dim3(kPushCtas), dim3(kManyThreads), 2, 0, stream, false, p);
}

cudaError_t LaunchPeerTake(const PeerOrdered& params, cudaStream_t stream) {
  PeerOrdered p = params;
  JAXMOE_RETURN_IF_CUDA_ERROR(Prepare(&p));
  int sm_count = 0;
  JAXMOE_RETURN_IF_CUDA_ERROR(GetSmCount(&sm_count));
  const dim3 grid(static_cast<unsigned>(sm_count));
  return LaunchKernel(PeerTakeKernel, grid, dim3(kManyThreads), 0, stream, false, p);
}

cudaError_t LaunchPeerFirst(const PeerOrdered& params, cudaStream_t stream) {
  PeerOrdered p = params;
  JAXMOE_RETURN_IF_CUDA_ERROR(Prepare(&p));
  return LaunchKernel(PeerFirstKernel, dim3(1), dim3(32), 0, stream, false, p);
}

cudaError_t LoadPeerOrderedKernels() {
  return LoadKernels(PeerOfferKernel, PeerPushKernel, PeerTakeKernel, PeerFirstKernel);
}

}  // namespace jaxmoe
