// Launcher of route: the experts of every token and their weights, by any rule of jaxmoe/_route.py.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/common/types.h"

namespace jaxmoe {

inline constexpr int64_t kRouteMaxExperts = 1024;

enum class RouteScore : int32_t { kLogits, kSoftmax, kSigmoid, kSqrtSoftplus };
enum class RouteNormalize : int32_t { kNone, kSoftmax, kSum, kClampedSum };
enum class RouteGroupValue : int32_t { kTop2, kMax };

template <>
struct EnumNames<RouteScore> {
  static constexpr const char* kAll[] = {"logits", "softmax", "sigmoid", "sqrtsoftplus"};
};

template <>
struct EnumNames<RouteNormalize> {
  static constexpr const char* kAll[] = {"none", "softmax", "sum", "clamped_sum"};
};

template <>
struct EnumNames<RouteGroupValue> {
  static constexpr const char* kAll[] = {"top2", "max"};
};

// Rule of jaxmoe/_route.py.
struct RouteRule {
  RouteScore score;
  bool by_score;
  RouteNormalize normalize;
  float epsilon;
  float scale;
  RouteGroupValue group_value;
  int num_groups;  // 1: no groups
  int top_groups;
  float masked_value;
};

struct RouteParams {
  const void* logits;  // [T,E], aligned to four elements
  const void* bias;    // [E], aligned to four elements, or nullptr
  // T tokens one after the other, S = num_shared_experts.
  int32_t* expert_ids;  // [T,K+S], falling keys, ties to the smaller id, -1 where none is left
  float* weights;       // [T,K+S], 0 where the id is -1
  DType dtype;          // of logits
  DType bias_dtype;
  RouteRule rule;
  int64_t num_tokens;   // T
  int64_t num_experts;  // 1 <= E <= kRouteMaxExperts, a multiple of num_groups
  int64_t top_k;        // 1 <= K <= E
  // The last columns: ids E, E+1, ..., E+S-1 with weight 1.
  int64_t num_shared_experts;
  // Number of valid tokens in each entry of `entry_tokens` tokens. Later tokens of an entry are
  // padding: ids -1, weights 0. nullptr: no token is padding.
  const int32_t* num_valid;
  int64_t entry_tokens;
  bool pdl;
};

cudaError_t LaunchRoute(const RouteParams& params, cudaStream_t stream);

}  // namespace jaxmoe
