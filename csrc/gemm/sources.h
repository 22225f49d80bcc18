// Products of a layer whose tokens come from several sources while it runs, and whose results leave
// while it does.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>

#include "csrc/gemm/moe_gemm.h"
#include "csrc/kernels/finalize.h"
#include "csrc/kernels/permute.h"

namespace jaxmoe {

// Expert e of source s is local expert e * count + s, and ids say so: rows of an expert lie
// together, in the order of sources, so a product can take those of several.
struct MlpSources {
  int count = 0;
  const uint32_t* came = nullptr;  // [count], at CameAt not 0 when x of a source is there
  int32_t* counters = nullptr;     // [2 count], zero
  int32_t* groups = nullptr;       // [SourceGroupInts] scratch
  // Lets the stream wait for x of a source and of all before it, but for the first one's, which is
  // there.
  std::function<const char*(int source)> arrive;
  // Called when y of a source has been launched, but for the first one's, which comes last.
  std::function<const char*(int source)> summed;
};

// Whether a product that waits for each source takes the last two as one.
constexpr bool TakesLastTogether(int sources) { return sources >= 4; }

// Where it is said that x of a source has come, and of all before it. A product that takes the last
// two together looks at the place of the first of them.
constexpr int CameAt(int sources, int source) {
  const bool swapped = TakesLastTogether(sources) && source >= sources - 2;
  return swapped ? 2 * sources - 3 - source : source;
}

// Starts and sizes of each product's groups, of `experts` experts of a source.
constexpr int64_t SourceGroupInts(int64_t sources, int64_t experts) {
  return 2 * 2 * sources * experts;
}

// Launches the gate-up product of all tokens. `offsets` are the plan's. `copy`: where rows are
// copied into the order of experts first, that copy, of all tokens; null where the product fetches
// them.
const char* LaunchGateUpOfSources(const MlpSources& sources,
                                  const int32_t* offsets,
                                  const PermuteParams* copy,
                                  const MoeGemmProblem& gate_up,
                                  const TileConfig& tile,
                                  cudaStream_t stream);

// Launches the down product and finalize of all tokens, after LaunchGateUpOfSources.
const char* LaunchDownOfSources(const MlpSources& sources,
                                const MoeGemmProblem& down,
                                const TileConfig& tile,
                                const FinalizeParams& finalize,
                                cudaStream_t stream);

}  // namespace jaxmoe
