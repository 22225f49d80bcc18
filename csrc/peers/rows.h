// Launchers of what surrounds a product that stores its rows in the memory of other devices.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/common/types.h"
#include "csrc/peers/exchange.h"
#include "csrc/peers/memory.h"

namespace jaxmoe {

// A step in which each device computes rows for the tokens of all, and stores the row of choice k
// of token t of device s at place t K + k of the half of s. There
//   y[t] = sum_k weights[t,k] * row(t,k) + residual[t], fp32, k order, residual last, one rounding
// over the choices that lie on some device: the bits of finalize on one device.
struct PeerRows {
  const Peers* peers = nullptr;  // in the device's memory, as all arrays
  ExchangeSize size{};
  const int32_t* place = nullptr;  // [], see PeerDispatchParams
  const int32_t* slots = nullptr;  // [T,K], of this device's tokens
  const float* weights = nullptr;  // [T,K], of these
  const void* residual = nullptr;  // [T,H], or null
  uint64_t* targets = nullptr;     // [n T K] scratch: address of each row, 0 for nowhere
  void* y = nullptr;               // [T,H]
  DType dtype = DType::kBFloat16;  // of rows, residual and y: bf16 or fp16
  int64_t hidden = 0;              // H < 2^29, a multiple of 16 bytes
};

// Begins a step, and writes where each row goes: that of slot i to targets[slot_to_row[i]],
// slot_to_row [n T,K]. Nowhere, if something has failed.
cudaError_t LaunchPeerTargets(const PeerRows& rows,
                              const int32_t* slot_to_row,
                              bool pdl,
                              cudaStream_t stream);

// Says that the rows of all earlier launches are stored, waits until those of all devices are, and
// makes y of them. NaN, if something has failed.
cudaError_t LaunchPeerFinalize(PeerRows rows, cudaStream_t stream);

// Bytes of a half that it needs, which whoever launches it has compared with what there is.
int64_t PeerRowsBytes(const ExchangeSize& size, int64_t row_bytes);

// Loads all kernels of both on the current device.
cudaError_t LoadPeerRowsKernels();

}  // namespace jaxmoe
