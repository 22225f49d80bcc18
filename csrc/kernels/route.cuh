// Device code of route: the K best experts of every token and their weights, in fp32.
//
// Problem: token t has E logits. An expert's key is its logit or its score, plus a bias; keys
//   outside the best groups of experts are replaced. The K largest keys are chosen, ties to the
//   smaller id; NaN is no key and never chosen. Weights are the scores of the chosen, normalized.
//   The exact rules are `route_xla` and `weights_xla` of jaxmoe/_route.py.
// Threads: one warp per token, at most 4 tokens a block, 2 above 512 experts. Lane l
//   holds the experts [l v, (l + 1) v), v = ceil(E / 32), as integers of the same order as the
//   key, so that among equal keys the lowest lane has the smallest id.
// Selection: each lane sorts its keys; K rounds of a warp-wide maximum (redux.sync) over the heads
//   take one each. The K best keys lie in the K lanes of the best heads: for few choices
//   (kWidth < kPerLane) only those lanes' keys are dealt out again, kWidth a lane. Of them hardly
//   more than K are as large as the least of the K heads (E = 256, K = 8: 9 in the mean); those go
//   to a lane each, which counts the larger ones. More than 32, of equal keys: sorted and taken in
//   rounds as above.
// Shared memory: at most 8.3 KiB a warp, 16.3 above 512 experts; 1.0 KiB by logit and 2.1 by score
//   where E <= 256 and K <= 8.
// Bytes: T E s + 8 T K; T = 16384, E = 256, K = 8, fp32: 17.8 MB, 4.2 us. Instructions of a token:
//   about 370 by logit, 560 by sigmoid and groups (estimated), more than half of them on the
//   integer pipe, which takes two a cycle and not four: 7 and 9 us on 132 SMs at 1.98 GHz.
// Why this shape: a sort does all of E for the sake of K; recomputing a lane's best key in every
//   round costs 3 v instructions of all lanes, 27 against 14 at v = 8; a round is a chain of about
//   70 cycles, counting larger keys is K times 3 instructions that wait for nothing.
#pragma once

#include <cstdint>

#include "csrc/common/launch.h"
#include "csrc/kernels/route_score.cuh"

namespace jaxmoe {

// Tokens of a block, whose shared memory is static.
template <int kPerLane>
inline constexpr int kRouteMaxWarps = kPerLane <= 16 ? 4 : 2;
inline constexpr int kRouteRegisterWidth = 4;  // longer sorted lists are kept in shared memory
inline constexpr int kNearStep = 4;            // candidates compared at a time

// The lanes with the K largest of the warp's values, ties to the lower lane; K <= 32. None of the K
// is below `bound`.
__device__ __forceinline__ unsigned BestLanes(int value, int top_k, int lane, int* bound) {
  int least = kRouteNoKey;
  int rest = value;
#pragma unroll 4
  for (int k = 0; k < top_k; ++k) {
    least = __reduce_max_sync(kRouteFullMask, rest);
    if (rest == least) rest = kRouteNoKey;
  }
  *bound = least;
  unsigned lanes = __ballot_sync(kRouteFullMask, value >= least);
  while (__popc(lanes) > top_k) {  // equal values
    bool in = (lanes >> lane & 1) != 0;
    least = __reduce_min_sync(kRouteFullMask, in ? value : INT32_MAX);
    unsigned tied = __ballot_sync(kRouteFullMask, in && value == least);
    lanes &= ~(0x80000000u >> __clz(static_cast<int>(tied)));
  }
  return lanes;
}

// Key of an expert outside the best groups.
__device__ __forceinline__ int MaskedKey(const RouteRule& rule, int key) {
  bool chosen_never = key == kRouteNoKey || rule.masked_value == -CUDART_INF_F;
  return chosen_never ? kRouteNoKey : OrderKey(rule.masked_value);
}

// Key of a group with these largest two keys; never kRouteNoKey.
__device__ __forceinline__ int GroupKey(const RouteRule& rule, int best, int second) {
  float value = best == kRouteNoKey ? -CUDART_INF_F : KeyValue(best);
  bool sum = rule.group_value == RouteGroupValue::kTop2 && second != kRouteNoKey;
  return max(OrderKey(sum ? value + KeyValue(second) : value), kRouteNoKey + 1);
}

// The two largest of [kFirst, kFirst + kCount) keys, by halves.
template <int kFirst, int kCount, int kPerLane>
__device__ __forceinline__ void BestTwo(const int (&key)[kPerLane], int* best, int* second) {
  if constexpr (kCount == 1) {
    *best = key[kFirst];
    *second = kRouteNoKey;
  } else if constexpr (kCount == 2) {
    *best = max(key[kFirst], key[kFirst + 1]);
    *second = min(key[kFirst], key[kFirst + 1]);
  } else {
    int left, left_second, right, right_second;
    BestTwo<kFirst, kCount / 2>(key, &left, &left_second);
    BestTwo<kFirst + kCount / 2, kCount - kCount / 2>(key, &right, &right_second);
    *best = max(left, right);
    *second = max(max(left_second, right_second), min(left, right));
  }
}

// Masks the keys outside the best groups, each of which is `lanes` whole lanes, a power of two.
template <int kPerLane>
__device__ __forceinline__ void KeepGroupsOfLanes(const RouteRule& rule,
                                                  int lanes,
                                                  int lane,
                                                  int (&key)[kPerLane]) {
  int best, second;
  BestTwo<0, kPerLane>(key, &best, &second);
#pragma unroll 1
  for (int step = 1; step < lanes; step *= 2) {
    int other = __shfl_xor_sync(kRouteFullMask, best, step);
    int other_second = __shfl_xor_sync(kRouteFullMask, second, step);
    second = max(max(second, other_second), min(best, other));
    best = max(best, other);
  }
  // A group's lanes share comparing it with the others, two at a time: no round waits for another.
  int value = GroupKey(rule, best, second);
  int first = lane & ~(lanes - 1);
  unsigned mine = ((1u << lanes) - 1) << first;
  int better = 0;
  for (int step = 0; step < rule.num_groups; step += 2 * lanes) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int other = step + i * lanes + (lane - first);
      int theirs = __shfl_sync(kRouteFullMask, value, other * lanes);
      bool wins = theirs > value || (theirs == value && other * lanes < first);
      wins = wins && other < rule.num_groups;
      better += __popc(__ballot_sync(kRouteFullMask, wins) & mine);
    }
  }
  bool kept = better < rule.top_groups;
  if (rule.masked_value == -CUDART_INF_F) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) key[i] = kept ? key[i] : kRouteNoKey;
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) key[i] = kept ? key[i] : MaskedKey(rule, key[i]);
  }
}

// The same for groups that begin anywhere; slow with many. `keys` and `values` are shared, [E].
template <int kPerLane>
__device__ __forceinline__ void KeepGroups(const RouteRule& rule,
                                           int num_experts,
                                           RouteLane lane,
                                           int* keys,
                                           int* values,
                                           int (&key)[kPerLane]) {
  int size = num_experts / rule.num_groups;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (lane.first + i < lane.end) keys[lane.first + i] = key[i];
  }
  __syncwarp();
  for (int group = lane.index; group < rule.num_groups; group += kRouteLanes) {
    int best = kRouteNoKey;
    int second = kRouteNoKey;
    for (int i = group * size; i < (group + 1) * size; ++i) {
      second = max(second, min(best, keys[i]));
      best = max(best, keys[i]);
    }
    values[group] = GroupKey(rule, best, second);
  }
  __syncwarp();
  int* kept = keys;
  for (int group = lane.index; group < rule.num_groups; group += kRouteLanes) {
    int better = 0;
    for (int i = 0; i < rule.num_groups; ++i) {
      better += values[i] > values[group] || (values[i] == values[group] && i < group);
    }
    kept[group] = better < rule.top_groups;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    int expert = lane.first + i;
    if (expert < lane.end && kept[expert / size] == 0) key[i] = MaskedKey(rule, key[i]);
  }
  __syncwarp();  // the caller uses the shared memory again
}

// A key and its expert; of equal keys the smaller id is the larger item. No key, no expert: -1.
__device__ __forceinline__ int64_t MakeItem(int key, int expert) {
  uint32_t low = key == kRouteNoKey ? 0 : ~expert;
  return static_cast<int64_t>(key) << 32 | low;
}
__device__ __forceinline__ int ItemKey(int64_t item) { return static_cast<int>(item >> 32); }
__device__ __forceinline__ int ItemExpert(int64_t item) { return ~static_cast<int>(item); }

// Orders the pairs of one step of Batcher's odd-even merge sort, then those of the steps after it.
template <int kWidth, int kRun = 1, int kStep = 1>
__device__ __forceinline__ void SortItems(int64_t (&item)[kWidth]) {
  if constexpr (kRun < kWidth) {
#pragma unroll
    for (int i = kStep % kRun; i + kStep < kWidth; ++i) {
      bool apart = (i - kStep % kRun) / kStep % 2 != 0;
      if (apart || i / (2 * kRun) != (i + kStep) / (2 * kRun)) continue;
      int64_t a = item[i];
      int64_t b = item[i + kStep];
      item[i] = b > a ? b : a;
      item[i + kStep] = b > a ? a : b;
    }
    constexpr bool kLast = kStep == 1;
    SortItems<kWidth, kLast ? 2 * kRun : kRun, kLast ? 2 * kRun : kStep / 2>(item);
  }
}

// Shared memory of one warp.
template <int kPerLane, int kWidth, bool kPlain>
struct RouteScratch {
  // A lane's keys are dealt out again if those of K lanes fit in 32 * kWidth.
  static constexpr bool kDeal = kWidth < kPerLane;
  static constexpr int kMaxTopK = kRouteLanes * kWidth / (kDeal ? kPerLane : 1);

  struct Dealt {
    int64_t near[kDeal ? kRouteLanes * kWidth + kNearStep : 1];
    int keys[kDeal ? kRouteLanes * kWidth : 1];
    int lane[kRouteLanes];
  };
  union {  // one after the other
    int groups[kPlain ? 1 : 2][kPlain ? 4 : kRouteLanes * kPerLane];
    Dealt dealt;
    int64_t sorted[kWidth > kRouteRegisterWidth ? kWidth + 1 : 1][kRouteLanes];
  };
  int expert[kMaxTopK];
  float score[kMaxTopK];
};

// Ranks candidates, one a lane, and writes the experts of the K largest in order, -1 where there is
// none left. `near` is shared, count <= 32 items and room for kNearStep more, written before by
// lanes of this warp. K <= 32.
__device__ __forceinline__ void RankNear(
    int64_t* near, int count, int top_k, int lane, int* expert) {
  constexpr int64_t kNone = static_cast<int64_t>(kRouteNoKey) * (int64_t{1} << 32);
  if (lane < kNearStep) near[count + lane] = kNone;
  __syncwarp();
  int64_t own = near[lane];
  int rank = 0;
#pragma unroll 1
  for (int first = 0; first < count; first += kNearStep) {
#pragma unroll
    for (int i = 0; i < kNearStep; ++i) rank += near[first + i] > own;
  }
  if (lane < count && rank < top_k) expert[rank] = ItemExpert(own);
  if (lane >= count && lane < top_k) expert[lane] = -1;
}

// Writes the experts of the K largest items to scratch.expert, -1 where there is none left: each
// lane sorts its own, and K rounds take the largest head.
template <int kPerLane, int kWidth, bool kPlain>
__device__ __forceinline__ void TakeInRounds(const RouteShape& shape,
                                             int lane,
                                             int64_t (&item)[kWidth],
                                             RouteScratch<kPerLane, kWidth, kPlain>& scratch) {
  constexpr int64_t kNone = static_cast<int64_t>(kRouteNoKey) * (int64_t{1} << 32);
  unsigned below = (1u << lane) - 1;
  SortItems(item);

  constexpr bool kInShared = kWidth > kRouteRegisterWidth;
  if constexpr (kInShared) {
#pragma unroll
    for (int i = 1; i < kWidth; ++i) scratch.sorted[i][lane] = item[i];
    scratch.sorted[kWidth][lane] = kNone;  // lists are read by their own lane only
  }
  int depth = 0;
#pragma unroll 4
  for (int k = 0; k < shape.top_k; ++k) {
    int head = ItemKey(item[0]);
    int best = __reduce_max_sync(kRouteFullMask, head);
    unsigned tied = __ballot_sync(kRouteFullMask, head == best);
    if (head == best && (tied & below) == 0) {
      scratch.expert[k] = ItemExpert(item[0]);
      if constexpr (kInShared) {
        depth = min(depth + 1, kWidth);
        item[0] = scratch.sorted[depth][lane];
      } else {
#pragma unroll
        for (int i = 0; i + 1 < kWidth; ++i) item[i] = item[i + 1];
        item[kWidth - 1] = kNone;
      }
    }
  }
}

// Writes the experts of the K largest keys to scratch.expert, -1 where there is none left.
template <int kPerLane, int kWidth, bool kPlain>
__device__ __forceinline__ void SelectExperts(const RouteShape& shape,
                                              int lane,
                                              const int (&key)[kPerLane],
                                              RouteScratch<kPerLane, kWidth, kPlain>& scratch) {
  int64_t item[kWidth];
  if constexpr (kWidth < kPerLane) {
    unsigned below = (1u << lane) - 1;
    int lane_best = key[0];
#pragma unroll
    for (int i = 1; i < kPerLane; ++i) lane_best = max(lane_best, key[i]);
    int bound;
    unsigned lanes = BestLanes(lane_best, shape.top_k, lane, &bound);
    bound = max(bound, kRouteNoKey + 1);
    if ((lanes >> lane & 1) != 0) {
      int rank = __popc(lanes & below);
      scratch.dealt.lane[rank] = lane;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) scratch.dealt.keys[rank * kPerLane + i] = key[i];
    }
    __syncwarp();
    int first = lane * kWidth;
    bool any = first < shape.top_k * kPerLane;
    int source = any ? scratch.dealt.lane[first / kPerLane] : 0;
    int expert = source * shape.per_lane + first % kPerLane;
    int count = 0;
    int dealt[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      dealt[i] = any ? scratch.dealt.keys[first + i] : kRouteNoKey;
      unsigned near = __ballot_sync(kRouteFullMask, dealt[i] >= bound);
      int at = count + __popc(near & below);
      if (dealt[i] >= bound) scratch.dealt.near[at] = MakeItem(dealt[i], expert + i);
      count += __popc(near);
    }
    // Hardly more than K are as large as the least of K heads, unless many keys are equal.
    if (kWidth == 1 || count <= kRouteLanes) {
      RankNear(scratch.dealt.near, count, shape.top_k, lane, scratch.expert);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) item[i] = MakeItem(dealt[i], expert + i);
      __syncwarp();
      TakeInRounds(shape, lane, item, scratch);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) item[i] = MakeItem(key[i], lane * shape.per_lane + i);
    TakeInRounds(shape, lane, item, scratch);
  }
  __syncwarp();
}

// Writes the ids and weights of a token with the experts `expert`, -1 for none; `score` is shared.
// Calls sink(column, id) for every column. kOnce: K <= 32, so that a lane has at most one choice.
template <bool kOnce, typename Sink>
__device__ __forceinline__ void WriteToken(const RouteParams& params,
                                           const RouteShape& shape,
                                           int64_t token,
                                           int lane,
                                           SoftmaxScale softmax,
                                           const int* expert,
                                           float* score,
                                           const Sink& sink) {
  const RouteRule& rule = params.rule;
  int own_id = -1;
  float own_score = 0.0f;
  auto id_of = [&](int k) { return kOnce ? own_id : expert[k]; };
  auto score_of = [&](int k) -> float& { return kOnce ? own_score : score[k]; };
  float largest = CUDART_NAN_F;
  float sum = 0.0f;
#pragma unroll 1
  for (int k = lane; k < shape.top_k; k += kRouteLanes) {
    float x[1];
    int64_t row = token * shape.num_experts;
    int id = expert[k];
    LoadLane<true>(params.logits, params.dtype, row, {lane, max(id, 0), id + 1}, shape, x);
    ToScores(rule.score, softmax, x);
    own_id = id;
    score_of(k) = x[0];  // NaN where there is no expert
    largest = fmaxf(largest, x[0]);
    if (id >= 0) sum += x[0];
    if (kOnce) break;
  }
  if (rule.normalize == RouteNormalize::kSoftmax) {
    float shift = SoftmaxShift(WarpMax(largest));
    sum = 0.0f;
#pragma unroll 1
    for (int k = lane; k < shape.top_k; k += kRouteLanes) {
      score_of(k) = expf(score_of(k) - shift);
      if (id_of(k) >= 0) sum += score_of(k);
      if (kOnce) break;
    }
  }
  float divisor = 1.0f;
  if (rule.normalize != RouteNormalize::kNone) {
    sum = WarpSum(sum);
    if (rule.normalize == RouteNormalize::kSum) sum += rule.epsilon;
    if (rule.normalize == RouteNormalize::kClampedSum && sum < rule.epsilon) sum = rule.epsilon;
    divisor = NonZero(sum);
  }
  int32_t* expert_ids = params.expert_ids + token * shape.columns;
  float* weights = params.weights + token * shape.columns;
  auto write = [&](int k, int id, float weight) {
    expert_ids[k] = id;
    weights[k] = weight;
    sink(k, id);
  };
#pragma unroll 1
  for (int k = lane; k < shape.top_k; k += kRouteLanes) {
    int id = id_of(k);
    write(k, id, id >= 0 ? score_of(k) / divisor * rule.scale : 0.0f);
    if (kOnce) break;
  }
#pragma unroll 1
  for (int k = shape.top_k + lane; k < shape.columns; k += kRouteLanes) {
    write(k, shape.num_experts + (k - shape.top_k), 1.0f);
  }
}

// True if the token is padding; then writes its ids (-1) and weights (0).
template <typename Sink>
__device__ __forceinline__ bool WritePadding(
    const RouteParams& params, const RouteShape& shape, int64_t token, int lane, const Sink& sink) {
  if (params.num_valid == nullptr) return false;
  int64_t entry = token / params.entry_tokens;
  if (token - entry * params.entry_tokens < __ldcg(params.num_valid + entry)) return false;
#pragma unroll 1
  for (int k = lane; k < shape.columns; k += kRouteLanes) {
    params.expert_ids[token * shape.columns + k] = -1;
    params.weights[token * shape.columns + k] = 0.0f;
    sink(k, -1);
  }
  return true;
}

// Routes one token, by one warp. kPerLane: logits a lane holds at most; kWidth: those it sorts;
// kPlain: the logit is the key, and there are no groups.
template <int kPerLane, int kWidth, bool kPlain, typename Sink>
__device__ __forceinline__ void RouteToken(const RouteParams& params,
                                           const RouteShape& shape,
                                           int64_t token,
                                           RouteScratch<kPerLane, kWidth, kPlain>& scratch,
                                           const Sink& sink) {
  if (WritePadding(params, shape, token, threadIdx.x % kRouteLanes, sink)) return;
  const RouteRule& rule = params.rule;
  RouteLane lane;
  lane.index = threadIdx.x % kRouteLanes;
  lane.first = lane.index * shape.per_lane;
  lane.end = min(lane.first + shape.per_lane, shape.num_experts);

  // First, as a use of the logits would wait for them.
  bool biased = !kPlain && params.bias != nullptr;
  float bias[kPerLane];
  if (biased) LoadLane<false>(params.bias, params.bias_dtype, 0, lane, shape, bias);
  float x[kPerLane];
  LoadLane<true>(params.logits, params.dtype, token * shape.num_experts, lane, shape, x);
  SoftmaxScale softmax{0.0f, 0.0f};
  if (rule.score == RouteScore::kSoftmax) softmax = SoftmaxOver(x);

  if (!kPlain && rule.by_score) ToScores(rule.score, softmax, x);
  if (biased) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) x[i] += bias[i];
  }
  int key[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) key[i] = OrderKey(x[i]);
  if constexpr (!kPlain) {
    if (rule.num_groups > 1 && shape.lanes_per_group > 0) {
      KeepGroupsOfLanes(rule, shape.lanes_per_group, lane.index, key);
    } else if (rule.num_groups > 1) {
      KeepGroups(rule, shape.num_experts, lane, scratch.groups[0], scratch.groups[1], key);
    }
  }
  SelectExperts(shape, lane.index, key, scratch);
  constexpr bool kOnce = RouteScratch<kPerLane, kWidth, kPlain>::kMaxTopK <= kRouteLanes;
  WriteToken<kOnce>(params, shape, token, lane.index, softmax, scratch.expert, scratch.score, sink);
}

template <int kPerLane, int kWidth, bool kPlain>
__global__ void __launch_bounds__(kRouteLanes* kRouteMaxWarps<kPerLane>, 1)
    RouteKernel(RouteParams params, RouteShape shape) {
  __shared__ RouteScratch<kPerLane, kWidth, kPlain> scratches[kRouteMaxWarps<kPerLane>];

  GridDependencyWait();
  GridDependencyLaunch();

  int warp = threadIdx.x / kRouteLanes;
  int64_t token = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kRouteLanes) + warp;
  if (token >= params.num_tokens) return;
  RouteToken(params, shape, token, scratches[warp], [](int, int) {});
}

}  // namespace jaxmoe
