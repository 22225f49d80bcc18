// Launcher of source_groups: the groups of products that take some sources' tokens together.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxmoe {

inline constexpr int kMaxSourceRanges = 32;

// Sources that follow each other.
struct SourceRange {
  int first;
  int count;
};

// Where the rows of expert e of source s are those from offsets[e * num_sources + s] to the next,
// those of a range of sources are adjacent: starts[i,e] and sizes[i,e] of range i.
struct SourceGroupsParams {
  const int32_t* offsets;  // [num_experts * num_sources + 1]
  int32_t* starts;         // [num_ranges, num_experts]
  int32_t* sizes;          // [num_ranges, num_experts]
  int num_experts;
  int num_sources;
  int num_ranges;
  SourceRange ranges[kMaxSourceRanges];
  bool pdl;
};

cudaError_t LaunchSourceGroups(const SourceGroupsParams& params, cudaStream_t stream);

}  // namespace jaxmoe
