// Launches dispatch and combine of peers with the widest unit that rows allow.
#include <algorithm>

#include "csrc/common/launch.h"
#include "csrc/peers/beside.h"
#include "csrc/peers/exchange.h"
#include "csrc/peers/few.cuh"
#include "csrc/peers/rows.h"
#include "csrc/peers/tag.h"

namespace jaxmoe {
namespace {

// Up to so many rows of 4 KiB are few tokens: CTAs that run at once whatever else does.
constexpr int64_t kMostFew = 2048;
constexpr int64_t kMostCtasOfFew = 64;
// A chunk takes some 3 us to be announced, in which 1 MB goes over the links; of what is sent last
// nothing can be taken earlier.
constexpr int64_t kChunkBytes = 3 << 20;

// CTAs for so many tasks of a warp each.
cudaError_t GetGrid(int64_t tasks, bool few, dim3* grid) {
  int sm_count = 0;
  JAXMOE_RETURN_IF_CUDA_ERROR(GetSmCount(&sm_count));
  // Of few half of the SMs, each of which has room for a CTA: others may be taken.
  const int64_t most = few ? std::clamp<int64_t>(sm_count / 2, 1, kMostCtasOfFew)
                           : std::max<int64_t>(2 * kPushGroups, sm_count);
  const int64_t least = few ? 1 : 2 * kPushGroups;
  const int64_t warps = (few ? kFewThreads : kManyThreads) / 32;
  *grid = dim3(static_cast<unsigned>(std::clamp<int64_t>(CeilDiv(tasks, warps), least, most)));
  return cudaSuccess;
}

// Of the CTAs of a grid, those that push: 40 of 132 fill the links, and with more of them stores
// come in each other's way.
constexpr double kPushing = 0.3;

// Divides a step into chunks, and the CTAs of its grid among those who push and who take.
void DivideInChunks(ExchangeSize* size, int64_t row_bytes, const dim3& grid) {
  const int64_t bytes = size->num_tokens * row_bytes * (size->num_devices - 1);
  size->chunks = static_cast<int>(std::clamp<int64_t>(bytes / kChunkBytes, 2, kPeerChunks));
  size->pushers = std::max<int>(kPushGroups, static_cast<int>(grid.x * kPushing));
}

int64_t PartsOfRow(int64_t row_units) {
  return std::max<int64_t>(1, CeilDiv(row_units, 32 * kPeerUnits));
}

// Makes a step one of few tokens if it is small, rows have whole units of 16 bytes, and its pairs
// have room. That hangs on sizes alone, which all devices have alike, and not on where arrays lie.
void ChooseFew(ExchangeSize* size, const Peers& peers, int64_t row_bytes, int64_t pairs) {
  const int64_t parts = PartsOfRow(CeilDiv(row_bytes, 16));
  const int64_t bytes = pairs * static_cast<int64_t>(sizeof(uint4));
  if (size->num_tokens * size->num_devices * parts > kMostFew || row_bytes % 16 != 0) return;
  if (bytes > peers.few_bytes) return;
  size->few = true;
  size->bytes = bytes;
}

template <class Unit>
cudaError_t LaunchDispatchUnit(PeerDispatchParams p, cudaStream_t stream) {
  const int64_t units = p.token_bytes / static_cast<int64_t>(sizeof(Unit));
  dim3 grid;
  JAXMOE_RETURN_IF_CUDA_ERROR(
      GetGrid(p.size.num_tokens * p.size.num_devices * PartsOfRow(units), false, &grid));
  DivideInChunks(&p.size, p.token_bytes, grid);
  return LaunchKernel(PeerDispatchKernel<Unit>, grid, dim3(kManyThreads), 0, stream, false, p);
}

cudaError_t LaunchFewDispatch(const PeerDispatchParams& p, cudaStream_t stream) {
  const int64_t parts = FewParts(PairsOf(p.token_bytes));
  dim3 grid;
  JAXMOE_RETURN_IF_CUDA_ERROR(GetGrid(p.size.num_tokens * p.size.num_devices * parts, true, &grid));
  return LaunchKernel(PeerFewDispatchKernel, grid, dim3(kFewThreads), 0, stream, false, p);
}

// For rows of whole pieces of kSize elements, or of single ones.
template <typename T, int kSize>
cudaError_t LaunchCombineSized(PeerCombineParams p, cudaStream_t stream) {
  const int64_t pieces = p.hidden / kSize;
  dim3 grid;
  JAXMOE_RETURN_IF_CUDA_ERROR(
      GetGrid(p.size.num_tokens * p.size.num_devices * PartsOfRow(pieces), false, &grid));
  DivideInChunks(&p.size, p.hidden * static_cast<int64_t>(sizeof(T)), grid);
  const dim3 block(kManyThreads);
  const int row_pieces = static_cast<int>(pieces);
  return LaunchKernel(PeerCombineKernel<T, kSize>, grid, block, 0, stream, false, p, row_pieces);
}

template <typename T>
cudaError_t LaunchCombineType(const PeerCombineParams& p, cudaStream_t stream) {
  const int64_t row_bytes = p.hidden * static_cast<int64_t>(sizeof(T));
  const uintptr_t bits = reinterpret_cast<uintptr_t>(p.rows) |
                         reinterpret_cast<uintptr_t>(p.residual) |
                         reinterpret_cast<uintptr_t>(p.y) | static_cast<uintptr_t>(row_bytes);
  if (!p.size.few) {
    return bits % 16 == 0 ? LaunchCombineSized<T, 16 / sizeof(T)>(p, stream)
                          : LaunchCombineSized<T, 1>(p, stream);
  }
  if (bits % 16 != 0) return cudaErrorMisalignedAddress;
  const int64_t parts = FewParts(PairsOf(row_bytes));
  dim3 grid;
  JAXMOE_RETURN_IF_CUDA_ERROR(GetGrid(p.size.num_tokens * p.size.num_devices * parts, true, &grid));
  return LaunchKernel(PeerFewCombineKernel<T>, grid, dim3(kFewThreads), 0, stream, false, p);
}

}  // namespace

bool TooLarge(const ExchangeSize& size, int64_t row_bytes) {
  return size.num_tokens > kMaxInt / size.num_devices || size.top_k > kMaxInt ||
         size.num_local > kMaxInt || row_bytes > kMaxInt;
}

cudaError_t LaunchPeerDispatch(PeerDispatchParams params, const Peers& peers, cudaStream_t stream) {
  ExchangeSize& size = params.size;
  if (TooLarge(size, params.token_bytes)) return cudaErrorInvalidValue;
  if (size.num_tokens == 0) return cudaSuccess;
  size.bytes = PeerDispatchBytes(size, params.token_bytes, params.small_floats);
  const int64_t pairs = PairsOf(params.token_bytes) + PairsOf(params.small_floats * 4);
  ChooseFew(
      &size,
      peers,
      params.token_bytes,
      size.num_devices * (PairsOf(size.num_tokens * size.top_k * 4) + size.num_tokens * pairs));
  size.tag = TagOf({size.few ? kFewDispatchStep : kDispatchStep,
                    size.num_tokens,
                    size.top_k,
                    size.num_local,
                    params.token_bytes,
                    params.small_floats});
  const uintptr_t bits = reinterpret_cast<uintptr_t>(params.tokens) |
                         reinterpret_cast<uintptr_t>(params.all_tokens) |
                         static_cast<uintptr_t>(params.token_bytes);
  if (size.few) {
    return bits % 8 == 0 ? LaunchFewDispatch(params, stream) : cudaErrorMisalignedAddress;
  }
  if (bits % 16 == 0) return LaunchDispatchUnit<uint4>(params, stream);
  if (bits % 4 == 0) return LaunchDispatchUnit<uint32_t>(params, stream);
  return LaunchDispatchUnit<uint16_t>(params, stream);
}

cudaError_t LaunchPeerCombine(PeerCombineParams params, const Peers& peers, cudaStream_t stream) {
  ExchangeSize& size = params.size;
  const int64_t row_bytes = params.hidden * ElementSize(params.dtype);
  if (TooLarge(size, row_bytes)) return cudaErrorInvalidValue;
  if (size.num_tokens == 0 || params.hidden == 0) return cudaSuccess;
  params.own = static_cast<const char*>(params.rows) + peers.rank * size.num_tokens * row_bytes;
  size.bytes = PeerCombineBytes(size, row_bytes, params.small_floats);
  ChooseFew(
      &size,
      peers,
      row_bytes,
      size.num_devices * size.num_tokens * (PairsOf(row_bytes) + PairsOf(params.small_floats * 4)));
  size.tag = TagOf({size.few ? kFewCombineStep : kCombineStep,
                    size.num_tokens,
                    size.top_k,
                    size.num_local,
                    static_cast<int64_t>(params.dtype),
                    params.hidden,
                    params.small_floats});
  switch (params.dtype) {
    case DType::kBFloat16:
      return LaunchCombineType<__nv_bfloat16>(params, stream);
    case DType::kFloat16:
      return LaunchCombineType<__half>(params, stream);
    case DType::kFloat32:
      return LaunchCombineType<float>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

int64_t PeerDispatchBytes(const ExchangeSize& size, int64_t token_bytes, int64_t small_floats) {
  return PlacesOf(size, token_bytes, small_floats).end;
}

int64_t PeerCombineBytes(const ExchangeSize& size, int64_t row_bytes, int64_t small_floats) {
  const int64_t rows = size.num_devices * size.num_tokens;
  return PeerAligned(rows * row_bytes) + PeerAligned(rows * small_floats * 4);
}

cudaError_t LoadPeerKernels() {
  JAXMOE_RETURN_IF_CUDA_ERROR(LoadPeerRowsKernels());
  JAXMOE_RETURN_IF_CUDA_ERROR(LoadPeerBesideKernels());
  return LoadKernels(PeerFewDispatchKernel,
                     PeerFewCombineKernel<__nv_bfloat16>,
                     PeerFewCombineKernel<__half>,
                     PeerFewCombineKernel<float>,
                     PeerDispatchKernel<uint4>,
                     PeerDispatchKernel<uint32_t>,
                     PeerDispatchKernel<uint16_t>,
                     PeerCombineKernel<__nv_bfloat16, 8>,
                     PeerCombineKernel<__nv_bfloat16, 1>,
                     PeerCombineKernel<__half, 8>,
                     PeerCombineKernel<__half, 1>,
                     PeerCombineKernel<float, 4>,
                     PeerCombineKernel<float, 1>);
}

}  // namespace jaxmoe
