// Products of some sources at a time, as launches. Of one source alone experts have few rows: a
// last tile of each is emptier, the last wave of tiles too, and weights are read once more.
#include "csrc/gemm/sources.h"

#include "csrc/common/cuda_check.h"
#include "csrc/kernels/source_groups.h"

namespace jaxmoe {
namespace {

// Sources that one gate-up product takes: they come while that of the first one's tokens runs.
constexpr int kMostTogether = 4;

struct Ranges {
  SourceRange range[kMaxSourceRanges] = {};
  int count = 0;

  constexpr void Add(int first, int sources) { range[count++] = {first, sources}; }
};

// What the gate-up products take, one after the other: the first source, which is there, then the
// others, evenly.
constexpr Ranges GateUpRanges(int sources) {
  Ranges ranges;
  ranges.Add(0, 1);
  const int parts = static_cast<int>(CeilDiv(sources - 1, kMostTogether));
  for (int part = 0; part < parts; ++part) {
    const int first = 1 + (sources - 1) * part / parts;
    ranges.Add(first, 1 + (sources - 1) * (part + 1) / parts - first);
  }
  return ranges;
}

// What the down products take: two sources at a time, but little at the end, when results of the
// last one leave behind the products of what stays here.
constexpr Ranges DownRanges(int sources) {
  Ranges ranges;
  int source = 1;
  for (; source + 2 < sources; source += 2) ranges.Add(source, 2);
  for (; source < sources; ++source) ranges.Add(source, 1);
  ranges.Add(0, 1);
  return ranges;
}

// Where products fetch rows there is one, which takes sources in their order, and waits for each.
// The last two have come by then.
constexpr Ranges FetchedRanges(int sources) {
  Ranges ranges;
  const bool together = TakesLastTogether(sources);
  for (int source = 0; source < sources - (together ? 2 : 0); ++source) ranges.Add(source, 1);
  if (together) ranges.Add(sources - 2, 2);
  return ranges;
}

constexpr bool HasEachOnce(const Ranges& ranges, int sources) {
  int found[kMaxSourceRanges] = {};
  for (int i = 0; i < ranges.count; ++i) {
    for (int j = 0; j < ranges.range[i].count; ++j) ++found[ranges.range[i].first + j];
  }
  for (int source = 0; source < sources; ++source) {
    if (found[source] != 1) return false;
  }
  return ranges.count <= sources;
}

constexpr bool RangesAreRight() {
  for (int sources = 2; 2 * sources <= kMaxSourceRanges; ++sources) {
    for (const Ranges& ranges :
         {GateUpRanges(sources), DownRanges(sources), FetchedRanges(sources)}) {
      if (!HasEachOnce(ranges, sources)) return false;
    }
    const Ranges fetched = FetchedRanges(sources);
    for (int i = 0; i < fetched.count; ++i) {
      const SourceRange range = fetched.range[i];
      if (CameAt(sources, range.first + range.count - 1) != i) return false;
    }
  }
  return true;
}
static_assert(RangesAreRight());

// The groups of a product that takes `range_count` ranges from number `range` on, which are
// numbered through both products: those of the down product first. `early`: see MoeGemmProblem.
MoeGemmProblem OfRanges(
    const MoeGemmProblem& all, const MlpSources& sources, int range, int range_count, bool early) {
  const int experts = all.num_groups / sources.count;
  MoeGemmProblem gemm = all;
  gemm.group_starts = sources.groups + range * experts;
  gemm.group_sizes = gemm.group_starts + SourceGroupInts(sources.count, experts) / 2;
  gemm.num_groups = gemm.groups_per_batch = range_count * experts;
  gemm.tile_counter = sources.counters + range;
  gemm.pdl = true;
  gemm.early_groups = early;
  return gemm;
}

cudaError_t LaunchGroups(const MlpSources& sources,
                         const MoeGemmProblem& all,
                         const int32_t* offsets,
                         const Ranges& gate_up,
                         const Ranges& down,
                         cudaStream_t stream) {
  SourceGroupsParams params{};
  params.offsets = offsets;
  params.num_experts = all.num_groups / sources.count;
  params.num_sources = sources.count;
  params.starts = sources.groups;
  params.sizes = sources.groups + SourceGroupInts(sources.count, params.num_experts) / 2;
  for (const Ranges* ranges : {&down, &gate_up}) {
    for (int i = 0; i < ranges->count; ++i) params.ranges[params.num_ranges++] = ranges->range[i];
  }
  params.pdl = true;
  return LaunchSourceGroups(params, stream);
}

}  // namespace

const char* LaunchGateUpOfSources(const MlpSources& sources,
                                  const int32_t* offsets,
                                  const PermuteParams* copy,
                                  const MoeGemmProblem& gate_up,
                                  const TileConfig& tile,
                                  cudaStream_t stream) {
  const Ranges ranges =
      copy == nullptr ? FetchedRanges(sources.count) : GateUpRanges(sources.count);
  const Ranges down = DownRanges(sources.count);
  if (const char* error = Reason(LaunchGroups(sources, gate_up, offsets, ranges, down, stream))) {
    return error;
  }
  if (copy == nullptr) {
    MoeGemmProblem gemm = OfRanges(gate_up, sources, down.count, ranges.count, false);
    gemm.sources_came = sources.came;
    gemm.groups_per_source = gemm.num_groups / ranges.count;
    return LaunchMoeGemm(gemm, tile, stream);
  }
  const int64_t tokens = copy->num_tokens / sources.count;
  for (int i = 0; i < ranges.count; ++i) {
    const SourceRange range = ranges.range[i];
    if (range.first > 0) {
      if (const char* error = sources.arrive(range.first + range.count - 1)) return error;
    }
    PermuteParams permute = *copy;
    permute.num_tokens = range.count * tokens;
    permute.x = static_cast<const char*>(copy->x) + range.first * tokens * copy->row_bytes;
    permute.slot_to_row += range.first * tokens * copy->top_k;
    permute.pdl = range.first == 0;
    if (const char* error = Reason(LaunchPermute(permute, stream))) return error;
    const MoeGemmProblem gemm = OfRanges(gate_up, sources, down.count + i, 1, true);
    if (const char* error = LaunchMoeGemm(gemm, tile, stream)) return error;
  }
  return nullptr;
}

const char* LaunchDownOfSources(const MlpSources& sources,
                                const MoeGemmProblem& down,
                                const TileConfig& tile,
                                const FinalizeParams& finalize,
                                cudaStream_t stream) {
  const Ranges ranges = DownRanges(sources.count);
  const int64_t tokens = finalize.num_tokens / sources.count;
  for (int i = 0; i < ranges.count; ++i) {
    const SourceRange range = ranges.range[i];
    const MoeGemmProblem gemm = OfRanges(down, sources, i, 1, true);
    if (const char* error = LaunchMoeGemm(gemm, tile, stream)) return error;
    for (int source = range.first; source < range.first + range.count; ++source) {
      FinalizeParams sums = finalize;  // of one source, so that its results leave before the next
      const int64_t first = source * tokens;
      sums.num_tokens = tokens;
      sums.slot_to_row += first * finalize.top_k;
      sums.weights += first * finalize.top_k;
      sums.y =
          static_cast<char*>(finalize.y) + first * finalize.hidden * ElementSize(finalize.dtype);
      if (const char* error = Reason(LaunchFinalize(sums, stream))) return error;
      if (source == 0) continue;  // they stay here
      if (const char* error = sources.summed(source)) return error;
    }
  }
  return nullptr;
}

}  // namespace jaxmoe
