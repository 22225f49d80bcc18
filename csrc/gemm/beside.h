// Host contract of the fused layer beside its exchange: the gate-up product begins with this
// device's tokens while those of others come, and sums of a device's tokens go home while the down
// product of the next is computed.
#pragma once

#include <cuda_runtime_api.h>

#include "csrc/gemm/moe_mlp.h"
#include "csrc/peers/beside.h"

namespace jaxmoe {

// `layer`: of the tokens of all devices, in the order of turns; its y are the sums, of which the
// first are `exchange.sum.own`. Returns null when everything was launched, otherwise the reason.
const char* LaunchBesideMoeMlp(const PeerBeside& exchange,
                               const Peers& peers,
                               const PeerStreams& streams,
                               const MoeMlpParams& layer,
                               cudaStream_t stream);

}  // namespace jaxmoe
