// Device code of route: the K best experts of every token and their weights, in fp32.
//
// Problem: token t has E logits. Order by score, descending, ties to the smaller id; scores rise
//   with the logit, so logits are compared. NaN is no score: it is never chosen, and a token with
//   fewer than K scores gets id -1 and weight 0 in the rest. -inf is the lowest score.
// Threads: one warp per token, at most 8 tokens a block; lane l holds the logits l, l + 32, ... as
// integers
//   of the same order. K rounds of a warp-wide maximum (redux.sync), then of the smallest id that
//   has it. No shared memory.
// Bytes: T E s + 8 T K; T = 16384, E = 256, K = 8, fp32: 17.8 MB, 4.2 us. Instructions: about
//   K * (E / 32 + 40) a token, 3 us at those sizes over 132 SMs; predicted 8 us.
// Why this shape: a sort does all of E for the sake of K; a thread per token needs E registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include <cstdint>

#include "csrc/common/launch.h"
#include "csrc/kernels/route.h"

namespace jaxmoe {

inline constexpr int kRouteLanes = 32;
inline constexpr int kRouteMaxTokensPerBlock = 8;
inline constexpr unsigned kRouteFullMask = 0xffffffffu;

// Key 0 is below every score: NaN, experts past E, and experts already chosen.
inline constexpr uint32_t kRouteNoKey = 0;

// Unsigned integer of the same order as the logit; -0 and 0 are equal.
__device__ __forceinline__ uint32_t OrderedKey(float logit) {
  if (logit != logit) return kRouteNoKey;
  uint32_t bits = __float_as_uint(logit + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float KeyLogit(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

__device__ __forceinline__ float WarpSum(float value) {
#pragma unroll
  for (int step = kRouteLanes / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(kRouteFullMask, value, step);
  }
  return value;
}

// Subtracted before exp: the largest value, but 0 for -inf, so that exp(-inf) = 0 and not NaN.
__device__ __forceinline__ float SoftmaxShift(float largest) {
  return largest == -CUDART_INF_F ? 0.0f : largest;
}

// Denominator of a sum of non-negative numbers: all of them 0 stay 0.
__device__ __forceinline__ float NonZero(float sum) { return sum == 0.0f ? 1.0f : sum; }

// kPerLane: logits a lane holds, 32 * kPerLane >= E.
template <typename T, int kPerLane>
__global__ void __launch_bounds__(kRouteLanes* kRouteMaxTokensPerBlock)
    RouteKernel(RouteParams params) {
  GridDependencyWait();
  GridDependencyLaunch();

  const int lane = threadIdx.x % kRouteLanes;
  const int64_t token =
      static_cast<int64_t>(blockIdx.x) * (blockDim.x / kRouteLanes) + threadIdx.x / kRouteLanes;
  if (token >= params.num_tokens) return;
  const int num_experts = static_cast<int>(params.num_experts);
  const int top_k = static_cast<int>(params.top_k);
  const T* logits = static_cast<const T*>(params.logits) + token * num_experts;

  uint32_t key[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    int expert = i * kRouteLanes + lane;
    key[i] = expert < num_experts ? OrderedKey(static_cast<float>(logits[expert])) : kRouteNoKey;
  }
  uint32_t lane_best = kRouteNoKey;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) lane_best = max(lane_best, key[i]);
  uint32_t best = __reduce_max_sync(kRouteFullMask, lane_best);
  const float shift = SoftmaxShift(KeyLogit(best));  // unused if there is no score

  float sum = 0.0f;  // of the softmax over all logits
  if (params.score == RouteScore::kSoftmax) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (key[i] != kRouteNoKey) sum += expf(KeyLogit(key[i]) - shift);
    }
    sum = NonZero(WarpSum(sum));
  }

  // Round k leaves its result in lane k % 32, entry k / 32.
  uint32_t chosen_key[kPerLane];
  int chosen[kPerLane];
#pragma unroll
  for (int entry = 0; entry < kPerLane; ++entry) {
    chosen_key[entry] = kRouteNoKey;
    chosen[entry] = -1;
    int rounds = min(top_k - entry * kRouteLanes, kRouteLanes);
    for (int k = 0; k < rounds && best != kRouteNoKey; ++k) {
      unsigned candidate = 0xffffffffu;
#pragma unroll
      for (int i = kPerLane - 1; i >= 0; --i) {
        if (key[i] == best) candidate = i * kRouteLanes + lane;
      }
      unsigned expert = __reduce_min_sync(kRouteFullMask, candidate);
      if (lane == k) {
        chosen_key[entry] = best;
        chosen[entry] = static_cast<int>(expert);
      }
      lane_best = kRouteNoKey;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (expert == static_cast<unsigned>(i * kRouteLanes + lane)) key[i] = kRouteNoKey;
        lane_best = max(lane_best, key[i]);
      }
      best = __reduce_max_sync(kRouteFullMask, lane_best);
    }
  }

  float score[kPerLane];
#pragma unroll
  for (int entry = 0; entry < kPerLane; ++entry) {
    float logit = KeyLogit(chosen_key[entry]);
    switch (params.score) {
      case RouteScore::kLogits:
        score[entry] = logit;
        break;
      case RouteScore::kSoftmax:
        score[entry] = expf(logit - shift) / sum;
        break;
      case RouteScore::kSigmoid:
        score[entry] = 1.0f / (1.0f + expf(-logit));
        break;
    }
  }
  if (params.normalize != RouteNormalize::kNone) {
    // The first choice, in lane 0, has the largest score.
    float selected_shift = SoftmaxShift(__shfl_sync(kRouteFullMask, score[0], 0));
    float selected_sum = 0.0f;
#pragma unroll
    for (int entry = 0; entry < kPerLane; ++entry) {
      if (params.normalize == RouteNormalize::kSoftmaxSelected) {
        score[entry] = expf(score[entry] - selected_shift);
      }
      if (chosen[entry] >= 0) selected_sum += score[entry];
    }
    selected_sum = NonZero(WarpSum(selected_sum));
#pragma unroll
    for (int entry = 0; entry < kPerLane; ++entry) score[entry] /= selected_sum;
  }
  int32_t* expert_ids = params.expert_ids + token * top_k;
  float* weights = params.weights + token * top_k;
#pragma unroll
  for (int entry = 0; entry < kPerLane; ++entry) {
    int k = entry * kRouteLanes + lane;
    if (k >= top_k) break;
    expert_ids[k] = chosen[entry];
    weights[k] = chosen[entry] >= 0 ? score[entry] : 0.0f;
  }
}

}  // namespace jaxmoe
