// K loop of one warpgroup: 128 weight rows by its tokens, accumulated in registers.
#pragma once

#include "csrc/gemm/sm90/coded.cuh"
#include "csrc/gemm/sm90/packed.cuh"

namespace jaxmoe {

// Issues no products behind those of the k loop.
struct NothingLast {
  template <int kN, class Sums>
  __device__ __forceinline__ void Issue(Sums&) const {}
};

// Bytes from one of a step's four wgmma operands to the next. K-major: 32 bytes along the 128-byte
// row. MN-major: 16 rows of 128 bytes.
template <class T>
inline constexpr uint32_t kWeightAdvance = T::kMajor == cute::SM90::GMMA::Major::K ? 32 : 16 * 128;

template <class T, int kN, class Last>
__device__ __forceinline__ void RunKSteps(const SharedStorage<T>& smem,
                                          int num_k_steps,
                                          const WarpgroupShare& share,
                                          int lane,
                                          StageOf<T>& stage,
                                          Accumulators<T>& acc,
                                          const Last& last) {
  // Few tokens are soon multiplied: what is loaded sooner is worth more than products back to back.
  constexpr bool kAtOnce = T::kFlexible && kN <= T::kNarrowTokens;
  int previous = -1;
  for (int step = 0; step < num_k_steps; ++step) {
    ptx::BarrierWait(smem.full(stage.index), stage.parity);
    // Rows copied by threads were written through the generic proxy, wgmma reads through the
    // async one.
    if (share.copied) ptx::FenceProxyAsync();
    const uint32_t weights =
        ptx::SmemAddress(WeightsAt(smem, stage)) + share.first_block * T::kBlockBytes;
    const uint32_t tokens =
        ptx::SmemAddress(TokensAt(smem, stage)) + share.first_token * T::kTokenStepBytes;
    ptx::FenceAccumulator(acc[0]);
    ptx::FenceAccumulator(acc[1]);
    cute::warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint64_t b = ptx::Swizzle128Descriptor(tokens + i * 32);
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        const uint64_t a =
            ptx::Swizzle128Descriptor(weights + block * T::kBlockBytes + i * kWeightAdvance<T>);
        ptx::Wgmma<typename T::Weight, kN, T::kMajor>(a, b, acc[block], step > 0 || i > 0);
      }
    }
    cute::warpgroup_commit_batch();
    ptx::FenceAccumulator(acc[0]);
    ptx::FenceAccumulator(acc[1]);
    if constexpr (kAtOnce) {
      cute::warpgroup_wait<0>();
      ReleaseStage(smem, stage.index, lane);
    } else {
      // wgmma has read the step before this one, whose stage goes back to the producers.
      cute::warpgroup_wait<1>();
      if (previous >= 0) ReleaseStage(smem, previous, lane);
      previous = stage.index;
    }
    stage.Advance();
  }
  last.template Issue<kN>(acc);
  cute::warpgroup_wait<0>();
  ptx::FenceAccumulator(acc[0]);
  ptx::FenceAccumulator(acc[1]);
  if constexpr (!kAtOnce) ReleaseStage(smem, previous, lane);
}

// Weights without zero points are decoded in fewer instructions. Then there are twice as many
// loops, for whose operands ptxas takes registers of their own: with zero points there is one for
// all N.
template <class T>
constexpr bool FasterIfSymmetric() {
  if constexpr (!T::kPacked)
    return false;
  else
    return !std::is_void_v<typename T::Decoder::Symmetric>;
}
template <class T>
inline constexpr bool kFasterIfSymmetric = FasterIfSymmetric<T>();
template <class T>
inline constexpr int kFirstNOfZeros =
    kFasterIfSymmetric<T> && !T::kWarpProducts ? T::kWarpgroupTokens : T::kFirstN;

template <class T, int kN, class Decoder, class... Args>
__device__ __forceinline__ void RunPacked(Args&&... args) {
  if constexpr (T::kWarpProducts) {
    RunPackedWarpKSteps<T, kN, Decoder>(args...);
  } else {
    RunPackedKSteps<T, kN, Decoder>(args...);
  }
}

// Runs the k loop with the smallest wgmma N, of kFirst to kLast, that covers the share. Columns
// past that N stay undefined. With tokens on M there is one N, and blocks of tokens past the share
// are zeros. `last` adds products to those of the loop: see LowRank, of plain weights, and
// TokenSums. NOTE: loops lie far apart, so each comparison on the way to one waits for
// instructions: halves.
template <class T, int kFirst = T::kFirstN, int kLast = T::kWarpgroupTokens, class Last>
__device__ __forceinline__ void RunMainloop(const MoeGemmArgs& args,
                                            const SharedStorage<T>& smem,
                                            int num_k_steps,
                                            const WarpgroupShare& share,
                                            int thread,
                                            const StepScales& scales,
                                            StageOf<T>& stage,
                                            Accumulators<T>& acc,
                                            const Last& last) {
  if constexpr (kFirst < kLast) {
    constexpr int kMiddle = kFirst + (kLast - kFirst) / T::kTokenStep / 2 * T::kTokenStep;
    const bool has_loop = kMiddle >= kFirstNOfZeros<T> || !args.packed.has_zeros;
    if (share.columns > kMiddle || !has_loop) {
      RunMainloop<T, kMiddle + T::kTokenStep, kLast>(
          args, smem, num_k_steps, share, thread, scales, stage, acc, last);
    } else {
      RunMainloop<T, kFirst, kMiddle>(
          args, smem, num_k_steps, share, thread, scales, stage, acc, last);
    }
    return;
  }
  constexpr int kN = kLast;
  if constexpr (T::kTokensOnM) {
    RunTokenMajorKSteps<T>(smem, num_k_steps, share, thread, stage, acc);
  } else if constexpr (T::kTokenSums) {
    RunCodedKSteps<T, kN>(smem, num_k_steps, share, thread, last, stage, acc);
  } else if constexpr (T::kPacked) {
    using Decoder = typename T::Decoder;
    if constexpr (kFasterIfSymmetric<T>) {
      if (!args.packed.has_zeros) {
        RunPacked<T, kN, typename Decoder::Symmetric>(
            args.packed, smem, num_k_steps, share, thread, stage, acc);
        return;
      }
    }
    if constexpr (kN >= kFirstNOfZeros<T>) {
      RunPacked<T, kN, Decoder>(args.packed, smem, num_k_steps, share, thread, stage, acc);
    }
  } else if constexpr (T::kPromoted) {
    RunPromotedKSteps<T, kN>(smem, num_k_steps, share, thread % 32, scales, stage, acc);
  } else {
    RunKSteps<T, kN>(smem, num_k_steps, share, thread % 32, stage, acc, last);
  }
}

// Adds up the accumulators of the CTAs that share a tile's k loop, in their order: always the same
// sum. Returns whether this CTA has it.
template <class T>
__device__ __forceinline__ bool ReduceSlices(const SharedStorage<T>& smem,
                                             int thread,
                                             uint32_t parity,
                                             Accumulators<T>& acc) {
  constexpr int kPieces = T::kWarpgroupTokens / 8;  // of 16 bytes, in one of the two blocks
  static_assert(T::kSplitK == 1 || T::kConsumers == 1, "one warpgroup has the whole tile");
  const int rank = ptx::ClusterRank();
  const auto piece = [&](int part, int block, int i) {
    return smem.partial(part) + ((block * kPieces + i) * 128 + thread) * 16;
  };
  if (rank > 0) {
    ptx::BarrierWait(smem.partial_empty(), parity ^ 1);  // the tile before has been read
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        int bits[4];
        // Stores of the accumulators' own registers would make ptxas serialize wgmma: the addition
        // puts the values into others.
#pragma unroll
        for (int e = 0; e < 4; ++e) bits[e] = __float_as_int(acc[block][4 * i + e] + 0.0f);
        ptx::StoreAsyncAt(piece(rank - 1, block, i),
                          smem.partial_full(),
                          0,
                          make_int4(bits[0], bits[1], bits[2], bits[3]));
      }
    }
    return false;
  }
  if (thread == 0) {
    ptx::BarrierArriveExpectTx(smem.partial_full(), (T::kSplitK - 1) * T::kPartialBytes);
  }
  ptx::BarrierWait(smem.partial_full(), parity);
#pragma unroll 1
  for (int part = 0; part < T::kSplitK - 1; ++part) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const float4 other = *reinterpret_cast<const float4*>(piece(part, block, i));
        float* a = &acc[block][4 * i];
        a[0] += other.x;
        a[1] += other.y;
        a[2] += other.z;
        a[3] += other.w;
      }
    }
  }
  __syncwarp();  // every lane has read
  const int lane = thread % 32;
  if (lane > 0 && lane < T::kSplitK) ptx::BarrierArriveAt(smem.partial_empty(), lane);
  return true;
}

}  // namespace jaxmoe
