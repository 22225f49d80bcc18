// The layer beside its exchange, as launches, copies and events between three streams.
#include "csrc/gemm/beside.h"

#include "csrc/common/cuda_check.h"
#include "csrc/kernels/source_groups.h"

namespace jaxmoe {
namespace {

// Launches the layer, and the copies that it waits for and that wait for it.
const char* LaunchBesideCopies(const PeerBeside& exchange,
                               const Peers& peers,
                               const PeerStreams& streams,
                               MoeMlpParams layer,
                               cudaStream_t stream) {
  for (int turn = 1; turn < peers.num_devices; ++turn) {
    const int came_at = CameAt(peers.num_devices, turn);
    cudaError_t status = CopyPeerTokens(exchange, peers, turn, came_at, streams.from_peers);
    if (status == cudaSuccess) status = cudaEventRecord(streams.arrived[turn], streams.from_peers);
    if (const char* error = Reason(status)) return error;
  }
  const int64_t sum_bytes =
      exchange.size.num_tokens * exchange.sum.hidden * ElementSize(exchange.sum.dtype);
  static_assert(2 * kMaxPeers <= kMaxSourceRanges);
  MlpSources sources;
  sources.count = peers.num_devices;
  sources.came = exchange.came;
  sources.counters = exchange.counters;
  sources.groups = exchange.counters + 2 * peers.num_devices;
  sources.arrive = [&](int turn) {
    return Reason(cudaStreamWaitEvent(stream, streams.arrived[turn]));
  };
  sources.summed = [&](int turn) {
    const char* rows = static_cast<const char*>(layer.y) + turn * sum_bytes;
    const cudaError_t status = streams.Wait(streams.to_peers, stream);
    if (const char* error = Reason(status)) return error;
    return Reason(CopyPeerSums(exchange, peers, turn, rows, streams.to_peers));
  };
  layer.sources = &sources;
  return LaunchMoeMlp(layer, stream);
}

}  // namespace

const char* LaunchBesideMoeMlp(const PeerBeside& exchange,
                               const Peers& peers,
                               const PeerStreams& streams,
                               const MoeMlpParams& layer,
                               cudaStream_t stream) {
  if (const char* error = Reason(LaunchPeerPublish(exchange, stream))) return error;
  if (const char* error = Reason(streams.Wait(streams.from_peers, stream))) return error;
  const char* error = LaunchBesideCopies(exchange, peers, streams, layer, stream);
  // Whatever became of it: what the stream does next may have the memory of the copies.
  const char* not_here = Reason(streams.Wait(stream, streams.from_peers));
  const char* not_left = Reason(streams.Wait(stream, streams.to_peers));
  for (const char* reason : {error, not_here, not_left}) {
    if (reason != nullptr) return reason;
  }
  return Reason(LaunchPeerSum(exchange, stream));
}

}  // namespace jaxmoe
