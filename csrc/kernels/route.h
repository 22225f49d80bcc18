// Launcher of route: top-k experts and their weights for every token.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/common/types.h"

namespace jaxmoe {

inline constexpr int64_t kRouteMaxExperts = 512;

enum class RouteScore : int32_t { kLogits = 0, kSoftmax = 1, kSigmoid = 2 };
enum class RouteNormalize : int32_t { kNone = 0, kSoftmaxSelected = 1, kDivideBySum = 2 };

struct RouteParams {
  const void* logits;   // [T,E]
  int32_t* expert_ids;  // [T,K], descending score, ties to the smaller id, -1 where none is left
  float* weights;       // [T,K], 0 where the id is -1
  DType dtype;          // of logits
  RouteScore score;
  RouteNormalize normalize;
  int64_t num_tokens;   // T
  int64_t num_experts;  // 1 <= E <= kRouteMaxExperts
  int64_t top_k;        // 1 <= K <= E
  bool pdl;
};

cudaError_t LaunchRoute(const RouteParams& params, cudaStream_t stream);

}  // namespace jaxmoe
