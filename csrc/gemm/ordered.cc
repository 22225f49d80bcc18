// The layer beside a dispatch in the order of experts, as launches on two streams.
#include "csrc/gemm/ordered.h"

#include "csrc/common/cuda_check.h"

namespace jaxmoe {

const char* LaunchOrderedMoeMlp(const PeerOrdered& exchange,
                                const PeerStreams& streams,
                                const MoeMlpParams& layer,
                                cudaStream_t stream) {
  if (const char* error = Reason(LaunchPeerOffer(exchange, stream))) return error;
  if (const char* error = Reason(streams.Wait(streams.to_peers, stream))) return error;
  const char* error = Reason(LaunchPeerPush(exchange, streams.to_peers));
  if (error == nullptr) error = Reason(LaunchPeerTake(exchange, stream));
  if (error == nullptr) {
    MlpArrivals arrivals;
    arrivals.came = exchange.came;
    arrivals.experts = exchange.unit;
    arrivals.begin = [&] { return Reason(LaunchPeerFirst(exchange, stream)); };
    arrivals.end = [&] { return Reason(streams.Wait(stream, streams.to_peers)); };
    MoeMlpParams whole = layer;
    whole.arrivals = &arrivals;
    error = LaunchMoeMlp(whole, stream);
  }
  // Whatever became of it: what the stream does next may have the memory of the tokens.
  const char* not_sent = Reason(streams.Wait(stream, streams.to_peers));
  return error != nullptr ? error : not_sent;
}

}  // namespace jaxmoe
