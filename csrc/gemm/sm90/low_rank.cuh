// What adapters add to the sums of a tile: x w of low rank, see LowRankProduct.
//
// Both factors are fetched into the warpgroup's staging buffer while the k loop runs, 16 of the
// rank at a time, and multiplied behind its last step as that multiplies: by wgmma, or by the warps
// themselves. Of a larger rank the rest is fetched then. NOTE: any other instruction that defined
// accumulators of wgmma would make ptxas serialize it.
#pragma once

#include "csrc/gemm/sm90/mainloop.cuh"

namespace jaxmoe {

template <class T>
class LowRank {
  static_assert(!T::kTokenScaled && T::kSplitK == 1);

 public:
  static constexpr int kRank = T::kLowRank;  // at a time

  __device__ __forceinline__ LowRank(
      const LowRankProduct& low, const SharedStorage<T>& smem, int rows, int consumer, int thread)
      : low_(low),
        staging_(ptx::SmemAddress(smem.staging(consumer))),
        rows_(rows),
        consumer_(consumer),
        thread_(thread) {}

  // Begins to copy ranks `first` and following of a product with n weight rows. The staging buffer
  // is free.
  __device__ __forceinline__ void Fetch(const EpilogueSite& site, int n, int first) const {
    if (rows_ <= 0) return;
    const auto* const w = static_cast<const uint16_t*>(low_.w);
    const auto* const x = static_cast<const uint16_t*>(low_.x);
    const int64_t matrix = static_cast<int64_t>(site.weight) * low_.rank + first;
    constexpr int kPieces = T::kWarpgroupRows / 8;  // of 16 bytes, of a row of w
#pragma unroll
    for (int pass = 0; pass < kRank * kPieces / 128; ++pass) {
      const int k = 128 / kPieces * pass + thread_ / kPieces;
      const int block = thread_ % kPieces / 8;
      const int piece = thread_ % 8;
      const int row = (block == 0 ? site.weight_row0 : site.weight_row1) + 8 * piece;
      const bool exists = first + k < low_.rank && row < n;
      const uint16_t* const from = exists ? w + (matrix + k) * n + row : w;
      ptx::CopyAsync16(WeightAt(block, k, piece), from, exists);
    }
    for (int i = thread_; i < 2 * rows_; i += 128) {
      const int k = first + 8 * (i % 2);
      const bool exists = k < low_.rank;
      const int64_t row = site.row + i / 2;
      ptx::CopyAsync16(TokenAt(i / 2, i % 2), exists ? x + row * low_.rank + k : x, exists);
    }
  }

  // Issues the product of the first ranks, which have been fetched, behind those of the k loop.
  template <int kN>
  __device__ __forceinline__ void Issue(Accumulators<T>& acc) const {
    if (rows_ <= 0) return;
    ptx::CopyAsyncWaitAll();
    ptx::FenceProxyAsync();
    Sync();
    ptx::FenceAccumulator(acc[0]);
    ptx::FenceAccumulator(acc[1]);
    cute::warpgroup_arrive();
    const uint64_t b = ptx::Swizzle32Descriptor(tokens());
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const uint64_t a = ptx::Swizzle128Descriptor(WeightAt(block, 0, 0));
      ptx::Wgmma<typename T::Weight, kN, cute::SM90::GMMA::Major::MN>(a, b, acc[block], true);
    }
    cute::warpgroup_commit_batch();
    ptx::FenceAccumulator(acc[0]);
    ptx::FenceAccumulator(acc[1]);
  }

  // Adds the products of ranks `begin` and following. Those before are done; the first have been
  // fetched.
  __device__ __forceinline__ void AddFrom(int begin,
                                          const EpilogueSite& site,
                                          int n,
                                          Accumulators<T>& acc) const {
    if (rows_ <= 0) return;
#pragma unroll 1
    for (int first = begin; first < low_.rank; first += kRank) {
      if (first > 0) {
        Sync();  // the ranks before have been read
        Fetch(site, n, first);
      }
      if constexpr (T::kWarpProducts) {
        AddByWarps(acc);
      } else {
        Issue<T::kWarpgroupTokens>(acc);
        cute::warpgroup_wait<0>();
        ptx::FenceAccumulator(acc[0]);
        ptx::FenceAccumulator(acc[1]);
      }
    }
    Sync();  // the staging buffer is free
  }

 private:
  // Adds the product of the ranks that have been fetched. Each warp has 16 rows of both blocks.
  __device__ __forceinline__ void AddByWarps(Accumulators<T>& acc) const {
    ptx::CopyAsyncWaitAll();
    Sync();
    const int warp = thread_ / 32;
    const int matrix = thread_ % 32 / 8;  // of the four that a load brings: this lane's
    const int i = thread_ % 8;
    uint32_t w[2][4];
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const int k = 8 * (matrix / 2) + i;
      ptx::LoadMatrix4Transposed(WeightAt(block, k, 2 * warp + matrix % 2), w[block]);
    }
#pragma unroll
    for (int j = 0; j < T::kWarpgroupTokens / 8; j += 2) {
      uint32_t x[4];
      ptx::LoadMatrix4(TokenAt(8 * (j + matrix / 2) + i, matrix % 2), x);
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        ptx::MmaWarp<typename T::Weight>(w[block], x[0], x[1], &acc[block][4 * j]);
        ptx::MmaWarp<typename T::Weight>(w[block], x[2], x[3], &acc[block][4 * (j + 1)]);
      }
    }
  }

  static constexpr int kWeightBytes = kRank * 128;  // of a block of 64 weight rows

  // Eight weight rows of a block, where wgmma takes them: rows of 128 bytes, swizzled.
  __device__ __forceinline__ uint32_t WeightAt(int block, int k, int piece) const {
    return staging_ + block * kWeightBytes + k * 128 + (piece ^ (k % 8)) * 16;
  }
  // Eight of a token's ranks: rows of 32 bytes, swizzled.
  __device__ __forceinline__ uint32_t TokenAt(int token, int half) const {
    return tokens() + token * 32 + (half ^ (token / 4 % 2)) * 16;
  }
  __device__ __forceinline__ uint32_t tokens() const { return staging_ + 2 * kWeightBytes; }
  __device__ __forceinline__ void Sync() const { ptx::NamedBarrierSync(1 + consumer_, 128); }

  const LowRankProduct& low_;
  const uint32_t staging_;
  const int rows_;
  const int consumer_;
  const int thread_;
};

}  // namespace jaxmoe
