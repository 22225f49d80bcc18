// Launches finalize for the element type, 16 bytes a thread where rows allow it.
#include <algorithm>

#include "csrc/kernels/finalize.cuh"

namespace jaxmoe {

namespace {

template <typename T, int kSize, int kUnroll>
cudaError_t LaunchFinalizeSized(const FinalizeParams& p, int sm_count, cudaStream_t stream) {
  int64_t row_pieces = p.hidden / kSize;
  int64_t pieces = p.num_tokens * row_pieces;
  // Small problems: small blocks, over as many SMs as possible.
  int64_t threads =
      std::clamp<int64_t>(RoundUp(CeilDiv(pieces, sm_count), 32), 32, kFinalizeMaxThreads);
  int64_t blocks = CeilDiv(pieces, threads);
  if (blocks > kMaxInt) return cudaErrorInvalidConfiguration;
  return LaunchKernel(FinalizeKernel<T, kSize, kUnroll>,
                      dim3(static_cast<unsigned>(blocks)),
                      dim3(static_cast<unsigned>(threads)),
                      0,
                      stream,
                      p.pdl,
                      p,
                      static_cast<unsigned>(row_pieces));
}

template <typename T>
cudaError_t LaunchFinalizeType(const FinalizeParams& p, cudaStream_t stream) {
  int sm_count = 0;
  JAXMOE_RETURN_IF_CUDA_ERROR(GetSmCount(&sm_count));
  uintptr_t bits = reinterpret_cast<uintptr_t>(p.rows) | reinterpret_cast<uintptr_t>(p.residual) |
                   reinterpret_cast<uintptr_t>(p.y) |
                   static_cast<uintptr_t>(p.hidden * static_cast<int64_t>(sizeof(T)));
  constexpr int kSize = 16 / sizeof(T);
  if (bits % 16 != 0) return LaunchFinalizeSized<T, 1, 8>(p, sm_count, stream);
  const int64_t at_once =
      int64_t{FinalizeBlocksPerSm(kFewTokensUnroll)} * kFinalizeMaxThreads * sm_count;
  if (p.num_tokens * (p.hidden / kSize) <= at_once) {
    return LaunchFinalizeSized<T, kSize, kFewTokensUnroll>(p, sm_count, stream);
  }
  if (p.top_k <= 2) return LaunchFinalizeSized<T, kSize, 2>(p, sm_count, stream);
  return LaunchFinalizeSized<T, kSize, 4>(p, sm_count, stream);
}

}  // namespace

cudaError_t LaunchFinalize(const FinalizeParams& params, cudaStream_t stream) {
  if (params.num_rows > kMaxInt || params.hidden > kMaxInt || params.top_k > kMaxInt) {
    return cudaErrorInvalidValue;
  }
  if (params.num_tokens == 0 || params.hidden == 0) return cudaSuccess;
  switch (params.dtype) {
    case DType::kBFloat16:
      return LaunchFinalizeType<__nv_bfloat16>(params, stream);
    case DType::kFloat16:
      return LaunchFinalizeType<__half>(params, stream);
    case DType::kFloat32:
      return LaunchFinalizeType<float>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace jaxmoe
