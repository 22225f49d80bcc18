// Launchers of a dispatch in the order of experts: a token goes to a device with the first of its
// experts there, so the products of the first experts begin while the tokens of the last come.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <numeric>

#include "csrc/peers/exchange.h"
#include "csrc/peers/memory.h"

namespace jaxmoe {

inline constexpr int kMaxExpertParts = 4;
static_assert(kMaxExpertParts < kPeerChunks);
inline constexpr int kMaxOrderedArrays = 2;

// The experts of a device in parts, of which a token's row comes with the first that needs it.
struct ExpertParts {
  int count;
  int ends[kMaxExpertParts];  // rising; the last is the number of experts
};

// Those of a part are multiplied while the next ones come, where products take some five times as
// long as rows on the links.
constexpr ExpertParts PartsOfExperts(int64_t num_local) {
  ExpertParts parts{};
  for (int64_t divisor : {16, 4, 1}) {
    const int end = static_cast<int>(num_local / divisor);
    if (end > (parts.count == 0 ? 0 : parts.ends[parts.count - 1])) parts.ends[parts.count++] = end;
  }
  return parts;
}

// The largest number of experts that divides all ends.
constexpr int UnitOfParts(const ExpertParts& parts) {
  int unit = 0;
  for (int i = 0; i < parts.count; ++i) unit = std::gcd(unit, parts.ends[i]);
  return unit;
}

// What there is of a token in one array.
struct OrderedArray {
  const char* own;    // [T, row_bytes], of this device's tokens
  int64_t row_bytes;  // whole words; of the first array whole pieces of 16
};

// T tokens of each of n devices. One step, an odd one, after which rows of all tokens that have a
// choice on this device lie in its odd half, that of token t of device s at s T + t; what lies in
// other rows there is not defined. They stay there until the step after the next.
struct PeerOrdered {
  const Peers* peers;  // in the device's memory, as all arrays
  ExchangeSize size;
  ExpertParts parts;
  const int32_t* place;  // see PeerDispatchParams
  const int32_t* slots;  // [T,K]
  uint16_t* devices;     // [T, kMaxExpertParts] scratch: those that a row goes to with each part
  uint32_t* pushed;      // [kMaxExpertParts] scratch
  uint32_t* came;        // [num_local / unit], 0 first, until rows of its experts are there
  int unit;              // experts that a word is of; divides the ends of parts
  int32_t* all_ids;      // [n T,K]: local id of a choice on this device, or -1
  OrderedArray arrays[kMaxOrderedArrays];
  int num_arrays;
};

// Bytes of a half that it needs, and where there arrays of rows of all tokens are.
int64_t PeerOrderedBytes(const PeerOrdered& params);
char* OrderedRows(const PeerOrdered& params, const Peers& peers, int array);

// Begins the step: choices go to all devices.
cudaError_t LaunchPeerOffer(const PeerOrdered& params, cudaStream_t stream);

// After it, on a stream of its own: rows go to the other devices, part by part, by a few CTAs that
// run beside products and wait for nobody. One more waits for what comes, says so in `came`, and
// ends the step.
cudaError_t LaunchPeerPush(const PeerOrdered& params, cudaStream_t stream);

// After the offer too: puts this device's own rows beside those that come, and reads all choices.
cudaError_t LaunchPeerTake(const PeerOrdered& params, cudaStream_t stream);

// Lets the stream wait until the first part of all devices is here: all CTAs that push and wait are
// running then, so what follows may take all other SMs while it waits for the rest.
cudaError_t LaunchPeerFirst(const PeerOrdered& params, cudaStream_t stream);

// Loads all kernels of it on the current device.
cudaError_t LoadPeerOrderedKernels();

}  // namespace jaxmoe
