// Host contract of the fused layer whose tokens are dispatched in the order of experts while it
// runs, and whose down product stores rows where tokens are from.
#pragma once

#include <cuda_runtime_api.h>

#include "csrc/gemm/moe_mlp.h"
#include "csrc/peers/ordered.h"

namespace jaxmoe {

// `layer`: of the tokens of all devices, with peers. Returns null when everything was launched,
// otherwise the reason.
const char* LaunchOrderedMoeMlp(const PeerOrdered& exchange,
                                const PeerStreams& streams,
                                const MoeMlpParams& layer,
                                cudaStream_t stream);

}  // namespace jaxmoe
