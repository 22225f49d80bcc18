// Launchers of dispatch and combine through memory that all devices of an axis reach.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/common/types.h"
#include "csrc/peers/memory.h"

namespace jaxmoe {

// Sizes of an exchange: T tokens of each of n devices, K choices of each. A choice is a slot,
// device * num_local + local expert; one outside [0, n * num_local) goes nowhere.
struct ExchangeSize {
  int64_t num_tokens;  // T < 2^31 / n
  int64_t top_k;       // K < 2^31
  int64_t num_local;   // experts of a device
  int num_devices;     // n
  // The launchers make these.
  uint32_t tag = 0;   // of the step, the same on all devices
  bool few = false;   // rows carry their own flags
  int lines = 0;      // of the part for lines that the step takes: few rows travel in lines then
  int64_t bytes = 0;  // of the half that the step takes, or of the part for pairs
  int pushers = 0;    // CTAs that push, where rows come in chunks
  int chunks = 0;     // of those
};

// Each device receives the rows of all tokens that have a choice there, at s T + t for token t of
// device s; other rows become 0. All slots arrive.
struct PeerDispatchParams {
  const Peers* peers;  // in the device's memory, as all arrays
  ExchangeSize size;
  const int32_t* place;  // [], this device's place in the program's mesh; another is refused
  const int32_t* slots;  // [T,K]
  const void* tokens;    // [T, token_bytes]
  const float* small;    // [T, small_floats], or null
  int32_t* all_slots;    // [n T,K]
  void* all_tokens;      // [n T, token_bytes]
  float* all_small;      // [n T, small_floats]
  int64_t token_bytes;   // < 2^31
  int64_t small_floats;  // < 2^31, 0 without `small`
};

// `peers`: what lies at params.peers.
cudaError_t LaunchPeerDispatch(PeerDispatchParams params, const Peers& peers, cudaStream_t stream);

// The way back: y[t] is the sum over the devices d that token t has a choice on of their rows
// [me T + t], float32 in the order of devices, then the residual, rounded once. So are small
// numbers summed that lie beside rows.
struct PeerCombineParams {
  const Peers* peers;
  ExchangeSize size;
  const int32_t* place;      // as above
  const int32_t* slots;      // [T,K], of this device's tokens
  const int32_t* all_slots;  // [n T,K], as dispatch gave them
  const void* rows;          // [n T,H]
  const void* own;           // [T,H], those of this device's tokens; LaunchPeerCombine makes it
  const void* residual;      // [T,H], or null
  const float* small;        // [n T, small_floats], or null
  void* y;                   // [T,H]
  float* small_sum;          // [T, small_floats]
  DType dtype;               // of rows, residual and y: bf16, fp16 or fp32
  int64_t hidden;            // H < 2^29
  int64_t small_floats;      // < 2^31, 0 without `small`
};

cudaError_t LaunchPeerCombine(PeerCombineParams params, const Peers& peers, cudaStream_t stream);

// Whether a size is none of those above.
bool TooLarge(const ExchangeSize& size, int64_t row_bytes);

// Bytes of a half that the two need, which whoever launches them has compared with what there is.
int64_t PeerDispatchBytes(const ExchangeSize& size, int64_t token_bytes, int64_t small_floats);
int64_t PeerCombineBytes(const ExchangeSize& size, int64_t row_bytes, int64_t small_floats);

// Loads all kernels of both on the current device.
cudaError_t LoadPeerKernels();

}  // namespace jaxmoe
