// Launches round_tokens for its rule and element type.
#include "csrc/kernels/round_tokens.cuh"

namespace jaxmoe {

namespace {

template <typename T, TokenRule kRule, bool kCodes = false>
cudaError_t LaunchRule(const RoundTokensParams& p, cudaStream_t stream) {
  const int64_t pieces = p.cols / kPieceSize<T>;
  QuantRowThreads threads;
  JAXMOE_RETURN_IF_CUDA_ERROR(ThreadsOfRows(p.rows, pieces, &threads));
  return LaunchKernel(RoundTokensKernel<T, kRule, kCodes>,
                      threads.grid,
                      threads.block,
                      0,
                      stream,
                      p.pdl,
                      p,
                      static_cast<unsigned>(pieces),
                      threads.chunks);
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
  if ((p.early_x && p.group_offsets != nullptr) || p.rows > kMaxInt || p.cols > kMaxInt ||
      p.num_out_rows > kMaxInt || p.top_k > kMaxInt || p.cols % RoundedTogether(p.rule) != 0 ||
      (p.static_scales != nullptr && p.num_static != 1 && !grouped) ||
      (p.codes && (p.rule != TokenRule::kE4M3 || p.cols % 128 != 0 || p.cols > kMaxCodedCols)) ||
      (p.plans && (p.scatters || p.rows * p.top_k > 32))) {
    return cudaErrorInvalidValue;
  }
  const bool bf16 = p.dtype == DType::kBFloat16;
  if (!bf16 && p.dtype != DType::kFloat16) return cudaErrorInvalidValue;
  if (p.numbers == nullptr && p.rule != TokenRule::kNone) return cudaErrorInvalidValue;
  switch (p.rule) {
    case TokenRule::kNone:
      if (p.given_scales == nullptr || (p.num_given != 1 && p.num_given != p.rows)) {
        return cudaErrorInvalidValue;
      }
      return bf16 ? LaunchRule<__nv_bfloat16, TokenRule::kNone>(p, stream)
                  : LaunchRule<__half, TokenRule::kNone>(p, stream);
    case TokenRule::kE4M3:
      if (p.codes && bf16) return LaunchRule<__nv_bfloat16, TokenRule::kE4M3, true>(p, stream);
      if (p.codes) return cudaErrorInvalidValue;
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
