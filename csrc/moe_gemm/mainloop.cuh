// One warpgroup's k loop: 128 weight rows by its tokens accumulated in registers.
#pragma once

#include "csrc/moe_gemm/tile.cuh"

namespace jaxmoe {

// acc[b] is the 64-row block b of the warpgroup by its tokens; gate and up rows when gated.
template <class T>
using Accumulators = float[2][T::kWarpgroupTokens / 2];

// What a warpgroup takes of each stage.
struct WarpgroupShare {
  int first_block;  // of its two 64-row weight blocks
  int first_token;
  int rows;       // tokens that are stored
  int columns;    // tokens that are multiplied: wgmma's N covers at least these
  bool gathered;  // threads wrote the rows of X, not the copy engine
};

// A k step is four instructions. K-major: 32 bytes along the 128-byte row. MN-major: 16 rows of 128
// bytes.
template <class T>
inline constexpr uint32_t kWeightAdvance = T::kMajor == cute::SM90::GMMA::Major::K ? 32 : 16 * 128;

template <class T, int kN>
__device__ __forceinline__ void RunKSteps(const SharedStorage<T>& smem,
                                          int num_k_steps,
                                          const WarpgroupShare& share,
                                          int lane,
                                          PipelineState<T::kStages>& stage,
                                          Accumulators<T>& acc) {
  int previous = -1;
  for (int step = 0; step < num_k_steps; ++step) {
    ptx::BarrierWait(smem.full(stage.index), stage.parity);
    // Rows copied by threads were written through the generic proxy, wgmma reads through the
    // async one.
    if (T::kGatherByThreads && share.gathered) ptx::FenceProxyAsync();
    const uint32_t weights =
        ptx::SmemAddress(smem.weights(stage.index)) + share.first_block * T::kBlockBytes;
    const uint32_t tokens =
        ptx::SmemAddress(smem.tokens(stage.index)) + share.first_token * T::kStepBytes;
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
    // The step before this one has been read: its stage goes back to the producers.
    cute::warpgroup_wait<1>();
    if (previous >= 0) ReleaseStage(smem, previous, lane);
    previous = stage.index;
    stage.Advance();
  }
  cute::warpgroup_wait<0>();
  ptx::FenceAccumulator(acc[0]);
  ptx::FenceAccumulator(acc[1]);
  ReleaseStage(smem, previous, lane);
}

// Weight scales of the steps of a promoted k loop, where those of X do not hold them already.
struct StepScales {
  const float* weight[2];  // of this thread's rows of each block, from the first step on; or null
};

// Where the scale of a token lies among those of its step. A thread's accumulators 4 j + e are of
// tokens 8 j + 2 * (lane % 4) + e % 2: it reads those of two j at once.
__device__ __forceinline__ int StepScaleAt(int token) {
  return token / 16 * 16 + token % 8 / 2 * 4 + token / 8 % 2 * 2 + token % 2;
}

// The first scales of a promotion, read while its products are made: under wgmma's own reads shared
// memory takes long to answer. The others follow into the registers of promoted sums.
template <int kN>
struct ScaleQueue {
  static constexpr int kPairs = (kN + 15) / 16;
  static constexpr int kAhead = kPairs < 4 ? kPairs : 4;

  float4 ahead[kAhead];

  __device__ __forceinline__ explicit ScaleQueue(const float4* scales) {
#pragma unroll
    for (int pair = 0; pair < kAhead; ++pair) ahead[pair] = scales[4 * pair];
  }
};

// acc += part * scales.
template <class T, int kN>
__device__ __forceinline__ void Promote(const float4* scales,
                                        ScaleQueue<kN> queue,
                                        float weight_scale,
                                        const float (&part)[T::kWarpgroupTokens / 2],
                                        float (&acc)[T::kWarpgroupTokens / 2]) {
  constexpr int kAhead = ScaleQueue<kN>::kAhead;
#pragma unroll
  for (int pair = 0; pair < ScaleQueue<kN>::kPairs; ++pair) {
    const float4 x = queue.ahead[pair % kAhead];
    if (pair + kAhead < ScaleQueue<kN>::kPairs) {
      queue.ahead[pair % kAhead] = scales[4 * (pair + kAhead)];
    }
    float scale[4] = {x.x, x.y, x.z, x.w};
    if constexpr (!T::kScalesByBlock) {
#pragma unroll
      for (float& s : scale) s *= weight_scale;
    }
#pragma unroll
    for (int i = 8 * pair; i < 8 * pair + 8 && i < kN / 2; ++i) {
      acc[i] = fmaf(part[i], scale[i / 4 % 2 * 2 + i % 2], acc[i]);
    }
  }
}

// Issues the products of a k step of one block.
template <class T, int kN>
__device__ __forceinline__ void IssueStep(uint64_t weights,
                                          uint64_t tokens,
                                          float (&part)[T::kWarpgroupTokens / 2]) {
  ptx::FenceAccumulator(part);
  cute::warpgroup_arrive();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint64_t a = ptx::MoveDescriptor(weights, i * kWeightAdvance<T>);
    const uint64_t b = ptx::MoveDescriptor(tokens, i * 32);
    ptx::Wgmma<typename T::Weight, kN, T::kMajor>(a, b, part, i > 0);
  }
  cute::warpgroup_commit_batch();
  ptx::FenceAccumulator(part);
}

// The k loop whose sums leave the tensor cores after every step. Where registers allow it, one
// block is multiplied while the other is promoted; else the other warpgroup keeps the tensor cores
// busy.
template <class T, int kN>
__device__ __forceinline__ void RunPromotedKSteps(const SharedStorage<T>& smem,
                                                  int num_k_steps,
                                                  const WarpgroupShare& share,
                                                  int lane,
                                                  const StepScales& scales,
                                                  PipelineState<T::kStages>& stage,
                                                  Accumulators<T>& acc) {
  constexpr bool kTwoParts = T::kWarpgroupTokens <= 96;
  float part[kTwoParts ? 2 : 1][T::kWarpgroupTokens / 2];
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) acc[0][i] = acc[1][i] = 0.0f;
  // Made once: until the products are issued, nothing is multiplied here.
  const uint64_t weights0 = ptx::Swizzle128Descriptor(ptx::SmemAddress(smem.weights(0)) +
                                                      share.first_block * T::kBlockBytes);
  const uint64_t tokens0 = ptx::Swizzle128Descriptor(ptx::SmemAddress(smem.tokens(0)) +
                                                     share.first_token * T::kStepBytes);
  const auto issue = [&](int index, int block, int to) {
    const uint32_t at = index * T::kStageBytes;
    IssueStep<T, kN>(ptx::MoveDescriptor(weights0, at + block * T::kBlockBytes),
                     ptx::MoveDescriptor(tokens0, at),
                     part[to]);
  };
  const auto step_scales = [&](int index, int block) {
    const int first = T::kScalesByBlock ? (share.first_block + block) * T::kBlockScales : 0;
    return reinterpret_cast<const float4*>(smem.step_scales(index) + first + share.first_token) +
           lane % 4;
  };
  // Of a step: 128 elements, so a block.
  const auto weight_scale = [&](int block, int step) {
    if constexpr (T::kScalesByBlock) return 1.0f;
    return scales.weight[block] != nullptr ? scales.weight[block][step] : 1.0f;
  };
  for (int step = 0; step < num_k_steps; ++step) {
    const int index = stage.index;
    const float weight[2] = {weight_scale(0, step), weight_scale(1, step)};
    ptx::BarrierWait(smem.full(index), stage.parity);
    if constexpr (kTwoParts) {
      issue(index, 0, 0);
      issue(index, 1, 1);
      const float4* const x = step_scales(index, 0);
      const ScaleQueue<kN> queue(x);
      cute::warpgroup_wait<1>();
      ptx::FenceAccumulator(part[0]);
      Promote<T, kN>(x, queue, weight[0], part[0], acc[0]);
      cute::warpgroup_wait<0>();
      ptx::FenceAccumulator(part[1]);
      Promote<T, kN>(x, ScaleQueue<kN>(x), weight[1], part[1], acc[1]);
    } else {
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        issue(index, block, 0);
        const float4* const x = step_scales(index, block);
        const ScaleQueue<kN> queue(x);
        cute::warpgroup_wait<0>();
        ptx::FenceAccumulator(part[0]);
        Promote<T, kN>(x, queue, weight[block], part[0], acc[block]);
      }
    }
    __syncwarp();  // every lane has read its scales
    ReleaseStage(smem, index, lane);
    stage.Advance();
  }
}

// Runs the k loop with the smallest wgmma N that covers the share. Columns past it stay undefined.
template <class T, int kN = T::kTokenStep>
__device__ __forceinline__ void RunMainloop(const SharedStorage<T>& smem,
                                            int num_k_steps,
                                            const WarpgroupShare& share,
                                            int lane,
                                            const StepScales& scales,
                                            PipelineState<T::kStages>& stage,
                                            Accumulators<T>& acc) {
  if constexpr (kN < T::kWarpgroupTokens) {
    if (share.columns > kN) {
      RunMainloop<T, kN + T::kTokenStep>(smem, num_k_steps, share, lane, scales, stage, acc);
      return;
    }
  }
  if constexpr (T::kPromoted) {
    RunPromotedKSteps<T, kN>(smem, num_k_steps, share, lane, scales, stage, acc);
  } else {
    RunKSteps<T, kN>(smem, num_k_steps, share, lane, stage, acc);
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
#pragma unroll
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
