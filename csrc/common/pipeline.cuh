// Rings by which the warps of a cluster hand each other tiles to work on and stages to fill or
// read.
//
// T is a tile of some kernel, with kRing, kCluster and kMulticast; Storage<T> its shared memory,
// with ring(), ring_full(slot), ring_empty(slot) and empty(stage).
#pragma once

#include "csrc/common/ptx.cuh"

namespace jaxmoe {

// Tile that the scheduler hands to producers and consumers.
struct alignas(16) TileInfo {
  int weight;  // index of the weight matrix; negative: there are no more tiles
  int row;     // first row of the tile
  int rows;    // rows of the group in this tile, up to kTokenTile; 0 when a cluster has too few
  int w_tile;  // weight tile index i; ~i in the second product of a kernel that has two

  __device__ bool end() const { return weight < 0; }
  __device__ bool second() const { return w_tile < 0; }
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

// A tile's place in the ring, held by one reader.
template <template <class> class Storage, class T>
class RingSlot {
 public:
  __device__ RingSlot(const Storage<T>& smem, const PipelineState<T::kRing>& at, bool releases)
      : smem_(smem), at_(at), releases_(releases) {}

  __device__ __forceinline__ int index() const { return at_.index; }
  __device__ __forceinline__ uint32_t parity() const { return at_.parity; }

  // Hands the slot back to CTA 0 of the cluster, which writes the ring.
  __device__ __forceinline__ void Release() const {
    if (!releases_) return;
    if constexpr (T::kCluster > 1) {
      ptx::BarrierArriveAt(smem_.ring_empty(at_.index), 0);
    } else {
      ptx::BarrierArrive(smem_.ring_empty(at_.index));
    }
  }

 private:
  const Storage<T>& smem_;
  const PipelineState<T::kRing>& at_;
  const bool releases_;
};

// Calls work(tile, slot) for every tile of the ring, as a warp. `work` releases the slot once, when
// it is done with the tile: right after the tile was read, the arrival could overtake the load.
// The first lane reads, so that the lane that hands the slot back is the only one that has read it.
template <template <class> class Storage, class T, class Work>
__device__ __forceinline__ void ForEachTile(const Storage<T>& smem, int lane, const Work& work) {
  constexpr unsigned kAll = 0xffffffffu;
  PipelineState<T::kRing> at;
  while (true) {
    ptx::BarrierWait(smem.ring_full(at.index), at.parity);
    TileInfo read{};
    if (lane == 0) read = smem.ring()[at.index];
    const TileInfo info{__shfl_sync(kAll, read.weight, 0),
                        __shfl_sync(kAll, read.row, 0),
                        __shfl_sync(kAll, read.rows, 0),
                        __shfl_sync(kAll, read.w_tile, 0)};
    if (info.end()) break;
    work(info, RingSlot<Storage, T>(smem, at, lane == 0));
    at.Advance();
  }
}

// The same as one thread.
template <template <class> class Storage, class T, class Work>
__device__ __forceinline__ void ForEachTile(const Storage<T>& smem, const Work& work) {
  PipelineState<T::kRing> at;
  while (true) {
    ptx::BarrierWait(smem.ring_full(at.index), at.parity);
    const TileInfo info = smem.ring()[at.index];
    if (info.end()) break;
    work(info, RingSlot<Storage, T>(smem, at, true));
    at.Advance();
  }
}

// Ends what the lanes of a warp read of a stage, before the stage is released. Loads may be under
// way at an arrival, and bulk copies, which fill the stage next, wait for them at a fence alone.
__device__ __forceinline__ void FinishReads() {
  ptx::FenceProxyAsync();
  __syncwarp();
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
