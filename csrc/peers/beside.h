// Host contract of an exchange beside the products of a layer: copy engines bring tokens while
// those that are there are multiplied, and take sums home. They need no multiprocessor.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/peers/exchange.h"
#include "csrc/peers/memory.h"

namespace jaxmoe {

inline constexpr int kMaxPeerArrays = 2;

// What there is of a token in one array.
struct PeerArray {
  const char* own;    // [T, row_bytes], of this device's tokens
  char* all;          // [n, T, row_bytes], of these, then of those of the devices after this one
  int64_t row_bytes;  // whole words
};

// T tokens of each of n devices, all of which go to all of them, in the order of devices from this
// one on: `turn` counts from it. Two steps: in the first, an odd one, each device leaves its tokens
// in its own half, where the others read them; in the second, an even one, they leave sums in the
// half of the device whose tokens they are of. So halves do not hang on what only kernels know.
struct PeerBeside {
  const Peers* peers;
  ExchangeSize size;
  const int32_t* place;  // see PeerDispatchParams
  const int32_t* slots;  // [T,K]
  const float* weights;  // [T,K]
  int32_t* all_ids;      // [n T,K]: local id * n + turn of a choice on this device, or -1
  float* all_weights;    // [n T,K]
  uint32_t* came;        // [n]: 1 first, else 0, until copies say that tokens are there
  int32_t* counters;     // [2 n], zero then
  PeerArray arrays[kMaxPeerArrays];
  int num_arrays;
  PeerCombineParams sum;  // its own rows, slots, residual, y, dtype and hidden
};

// Bytes of a half that it needs.
int64_t PeerBesideBytes(const PeerBeside& params);

// Leaves this device's tokens where the others read them, meets these, and reads their choices.
cudaError_t LaunchPeerPublish(const PeerBeside& params, cudaStream_t stream);

// Copies the tokens of a turn from 1 on, and says in word `came_at` that they are there.
cudaError_t CopyPeerTokens(
    const PeerBeside& params, const Peers& peers, int turn, int came_at, cudaStream_t stream);

// Copies `rows` [T, H], sums of the tokens of a turn, to where they are added up.
cudaError_t CopyPeerSums(
    const PeerBeside& params, const Peers& peers, int turn, const char* rows, cudaStream_t stream);

// Meets the others, whose sums have been copied then, and adds up those of this device's tokens.
cudaError_t LaunchPeerSum(const PeerBeside& params, cudaStream_t stream);

// Loads all kernels of it on the current device.
cudaError_t LoadPeerBesideKernels();

}  // namespace jaxmoe
