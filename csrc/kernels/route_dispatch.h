// Choice of the routing kernel's instance for a problem.
#pragma once

#include <type_traits>

#include "csrc/kernels/route.h"
#include "csrc/kernels/route_score.cuh"

namespace jaxmoe {

// True if route's kernels take these sizes.
inline bool RouteIsKnown(const RouteParams& p) {
  return p.num_experts >= 1 && p.num_experts <= kRouteMaxExperts && p.top_k >= 1 &&
         p.top_k <= p.num_experts && p.num_shared_experts >= 0 && p.rule.num_groups >= 1 &&
         p.num_experts % p.rule.num_groups == 0;
}

inline RouteShape MakeRouteShape(const RouteParams& p) {
  RouteShape shape{};
  shape.num_experts = static_cast<int>(p.num_experts);
  shape.top_k = static_cast<int>(p.top_k);
  shape.columns = static_cast<int>(p.top_k + p.num_shared_experts);
  shape.per_lane = static_cast<int>(CeilDiv(p.num_experts, kRouteLanes));
  shape.quads = shape.per_lane % 4 == 0 && p.num_experts % 4 == 0;
  bool whole = p.num_experts % kRouteLanes == 0 && kRouteLanes % p.rule.num_groups == 0;
  shape.lanes_per_group = whole ? kRouteLanes / p.rule.num_groups : 0;
  return shape;
}

// Returns launch.template Run<kPerLane, kWidth, kPlain>(), see RouteToken.
template <typename Launch>
cudaError_t DispatchRoute(const RouteParams& p, const RouteShape& shape, const Launch& launch) {
  bool plain = !p.rule.by_score && p.bias == nullptr && p.rule.num_groups == 1;
  auto sized = [&](auto per_lane, auto width) {
    constexpr int kPerLane = decltype(per_lane)::value;
    constexpr int kWidth = decltype(width)::value;
    return plain ? launch.template Run<kPerLane, kWidth, true>()
                 : launch.template Run<kPerLane, kWidth, false>();
  };
  std::integral_constant<int, 1> one;
  std::integral_constant<int, 2> two;
  std::integral_constant<int, 4> four;
  std::integral_constant<int, 8> eight;
  std::integral_constant<int, 16> sixteen;
  std::integral_constant<int, 32> all;
  if (shape.per_lane <= 1) return sized(one, one);
  if (shape.per_lane <= 2) return sized(two, two);
  if (shape.per_lane <= 4) return shape.top_k <= 8 ? sized(four, one) : sized(four, four);
  if (shape.per_lane <= 8) return shape.top_k <= 8 ? sized(eight, two) : sized(eight, eight);
  if (shape.per_lane <= 16) {
    return shape.top_k <= 16 ? sized(sixteen, eight) : sized(sixteen, sixteen);
  }
  return shape.top_k <= 16 ? sized(all, sixteen) : sized(all, all);
}

}  // namespace jaxmoe
