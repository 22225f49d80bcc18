// Device code of route: the logits of a token on the lanes of a warp, their scores and their order.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include <cstdint>

#include "csrc/kernels/route.h"

namespace jaxmoe {

inline constexpr int kRouteLanes = 32;
inline constexpr unsigned kRouteFullMask = 0xffffffffu;

// Below every key: NaN, experts past E or of rejected groups, and those already chosen.
inline constexpr int kRouteNoKey = INT32_MIN;

// How the experts lie on the lanes.
struct RouteShape {
  int num_experts;
  int top_k;
  int columns;          // of ids and weights: those of shared experts too
  int per_lane;         // v
  bool quads;           // lanes and rows begin at multiples of four experts
  int lanes_per_group;  // 0: groups do not consist of whole lanes, or there are none
};

// The experts [first, end) of a lane.
struct RouteLane {
  int index;
  int first;
  int end;
};

// Integer of the same order as a float; -0 and 0 are equal, NaN is kRouteNoKey.
// NOTE: the subtraction turns either zero into 0 and every NaN into 0x7fffffff, which as -x is the
// last in order: neither costs a comparison. In assembler, because a compiler may fold 0 - NaN to
// another NaN.
__device__ __forceinline__ int OrderKey(float x) {
  int key;
  float negative;
  asm("sub.f32 %0, 0f00000000, %1;" : "=f"(negative) : "f"(x));
  int bits = __float_as_int(negative);
  // ~(bits ^ (sign & 0x7fffffff))
  asm("lop3.b32 %0, %1, %2, 0x7fffffff, 0x87;" : "=r"(key) : "r"(bits), "r"(bits >> 31));
  return key;
}

__device__ __forceinline__ float KeyValue(int key) {
  return __int_as_float(key ^ (key >> 31 & 0x7fffffff));
}

__device__ __forceinline__ float WarpSum(float value) {
#pragma unroll
  for (int step = kRouteLanes / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(kRouteFullMask, value, step);
  }
  return value;
}

// The largest that is not NaN; NaN if there is none.
__device__ __forceinline__ float WarpMax(float value) {
  return KeyValue(__reduce_max_sync(kRouteFullMask, OrderKey(value)));
}

// Subtracted before exp: the largest value, but 0 for -inf, so that exp(-inf) = 0 and not NaN.
__device__ __forceinline__ float SoftmaxShift(float largest) {
  return largest == -CUDART_INF_F ? 0.0f : largest;
}

// Denominator of a sum: all terms 0 stay 0.
__device__ __forceinline__ float NonZero(float sum) { return sum == 0.0f ? 1.0f : sum; }

// 1 / x for x in [1,2], to one ulp.
__device__ __forceinline__ float FastReciprocal(float x) {
#ifdef __CUDA_ARCH__
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x));
  return x;
#else
  return 1.0f / x;
#endif
}

// Four consecutive elements, one load.
template <typename T>
struct alignas(4 * sizeof(T)) Quad {
  T at[4];
};

// The experts of a lane in a row; kMasked: NaN past them, otherwise anything. All loads are in
// flight at once; where nothing is masked nor converted, they still are at the end.
template <bool kMasked, typename T, int kPerLane>
__device__ __forceinline__ void LoadLane(const T* row,
                                         RouteLane lane,
                                         const RouteShape& shape,
                                         float (&x)[kPerLane]) {
  int num_experts = shape.num_experts;
  if constexpr (kPerLane % 4 == 0) {
    if (shape.quads) {
      Quad<T> quad[kPerLane / 4];
#pragma unroll
      for (int i = 0; i < kPerLane / 4; ++i) {
        int at = min(lane.first + 4 * i, num_experts - 4);
        quad[i] = *reinterpret_cast<const Quad<T>*>(row + at);
      }
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        x[i] = static_cast<float>(quad[i / 4].at[i % 4]);
        bool all_full = !kMasked || num_experts == kPerLane * kRouteLanes;
        if (!all_full && lane.first + i / 4 * 4 >= lane.end) x[i] = CUDART_NAN_F;
      }
      return;
    }
  }
  T value[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) value[i] = row[min(lane.first + i, num_experts - 1)];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    bool here = !kMasked || lane.first + i < lane.end;
    x[i] = here ? static_cast<float>(value[i]) : CUDART_NAN_F;
  }
}

template <bool kMasked, int kPerLane>
__device__ __forceinline__ void LoadLane(const void* base,
                                         DType dtype,
                                         int64_t offset,
                                         RouteLane lane,
                                         const RouteShape& shape,
                                         float (&x)[kPerLane]) {
  if (dtype == DType::kFloat32) {
    auto* row = static_cast<const float*>(base) + offset;
    LoadLane<kMasked>(row, lane, shape, x);
  } else if (dtype == DType::kBFloat16) {
    auto* row = static_cast<const __nv_bfloat16*>(base) + offset;
    LoadLane<kMasked>(row, lane, shape, x);
  } else {
    auto* row = static_cast<const __half*>(base) + offset;
    LoadLane<kMasked>(row, lane, shape, x);
  }
}

// Softmax over the logits of a token that are not NaN: exp(x - shift) * factor.
struct SoftmaxScale {
  float shift;
  float factor;
};

template <int kPerLane>
__device__ __forceinline__ SoftmaxScale SoftmaxOver(const float (&x)[kPerLane]) {
  float largest = x[0];
#pragma unroll
  for (int i = 1; i < kPerLane; ++i) largest = fmaxf(largest, x[i]);
  float shift = SoftmaxShift(WarpMax(largest));
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) sum += expf(fmaxf(x[i], -CUDART_INF_F) - shift);
  return {shift, 1.0f / NonZero(WarpSum(sum))};
}

template <RouteScore kScore>
__device__ __forceinline__ float Score(float x, SoftmaxScale softmax) {
  if constexpr (kScore == RouteScore::kSoftmax) {
    return expf(x - softmax.shift) * softmax.factor;
  } else if constexpr (kScore == RouteScore::kSigmoid) {
    float e = expf(-fabsf(x));
    float of_positive = FastReciprocal(1.0f + e);
    return x >= 0.0f ? of_positive : e * of_positive;
  } else if constexpr (kScore == RouteScore::kSqrtSoftplus) {
    // Far below 0 softplus(x) is exp(x) to the last bit.
    if (x < -20.0f) return expf(0.5f * x);
    return sqrtf(fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))));
  } else {
    return x;
  }
}

// x becomes its scores.
template <int kPerLane>
__device__ __forceinline__ void ToScores(RouteScore score,
                                         SoftmaxScale softmax,
                                         float (&x)[kPerLane]) {
  if (score == RouteScore::kSoftmax) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) x[i] = Score<RouteScore::kSoftmax>(x[i], softmax);
  } else if (score == RouteScore::kSigmoid) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) x[i] = Score<RouteScore::kSigmoid>(x[i], softmax);
  } else if (score == RouteScore::kSqrtSoftplus) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) x[i] = Score<RouteScore::kSqrtSoftplus>(x[i], softmax);
  }
}

}  // namespace jaxmoe
