// Device code around a product that stores its rows in the memory of other devices.
//
// Between plan and products one kernel makes the table of where rows go. The epilogue of the down
// product stores rows there while other tiles are computed, so that links and tensor cores are in
// use at once, and a row is stored once. What comes after is a meeting, as of every step, and
// finalize at the source, of rows that lie in its own memory.
// Bytes a device sends: T K (n - 1) / n rows. deepseek-v3 T = 4096 in bf16, n = 8: 411 MB, behind
//   the product; as sums they would be 135 MB, after it.
// Why a table: the row of a slot is known by the plan alone, and an epilogue has no registers for
//   divisions by K and T.
#pragma once

#include <cstdint>

#include "csrc/common/launch.h"
#include "csrc/common/piece.cuh"
#include "csrc/kernels/finalize.cuh"
#include "csrc/peers/rows.h"
#include "csrc/peers/step.cuh"

namespace jaxmoe {

inline constexpr int kPeerTargetThreads = 256;

__global__ void __launch_bounds__(kPeerTargetThreads)
    PeerTargetsKernel(PeerRows params, const int32_t* slot_to_row) {
  GridDependencyWait();
  GridDependencyLaunch();
  const Peers& peers = *params.peers;
  const uint32_t step = NextStep(peers);
  const bool begins = Begins(peers, params.size, params.place, step);  // else others may still read
  const int64_t own_slots = params.size.num_tokens * params.size.top_k;
  const int64_t num_slots = own_slots * params.size.num_devices;
  const int64_t row_bytes = params.hidden * ElementSize(params.dtype);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kPeerTargetThreads;
  int64_t slot = static_cast<int64_t>(blockIdx.x) * kPeerTargetThreads + threadIdx.x;
  for (; slot < num_slots; slot += stride) {
    const int64_t row = slot_to_row[slot];
    if (row < 0 || row >= num_slots) continue;
    const int source = static_cast<int>(slot / own_slots);
    const char* place = HalfOf(peers, source, step) + (slot - source * own_slots) * row_bytes;
    params.targets[row] = begins ? reinterpret_cast<uint64_t>(place) : 0;
  }
}

// One warp says that this device has come to the step which PeerTargetsKernel has begun, waits for
// the others, and passes it. Rows are there when it says so, as this launch does not overlap the
// product that stores them.
__global__ void __launch_bounds__(32) PeerMeetKernel(PeerRows params) {
  const Peers& peers = *params.peers;
  const uint32_t step = NextStep(peers);
  if (!HasFailed(peers)) Announce(peers, step, params.size.tag);
  WaitForStep(peers, step, params.size.tag);
  if (threadIdx.x == 0) peers.own->step = step;
}

// Finalize of one piece of a row of y.
template <typename T, int kUnroll>
__device__ __forceinline__ void FinalizePiece(const Peers& peers,
                                              const PeerRows& params,
                                              uint32_t step,
                                              bool failed,
                                              int64_t index,
                                              unsigned row_pieces) {
  constexpr int kSize = 16 / sizeof(T);
  using P = Piece<T, kSize>;
  using Bits = typename P::Bits;
  const int top_k = static_cast<int>(params.size.top_k);
  const int64_t token = index / row_pieces;
  const unsigned column = static_cast<unsigned>(index % row_pieces);
  // None of a step that failed: there may be less memory than it takes.
  const unsigned num_slots = failed ? 0
                                    : static_cast<unsigned>(params.size.num_devices) *
                                          static_cast<unsigned>(params.size.num_local);
  const int32_t* slots = params.slots + token * top_k;
  // Rows of the token's choices lie side by side.
  const Bits* rows = reinterpret_cast<const Bits*>(HalfOf(peers, peers.rank, step)) +
                     token * top_k * row_pieces + column;

  Bits residual{};  // read early, added last
  if (params.residual != nullptr) {
    residual = P::Load(static_cast<const Bits*>(params.residual) + index);
  }
  float sum[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) sum[i] = failed ? __uint_as_float(0x7fffffffu) : 0.0f;
  const float* weights = params.weights + token * top_k;
  AddRows<T, kSize, kUnroll, true>(
      rows, row_pieces, nullptr, slots, num_slots, weights, top_k, sum);
  if (params.residual != nullptr) {
    float term[kSize];
    P::Unpack(residual, term);
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum[i] += term[i];
  }
  static_cast<Bits*>(params.y)[index] = P::Pack(sum);
}

// To end a step takes registers that finalize alone does not need.
constexpr int PeerFinalizeBlocksPerSm(int unroll) {
  return FinalizeBlocksPerSm(unroll) < 5 ? FinalizeBlocksPerSm(unroll) : 5;
}

// After PeerMeetKernel, of which it is a launch of its own: a thread for each piece.
template <typename T, int kUnroll>
__global__ void __launch_bounds__(kFinalizeMaxThreads, PeerFinalizeBlocksPerSm(kUnroll))
    PeerFinalizeKernel(PeerRows params, unsigned row_pieces) {
  const Peers& peers = *params.peers;
  const uint32_t step = peers.own->step;
  const bool failed = HasFailed(peers);
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index < params.size.num_tokens * row_pieces) {
    FinalizePiece<T, kUnroll>(peers, params, step, failed, index, row_pieces);
  }
  FinishStep(peers, step);
}

// Both in one launch, whose CTAs must all run at once. The first one says that the device is here.
template <typename T, int kUnroll>
__global__ void __launch_bounds__(kFinalizeMaxThreads, 1)
    PeerMeetFinalizeKernel(PeerRows params, unsigned row_pieces) {
  const Peers& peers = *params.peers;
  const uint32_t step = NextStep(peers);
  if (blockIdx.x == 0 && !HasFailed(peers)) Announce(peers, step, params.size.tag);
  const bool failed = WaitForStep(peers, step, params.size.tag);
  const int64_t pieces = params.size.num_tokens * row_pieces;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; index < pieces; index += stride) {
    FinalizePiece<T, kUnroll>(peers, params, step, failed, index, row_pieces);
  }
  FinishStep(peers, step);
}

}  // namespace jaxmoe
