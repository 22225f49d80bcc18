// Launches round_tokens: threads and blocks for rows of one length.
#include <algorithm>

#include "csrc/kernels/round_tokens.cuh"

namespace jaxmoe {

namespace {

constexpr int64_t kMaxInt = 0x7fffffff;

template <typename T, TokenRule kRule>
cudaError_t LaunchRule(const RoundTokensParams& p, cudaStream_t stream) {
  constexpr int64_t kMaxWarps = kQuantMaxThreads / 32;
  constexpr int64_t kWarpPieces = 32 * kQuantPieces;
  constexpr int64_t kUsualWarps = 4;  // of a block of short rows: small ones end at many times
  int sm_count = 0;
  JAXMOE_RETURN_IF_CUDA_ERROR(GetSmCount(&sm_count));
  const int64_t pieces = p.cols / kPieceSize<T>;
  const int64_t chunks = std::max<int64_t>(1, CeilDiv(pieces, kMaxWarps * kWarpPieces));
  const int64_t warps = std::max<int64_t>(1, CeilDiv(pieces, chunks * kWarpPieces));
  // Few rows: each on an SM of its own.
  const int64_t block_rows =
      std::clamp<int64_t>(p.rows / sm_count, 1, std::max<int64_t>(1, kUsualWarps / warps));
  return LaunchKernel(RoundTokensKernel<T, kRule>,
                      dim3(static_cast<unsigned>(CeilDiv(p.rows, block_rows))),
                      dim3(static_cast<unsigned>(32 * warps), static_cast<unsigned>(block_rows)),
                      0,
                      stream,
                      p.pdl,
                      p,
                      static_cast<unsigned>(pieces),
                      static_cast<unsigned>(chunks));
}

}  // namespace

cudaError_t LaunchRoundTokens(const RoundTokensParams& params, cudaStream_t stream) {
  RoundTokensParams p = params;
  if (p.slot_to_row == nullptr && !p.plans) {  // each row goes to one place, its own
    p.top_k = 1;
    p.num_out_rows = p.rows;
  }
  if (p.rows == 0 || p.cols == 0) return cudaSuccess;
  const bool grouped = p.group_offsets != nullptr && p.num_static == p.num_groups;
  if (p.rows > kMaxInt || p.cols > kMaxInt || p.num_out_rows > kMaxInt || p.top_k > kMaxInt ||
      p.cols % RoundedTogether(p.rule) != 0 ||
      (p.static_scales != nullptr && p.num_static != 1 && !grouped) ||
      (p.plans && (p.scatters || p.rows * p.top_k > 32))) {
    return cudaErrorInvalidValue;
  }
  const bool bf16 = p.dtype == DType::kBFloat16;
  if (!bf16 && p.dtype != DType::kFloat16) return cudaErrorInvalidValue;
  switch (p.rule) {
    case TokenRule::kE4M3:
      return bf16 ? LaunchRule<__nv_bfloat16, TokenRule::kE4M3>(p, stream)
                  : LaunchRule<__half, TokenRule::kE4M3>(p, stream);
    case TokenRule::kNvfp4:
      if (p.static_scales == nullptr) return cudaErrorInvalidValue;
      return bf16 ? LaunchRule<__nv_bfloat16, TokenRule::kNvfp4>(p, stream)
                  : LaunchRule<__half, TokenRule::kNvfp4>(p, stream);
    case TokenRule::kMxfp4:  // fp16 does not hold its numbers
      return bf16 ? LaunchRule<__nv_bfloat16, TokenRule::kMxfp4>(p, stream) : cudaErrorInvalidValue;
    case TokenRule::kMxfp8:
      return bf16 ? LaunchRule<__nv_bfloat16, TokenRule::kMxfp8>(p, stream) : cudaErrorInvalidValue;
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace jaxmoe
