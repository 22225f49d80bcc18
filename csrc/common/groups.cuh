// The rows of a group, read from the caller's device memory.
#pragma once

#include <cstdint>

namespace jaxmoe {

struct GroupRows {
  int start;  // among the rows of all batches
  int size;
};

// Rows of group `g`. Starts and sizes may hold anything: they are clamped to the rows that exist,
// so that garbage reads and writes nothing out of bounds. Args: MoeGemmArgs, TgmmArgs. NOTE: plain
// loads, perhaps before the grid wait (MoeGemmArgs::early_groups). An SM's L1 holds no stale copy
// because the first launch of a handler has no `pdl` (see LaunchClusters): that launch empties L1,
// and groups are read only after the kernel that writes them has finished. A kernel that reads
// groups written within the same launch would need __ldcg or an acquire here.
template <class Args>
__device__ __forceinline__ GroupRows RowsOfGroup(const Args& args, int g) {
  const int rows = args.rows_per_batch;
  const int begin = args.group_starts[g];
  const int64_t end = args.group_sizes != nullptr
                          ? static_cast<int64_t>(begin) + max(args.group_sizes[g], 0)
                          : static_cast<int64_t>(args.group_starts[g + 1]);
  const int first = min(max(begin, 0), rows);
  const int last = static_cast<int>(min(max(end, int64_t{0}), static_cast<int64_t>(rows)));
  return {(g / args.groups_per_batch) * rows + first, max(last - first, 0)};
}

}  // namespace jaxmoe
