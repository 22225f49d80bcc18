// Sums of a weight-gradient tile to global memory: added to what is there, rounded, in rows of dw.
//
// A warpgroup has 64 rows of M by 256 of N; a thread of it, of every 8 columns, two neighbours in
// each of two rows. Sums in 16 bits are staged in shared memory, half of them at a time, so that
// threads store 16 bytes and warps whole lines; float32 sums fill whole sectors as they are.
#pragma once

#include "csrc/weight_grad/tile.cuh"

namespace jaxmoe {

template <class T>
class TgmmEpilogue {
 public:
  using Element = typename T::Element;
  using Sums = float[T::kAccumulators];

  __device__ TgmmEpilogue(const TgmmArgs& args,
                          const TgmmStorage<T>& smem,
                          const TileInfo& info,
                          int consumer,
                          int thread)
      : args_(args),
        warp_(thread / 32),
        lane_(thread % 32),
        staging_(smem.staging(consumer)),
        weight_(static_cast<int64_t>(info.weight) * args.m * args.n) {
    const TgmmPlace place = TgmmPlace::Of(info);
    m_ = place.m_tile * T::kM + consumer * 64;
    n_ = place.n_tile * T::kN;
  }

  __device__ __forceinline__ void Run(Sums& sums) const {
    args_.out_f32 ? RunAs<float>(sums) : RunAs<Element>(sums);
  }

 private:
  static constexpr int kHalf = T::kN / 2;
  static constexpr int kGroups = T::kN / 8;  // of 8 columns

  template <class Out>
  __device__ __forceinline__ void RunAs(Sums& sums) const {
    if (args_.accumulate) AddOld<Out>(sums);
    if constexpr (sizeof(Out) == 4) {
      StoreFloats(sums);
    } else {
      StoreRows(sums);
    }
  }

  __device__ __forceinline__ int64_t Offset(int m, int n) const {
    return weight_ + static_cast<int64_t>(m) * args_.n + n;
  }

  // Sum 4 * group + e.
  __device__ __forceinline__ int Row(int e) const {
    return m_ + warp_ * 16 + e / 2 * 8 + lane_ / 4;
  }
  __device__ __forceinline__ int Column(int group, int e) const {
    return n_ + group * 8 + lane_ % 4 * 2 + e % 2;
  }

  template <class Out>
  __device__ __forceinline__ void AddOld(Sums& sums) const {
    const Out* out = static_cast<const Out*>(args_.out);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int m = Row(e);
        const int n = Column(group, e);
        if (m < args_.m && n < args_.n) {
          const Out old = out[Offset(m, n)];
          if constexpr (sizeof(Out) == 4) {
            sums[4 * group + e] += old;
          } else {
            sums[4 * group + e] += ptx::ToFloat(old);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void StoreFloats(const Sums& sums) const {
    float* out = static_cast<float*>(args_.out);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const int m = Row(e);
        const int n = Column(group, e);
        if (m < args_.m && n < args_.n) {
          const float* sum = &sums[4 * group + e];
          __stcs(reinterpret_cast<float2*>(out + Offset(m, n)), make_float2(sum[0], sum[1]));
        }
      }
    }
  }

  // Pieces of 16 bytes lie where the rows of a matrix that stmatrix writes are in different banks.
  static __device__ __forceinline__ int Swizzled(int row, int pieces, int piece) {
    return (row * pieces + (piece ^ (row % 8))) * 16;
  }

  // A warp by itself: its 16 rows of M by half of N.
  __device__ __forceinline__ void StoreRows(const Sums& sums) const {
    constexpr int kPieces = kHalf / 8;
    uint8_t* staging = staging_ + warp_ * (T::kStagingBytes / 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kHalf / 16; ++j) {
        const float* s = &sums[half * kHalf / 2 + 8 * j];
        const int row = lane_ % 16;
        ptx::StoreMatrix4(staging + Swizzled(row, kPieces, 2 * j + lane_ / 16),
                          ptx::Pack2<Element>(s[0], s[1]),
                          ptx::Pack2<Element>(s[2], s[3]),
                          ptx::Pack2<Element>(s[4], s[5]),
                          ptx::Pack2<Element>(s[6], s[7]));
      }
      __syncwarp();
      const int n = n_ + half * kHalf + lane_ % kPieces * 8;
#pragma unroll
      for (int pass = 0; pass < 8; ++pass) {
        const int row = 2 * pass + lane_ / kPieces;
        const uint4 piece =
            *reinterpret_cast<const uint4*>(staging + Swizzled(row, kPieces, lane_ % kPieces));
        Store16(m_ + warp_ * 16 + row, n, Offset(m_ + warp_ * 16 + row, n), piece);
      }
      __syncwarp();  // the staging is free for the next half, or tile
    }
  }

  // Columns of both operands are multiples of 8: 16 bytes are all in or all out.
  __device__ __forceinline__ void Store16(int m, int n, int64_t at, const uint4& piece) const {
    if (m < args_.m && n < args_.n) {
      // Written once and not read here: the operands shall stay in L2.
      __stcs(reinterpret_cast<uint4*>(static_cast<Element*>(args_.out) + at), piece);
    }
  }

  const TgmmArgs& args_;
  const int warp_;
  const int lane_;
  uint8_t* const staging_;
  const int64_t weight_;
  int m_;
  int n_;
};

}  // namespace jaxmoe
