// What the warps of a cluster hand to each other: tiles to work on, and stages to fill or to read.
//
// T is a tile of some kernel, with kRing, kCluster and kMulticast; Storage<T> its shared memory,
// with ring(), ring_full(slot), ring_empty(slot) and empty(stage).
#pragma once

#include "csrc/common/mbarrier.cuh"

namespace jaxmoe {

// What the scheduler hands to producers and consumers.
struct alignas(16) TileInfo {
  int weight;  // index of the weight matrix; negative: there are no more tiles
  int row;     // first row of the tile
  int rows;    // rows of the group in this tile, up to kTokenTile; 0 when a cluster has too few
  int w_tile;  // weight tile index

  __device__ bool end() const { return weight < 0; }
};

// Position in a circular buffer of kSize slots; `parity` flips at each wrap.
template <int kSize>
struct PipelineState {
  int index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Advance() {
    if (++index == kSize) {
      index = 0;
      parity ^= 1;
    }
  }
};

// Writes a tile into the ring of every CTA of the cluster, as the scheduler warp; lane r has the
// tile of CTA r.
template <template <class> class Storage, class T>
__device__ __forceinline__ void PublishTile(const Storage<T>& smem,
                                            const PipelineState<T::kRing>& slot,
                                            const TileInfo& info,
                                            int lane) {
  ptx::BarrierWait(smem.ring_empty(slot.index), slot.parity ^ 1);
  __syncwarp();  // the lanes that publish must not leave the others a phase behind
  if (lane < T::kCluster) {
    if constexpr (T::kCluster > 1) {
      const int4 bits = make_int4(info.weight, info.row, info.rows, info.w_tile);
      uint64_t* full = smem.ring_full(slot.index);
      ptx::BarrierArriveExpectTxAt(full, lane, sizeof(bits));
      ptx::StoreAsyncAt(&smem.ring()[slot.index], full, lane, bits);
    } else {
      smem.ring()[slot.index] = info;
      ptx::BarrierArrive(smem.ring_full(slot.index));
    }
  }
}

// Waits for the next tile of the ring, as a warp: its first lane reads, so that the lane that hands
// the slot back is the only one that has read it.
template <class T, template <class> class Storage>
__device__ __forceinline__ TileInfo NextTile(const Storage<T>& smem,
                                             const PipelineState<T::kRing>& slot,
                                             int lane) {
  constexpr unsigned kAll = 0xffffffffu;
  ptx::BarrierWait(smem.ring_full(slot.index), slot.parity);
  TileInfo info{};
  if (lane == 0) info = smem.ring()[slot.index];
  return {__shfl_sync(kAll, info.weight, 0),
          __shfl_sync(kAll, info.row, 0),
          __shfl_sync(kAll, info.rows, 0),
          __shfl_sync(kAll, info.w_tile, 0)};
}

// The ring is written by CTA 0 of the cluster. Readers hand a slot back when they are done with the
// tile: right after reading it, the arrival could overtake the load.
template <class T>
__device__ __forceinline__ void ReleaseRing(uint64_t* bar) {
  if constexpr (T::kCluster > 1) {
    ptx::BarrierArriveAt(bar, 0);
  } else {
    ptx::BarrierArrive(bar);
  }
}

// Tells every producer that writes this stage that the calling warp has read it.
template <template <class> class Storage, class T>
__device__ __forceinline__ void ReleaseStage(const Storage<T>& smem, int stage, int lane) {
  if constexpr (T::kMulticast > 1) {
    if (lane < T::kMulticast) ptx::BarrierArriveAt(smem.empty(stage), lane);
  } else {
    if (lane == 0) ptx::BarrierArrive(smem.empty(stage));
  }
}

}  // namespace jaxmoe
