// K loops of FP8 products whose sums leave the tensor cores after every step, to be scaled and
// added in float32.
#pragma once

#include "csrc/gemm/sm90/warpgroup.cuh"

namespace jaxmoe {

// Weight scales of a warp's rows in a promoted k loop, one for each step. With tokens on M they are
// in the stage.
struct StepScales {
  const float* weight[2];  // by 64-row weight block, from this CTA's first step on; or null

  // Scale of step `step`, which has the 128 elements of a block of scales; 1 without scales.
  __device__ __forceinline__ float of(int block, int step) const {
    return weight[block] != nullptr ? weight[block][step] : 1.0f;
  }
};

// Index of a token's scale among those of its step. With weights on M, accumulator 4 j + e of a
// thread belongs to token 8 j + 2 * (lane % 4) + e % 2, and the thread reads the scales of two j at
// once. With tokens on M it has tokens lane / 4 and lane / 4 + 8 of a warp's 16, and reads both.
template <class T>
__device__ __forceinline__ int StepScaleAt(int token) {
  if constexpr (T::kTokensOnM) {
    return token / 16 * 16 + token % 8 * 2 + token / 8 % 2;
  }
  return token / 16 * 16 + token % 8 / 2 * 4 + token / 8 % 2 * 2 + token % 2;
}

// First scales of a promotion, read while its products are made, because shared memory answers
// slowly while wgmma reads it. Later ones take the registers of sums that are already promoted.
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
#pragma unroll
    for (float& s : scale) s *= weight_scale;
#pragma unroll
    for (int i = 8 * pair; i < 8 * pair + 8 && i < kN / 2; ++i) {
      acc[i] = fmaf(part[i], scale[i / 4 % 2 * 2 + i % 2], acc[i]);
    }
  }
}

// Issues the four products of a k step of one block: multiply(i, offset), 32 bytes of k apart.
template <int kSize, class Multiply>
__device__ __forceinline__ void IssueStep(float (&part)[kSize], const Multiply& multiply) {
  ptx::FenceAccumulator(part);
  cute::warpgroup_arrive();
#pragma unroll
  for (int i = 0; i < 4; ++i) multiply(i, i * 32);
  cute::warpgroup_commit_batch();
  ptx::FenceAccumulator(part);
}

// K loop whose sums leave the tensor cores after every step. One weight block is multiplied while
// the other's sums are promoted.
template <class T, int kN>
__device__ __forceinline__ void RunPromotedKSteps(const SharedStorage<T>& smem,
                                                  int num_k_steps,
                                                  const WarpgroupShare& share,
                                                  int lane,
                                                  const StepScales& scales,
                                                  PipelineState<T::kStages>& stage,
                                                  Accumulators<T>& acc) {
  static_assert(T::kWarpgroupTokens <= 96, "two parts do not fit the registers");
  float part[2][T::kWarpgroupTokens / 2];
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) acc[0][i] = acc[1][i] = 0.0f;
  // Descriptors are made once: nothing is multiplied while a step makes its own.
  const uint64_t weights0 = ptx::Swizzle128Descriptor(ptx::SmemAddress(smem.weights(0)) +
                                                      share.first_block * T::kBlockBytes);
  const uint64_t tokens0 = ptx::Swizzle128Descriptor(ptx::SmemAddress(smem.tokens(0)) +
                                                     share.first_token * T::kTokenStepBytes);
  for (int step = 0; step < num_k_steps; ++step) {
    const int index = stage.index;
    const float weight[2] = {scales.of(0, step), scales.of(1, step)};
    const float4* const x =
        reinterpret_cast<const float4*>(smem.step_scales(index) + share.first_token) + lane % 4;
    const uint32_t at = index * T::kStageBytes;
    ptx::BarrierWait(smem.full(index), stage.parity);
    if (share.copied) ptx::FenceProxyAsync();  // as in RunKSteps
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const uint64_t weights = ptx::MoveDescriptor(weights0, at + block * T::kBlockBytes);
      const uint64_t tokens = ptx::MoveDescriptor(tokens0, at);
      IssueStep(part[block], [&](int i, uint32_t k) {
        ptx::Wgmma<typename T::Weight, kN, T::kMajor>(
            ptx::MoveDescriptor(weights, k), ptx::MoveDescriptor(tokens, k), part[block], i > 0);
      });
    }
    const ScaleQueue<kN> queue(x);
    cute::warpgroup_wait<1>();
    ptx::FenceAccumulator(part[0]);
    Promote<T, kN>(x, queue, weight[0], part[0], acc[0]);
    cute::warpgroup_wait<0>();
    ptx::FenceAccumulator(part[1]);
    Promote<T, kN>(x, ScaleQueue<kN>(x), weight[1], part[1], acc[1]);
    __syncwarp();  // every lane has read its scales
    ReleaseStage(smem, index, lane);
    stage.Advance();
  }
}

// acc += part * scales, of a thread's two tokens and of the two halves of 128 weight rows.
template <int kSize>
__device__ __forceinline__ void PromoteTokens(const float (&part)[kSize],
                                              float2 x,
                                              float2 weights,
                                              float (&acc)[kSize]) {
  const float scale[2][2] = {{x.x * weights.x, x.x * weights.y},
                             {x.y * weights.x, x.y * weights.y}};
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    acc[i] = fmaf(part[i], scale[i / 2 % 2][i / (kSize / 2)], acc[i]);
  }
}

// Promoted k loop with tokens on wgmma's M: block b is 64 tokens by the warpgroup's 128 weight
// rows. A thread has two tokens of a block, so it reads two token scales and two weight scales.
// With weights on M it has 32 tokens, and reading their scales would keep shared memory as busy as
// wgmma's operands do.
//
// A warpgroup that promotes multiplies nothing, and the other one cannot use all of that time: what
// is neither product nor promotion counts, most of all between a promotion and the next product.
template <class T>
__device__ __forceinline__ void RunTokenMajorKSteps(const SharedStorage<T>& smem,
                                                    int num_k_steps,
                                                    const WarpgroupShare& share,
                                                    int thread,
                                                    PipelineState<T::kStages>& stage,
                                                    Accumulators<T>& acc) {
  constexpr int kPitch = T::kStepScaleBytes / static_cast<int>(sizeof(float2));
  float part[T::kWarpgroupRows / 2];
#pragma unroll
  for (int i = 0; i < T::kWarpgroupRows / 2; ++i) acc[0][i] = acc[1][i] = 0.0f;
  // Descriptors of the first stage: fields that are constants, and an address from another lane, or
  // ptxas would make it again for every product.
  const auto held = [](uint32_t address) -> uint64_t {
    const auto low = static_cast<uint32_t>(ptx::Swizzle128Descriptor(address));
    return ptx::Swizzle128Descriptor(0) | __shfl_sync(0xffffffffu, low, 0);
  };
  const uint64_t weights0 =
      held(ptx::SmemAddress(smem.weights(0)) + share.first_block * T::kBlockBytes);
  const uint64_t tokens0 =
      held(ptx::SmemAddress(smem.tokens(0)) + share.first_token * T::kTokenStepBytes);
  const float2* const x = reinterpret_cast<const float2*>(smem.step_scales(0) + share.first_token) +
                          thread / 32 * 8 + thread % 32 / 4;
  const float2* const w = reinterpret_cast<const float2*>(smem.step_scales(0) + T::kBlockScales) +
                          share.first_block / 2;
  bool ready = false;
  for (int step = 0; step < num_k_steps; ++step) {
    const int current = stage.index;
    const uint32_t at = current * T::kStageBytes;
    if (!ready) ptx::BarrierWait(smem.full(current), stage.parity);
    stage.Advance();
    const float2 x0 = x[current * kPitch];
    const float2 x1 = x[current * kPitch + 32];
    const float2 of_weights = w[current * kPitch];
    const auto multiply = [&](int block) {
      const uint64_t tokens = ptx::MoveDescriptor(tokens0, at + block * T::kBlockBytes);
      const uint64_t weights = ptx::MoveDescriptor(weights0, at);
      IssueStep(part, [&](int i, uint32_t k) {
        ptx::WgmmaTokensOnM<typename T::Weight>(
            ptx::MoveDescriptor(tokens, k), ptx::MoveDescriptor(weights, k), part, i > 0);
      });
    };
    const auto release = [&] {
      __syncwarp();  // every lane has read its scales
      ReleaseStage(smem, current, thread % 32);
      ready = ptx::BarrierTest(smem.full(stage.index), stage.parity);
    };
    if (share.rows > 0) {
      multiply(0);
      cute::warpgroup_wait<0>();
      ptx::FenceAccumulator(part);
      PromoteTokens(part, x0, of_weights, acc[0]);
    }
    if (share.rows > 64) {
      multiply(1);
      cute::warpgroup_wait<0>();
      ptx::FenceAccumulator(part);
      release();
      PromoteTokens(part, x1, of_weights, acc[1]);
    } else {
      release();
    }
  }
}

}  // namespace jaxmoe
