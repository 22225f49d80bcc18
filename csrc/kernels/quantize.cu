// Launches quantize: threads and blocks for its format, one or two kernels.
#include <algorithm>

#include "csrc/kernels/quantize.cuh"

namespace jaxmoe {

namespace {

dim3 Blocks(int64_t count) { return dim3(static_cast<unsigned>(count)); }

template <typename T, Shared kShared>
cudaError_t LaunchRows(const QuantizeParams& p,
                       int64_t row_pieces,
                       int64_t num_partials,
                       cudaStream_t stream) {
  QuantRowThreads threads;
  JAXMOE_RETURN_IF_CUDA_ERROR(ThreadsOfRows(p.batch * p.rows, row_pieces, &threads));
  return LaunchKernel(QuantizeRowsKernel<T, kShared>,
                      threads.grid,
                      threads.block,
                      0,
                      stream,
                      p.pdl,
                      p,
                      static_cast<unsigned>(row_pieces),
                      threads.chunks,
                      static_cast<unsigned>(num_partials));
}

template <typename T>
cudaError_t LaunchBlocks(const QuantizeParams& p, int64_t row_pieces, cudaStream_t stream) {
  int64_t row_blocks = CeilDiv(p.rows, kQuantBlock);
  int64_t blocks = p.batch * row_blocks * CeilDiv(p.cols, kQuantBlock);
  if (blocks == 0) return cudaSuccess;
  if (blocks > kMaxInt) return cudaErrorInvalidConfiguration;
  return LaunchKernel(QuantizeBlocksKernel<T>,
                      Blocks(blocks),
                      dim3(16 * kGroupLanes<T>),
                      0,
                      stream,
                      p.pdl,
                      p,
                      static_cast<unsigned>(row_pieces),
                      static_cast<unsigned>(row_blocks));
}

template <typename T>
cudaError_t LaunchTensor(const QuantizeParams& p, int64_t row_pieces, cudaStream_t stream) {
  int64_t pieces = p.rows * row_pieces;
  bool fits = pieces <= kQuantMaxCluster * kQuantMaxThreads * kQuantPieces;
  if (pieces == 0 || (fits && p.static_scales == nullptr && p.slot_to_row == nullptr)) {
    int cluster = 1;
    while (cluster < kQuantMaxCluster && pieces > cluster * kQuantMaxThreads / 2 * kQuantPieces) {
      cluster *= 2;
    }
    int64_t threads = std::max<int64_t>(32, RoundUp(CeilDiv(pieces, cluster * kQuantPieces), 32));
    if (p.batch * cluster > kMaxInt) return cudaErrorInvalidConfiguration;
    return LaunchClusters(QuantizeTensorKernel<T>,
                          Blocks(p.batch * cluster),
                          dim3(static_cast<unsigned>(threads)),
                          cluster,
                          0,
                          stream,
                          p.pdl,
                          p,
                          static_cast<unsigned>(row_pieces));
  }
  if (p.static_scales != nullptr) {
    return LaunchRows<T, Shared::kTensor>(p, row_pieces, 0, stream);
  }
  int sm_count = 0;
  JAXMOE_RETURN_IF_CUDA_ERROR(GetSmCount(&sm_count));
  // One entry: two blocks an SM share it evenly. Many: parts small enough to balance.
  int64_t wanted = p.batch == 1 ? 2 * sm_count : CeilDiv(16 * sm_count, p.batch);
  int64_t parts = CeilDiv(pieces, kQuantMaxThreadsOfParts * kQuantPieces);
  parts = std::min<int64_t>({parts, wanted, kMaxQuantPartials});
  if (p.batch * parts > kMaxInt) return cudaErrorInvalidConfiguration;
  JAXMOE_RETURN_IF_CUDA_ERROR(LaunchKernel(QuantizeMaxKernel<T>,
                                           Blocks(p.batch * parts),
                                           dim3(kQuantMaxThreadsOfParts),
                                           0,
                                           stream,
                                           p.pdl,
                                           p,
                                           static_cast<unsigned>(row_pieces),
                                           static_cast<unsigned>(parts)));
  QuantizeParams second = p;
  second.pdl = true;
  return LaunchRows<T, Shared::kTensor>(second, row_pieces, parts, stream);
}

template <typename T>
cudaError_t LaunchType(const QuantizeParams& p, cudaStream_t stream) {
  int64_t row_pieces = p.cols / kPieceSize<T>;
  switch (p.shared) {
    case Shared::kTensor:
      return LaunchTensor<T>(p, row_pieces, stream);
    case Shared::kRow:
      if (p.rows == 0) return cudaSuccess;
      return LaunchRows<T, Shared::kRow>(p, row_pieces, 0, stream);
    case Shared::kGroup:
      if (p.rows == 0 || p.cols == 0) return cudaSuccess;
      return LaunchRows<T, Shared::kGroup>(p, row_pieces, 0, stream);
    case Shared::kBlock:
      return LaunchBlocks<T>(p, row_pieces, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t LaunchQuantize(const QuantizeParams& params, cudaStream_t stream) {
  QuantizeParams p = params;
  bool scatter = p.slot_to_row != nullptr;
  if (!scatter) {  // each row goes to one place, its own
    p.top_k = 1;
    p.num_out_rows = p.batch * p.rows;
  }
  if (p.batch == 0) return cudaSuccess;
  if ((p.early_x && p.num_rows != nullptr) || p.rows > kMaxInt / p.batch ||
      p.num_out_rows > kMaxInt || p.cols > kMaxInt || p.top_k > kMaxInt ||
      p.cols * ElementSize(p.dtype) % 16 != 0 ||
      (scatter && (p.batch != 1 || p.shared == Shared::kBlock))) {
    return cudaErrorInvalidValue;
  }
  switch (p.dtype) {
    case DType::kBFloat16:
      return LaunchType<__nv_bfloat16>(p, stream);
    case DType::kFloat16:
      return LaunchType<__half>(p, stream);
    case DType::kFloat32:
      return LaunchType<float>(p, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace jaxmoe
