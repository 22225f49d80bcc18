// Launches dispatch and combine of peers with the widest unit that rows allow.
#include <algorithm>

#include "csrc/common/launch.h"
#include "csrc/peers/beside.h"
#include "csrc/peers/exchange.h"
#include "csrc/peers/few.cuh"
#include "csrc/peers/ordered.h"
#include "csrc/peers/rows.h"
#include "csrc/peers/tag.h"

namespace jaxmoe {
namespace {

// Up to so many rows of 4 KiB are few tokens: CTAs that run at once whatever else does.
constexpr int64_t kMostFew = 2048;
constexpr int64_t kMostCtasOfFew = 64;
// From so many bytes that a device sends at most, rows of few tokens are lines: pairs of them would
// take 1.5 us longer on the links, and lines 0.7 us to be read once more.
constexpr int64_t kLeastInLines = 512 << 10;
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

// Makes a step one of few tokens if it is small, rows have whole units of 16 bytes, and there is
// room: for rows in lines where they are worth it, else in pairs. That hangs on sizes and memory
// alone, which all devices have alike, and not on where arrays lie. `beside`: pairs beside rows.
void ChooseFew(ExchangeSize* size, const Peers& peers, int64_t row_bytes, int64_t beside) {
  constexpr int64_t kUnitBytes = sizeof(uint4);
  const int64_t rows = size->num_tokens * size->num_devices;
  const int64_t parts = PartsOfRow(CeilDiv(row_bytes, 16));
  if (rows * parts > kMostFew || row_bytes % 16 != 0) return;
  const int64_t room = peers.few_bytes - peers.line_bytes;
  const int64_t lines = rows * Lines(row_bytes).units / kLineUnits;
  const int64_t pairs = (beside + rows * Pairs(row_bytes).units) * kUnitBytes;
  if ((rows - size->num_tokens) * row_bytes >= kLeastInLines &&
      lines * kPeerLineBytes <= peers.line_bytes && beside * kUnitBytes <= room) {
    size->few = true;
    size->bytes = beside * kUnitBytes;
    size->lines = static_cast<int>(lines);
  } else if (pairs <= room) {
    size->few = true;
    size->bytes = pairs;
  }
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

// So many CTAs for steps of few tokens that a warp has a part of a row of each device.
template <class Row>
cudaError_t GetFewGrid(const ExchangeSize& size, int64_t row_bytes, dim3* grid) {
  const int64_t parts = FewParts(Row(row_bytes).units, Row::kSent);
  return GetGrid(size.num_tokens * size.num_devices * parts, true, grid);
}

template <class Row>
cudaError_t LaunchFewDispatch(const PeerDispatchParams& p, cudaStream_t stream) {
  dim3 grid;
  JAXMOE_RETURN_IF_CUDA_ERROR(GetFewGrid<Row>(p.size, p.token_bytes, &grid));
  return LaunchKernel(PeerFewDispatchKernel<Row>, grid, dim3(kFewThreads), 0, stream, false, p);
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

template <typename T, class Row, class From>
cudaError_t LaunchFewCombine(const PeerCombineParams& p, cudaStream_t stream) {
  dim3 grid;
  JAXMOE_RETURN_IF_CUDA_ERROR(
      GetFewGrid<Row>(p.size, p.hidden * static_cast<int64_t>(sizeof(T)), &grid));
  const dim3 block(kFewThreads);
  return LaunchKernel(PeerFewCombineKernel<T, Row, From>, grid, block, 0, stream, false, p);
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
  return p.size.lines > 0 ? LaunchFewCombine<T, Lines, LinesReceived>(p, stream)
                          : LaunchFewCombine<T, Pairs, PairsReceived>(p, stream);
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
  const int64_t slot_pairs = PairsOf(size.num_tokens * size.top_k * 4);
  const int64_t small_pairs = size.num_tokens * PairsOf(params.small_floats * 4);
  ChooseFew(&size, peers, params.token_bytes, size.num_devices * (slot_pairs + small_pairs));
  size.tag = TagOf({size.lines > 0 ? kLinesDispatchStep
                    : size.few     ? kFewDispatchStep
                                   : kDispatchStep,
                    size.num_tokens,
                    size.top_k,
                    size.num_local,
                    params.token_bytes,
                    params.small_floats});
  const uintptr_t bits = reinterpret_cast<uintptr_t>(params.tokens) |
                         reinterpret_cast<uintptr_t>(params.all_tokens) |
                         static_cast<uintptr_t>(params.token_bytes);
  if (size.few) {
    if (bits % 16 != 0) return cudaErrorMisalignedAddress;
    return size.lines > 0 ? LaunchFewDispatch<Lines>(params, stream)
                          : LaunchFewDispatch<Pairs>(params, stream);
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
  const int64_t small_pairs = PairsOf(params.small_floats * 4);
  ChooseFew(&size, peers, row_bytes, size.num_devices * size.num_tokens * small_pairs);
  size.tag = TagOf({size.lines > 0 ? kLinesCombineStep
                    : size.few     ? kFewCombineStep
                                   : kCombineStep,
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
  JAXMOE_RETURN_IF_CUDA_ERROR(LoadPeerOrderedKernels());
  return LoadKernels(PeerFewDispatchKernel<Pairs>,
                     PeerFewDispatchKernel<Lines>,
                     PeerFewCombineKernel<__nv_bfloat16, Pairs, PairsReceived>,
                     PeerFewCombineKernel<__nv_bfloat16, Lines, LinesReceived>,
                     PeerFewCombineKernel<__half, Pairs, PairsReceived>,
                     PeerFewCombineKernel<__half, Lines, LinesReceived>,
                     PeerFewCombineKernel<float, Pairs, PairsReceived>,
                     PeerFewCombineKernel<float, Lines, LinesReceived>,
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
