// K loop of FP8 products over codes of four bits, which are e4m3 numbers as they are: see
// formats/int4_e4m3.cuh.
#pragma once

#include "csrc/gemm/sm90/promoted.cuh"

namespace jaxmoe {

// Columns that are multiplied at once, so that their sums fit beside the accumulators.
inline constexpr int kCodedColumns = 64;

// The operands of a thread for 128 of k of a block, 32 of k in each instruction. Rows 8 apart have
// neighbouring codes of a word. Every second code c becomes c - 15, whose byte is a mask away.
__device__ __forceinline__ void LoadCodes(const uint8_t* values,
                                          int thread,
                                          uint32_t (&codes)[4][4]) {
  constexpr uint32_t kCode = 0x0F0F0F0F;
  constexpr uint32_t kMinus15 = 0x8F008F00;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint2 words = reinterpret_cast<const uint2*>(values)[i * 128 + thread];
    codes[i][0] = (words.x & kCode) ^ kMinus15;
    codes[i][1] = (words.x >> 4 & kCode) ^ kMinus15;
    codes[i][2] = (words.y & kCode) ^ kMinus15;
    codes[i][3] = (words.y >> 4 & kCode) ^ kMinus15;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) ptx::FenceRegisters(codes[i]);
}

// The scales of a thread's two rows, which lie side by side in a strip.
__device__ __forceinline__ float2 CodedScales(const uint8_t* strip, int thread, bool half) {
  const uint32_t bits = reinterpret_cast<const uint32_t*>(strip)[thread / 32 * 8 + thread % 32 / 4];
  if (half) return __half22float2(reinterpret_cast<const __half2&>(bits));
  return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u));
}

// acc += (part + sums) * scales, of columns from kFirst on.
template <int kFirst, int kPart, int kAcc>
__device__ __forceinline__ void AddCoded(const float4* sums,
                                         ScaleQueue<kPart * 2> queue,
                                         float2 scales,
                                         const float (&part)[kPart],
                                         float (&acc)[kAcc]) {
  using Queue = ScaleQueue<kPart * 2>;
#pragma unroll
  for (int pair = 0; pair < Queue::kPairs; ++pair) {
    const float4 x = queue.ahead[pair % Queue::kAhead];
    if (pair + Queue::kAhead < Queue::kPairs) {
      queue.ahead[pair % Queue::kAhead] = sums[4 * (pair + Queue::kAhead)];
    }
    const float sum[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 8 * pair; i < 8 * pair + 8; ++i) {
      float& to = acc[kFirst / 2 + i];
      to = fmaf(part[i] + sum[i / 4 % 2 * 2 + i % 2], i / 2 % 2 == 0 ? scales.x : scales.y, to);
    }
  }
}

// Sums of 128 of k leave the tensor cores, get what codes are too large or too small by taken off,
// and are scaled. Of 64 tokens one block is multiplied while the other's sums are; of more there are no
// registers for that, and one warpgroup multiplies while the other does so.
template <class T>
__device__ __forceinline__ void RunCodedKSteps(const SharedStorage<T>& smem,
                                               int num_k_steps,
                                               const WarpgroupShare& share,
                                               int thread,
                                               bool half,
                                               PipelineState<T::kStages>& stage,
                                               Accumulators<T>& acc) {
  constexpr int kN = kCodedColumns;
  constexpr bool kBoth = T::kWarpgroupTokens == kN;
  static_assert(kBoth || T::kWarpgroupTokens == 2 * kN);
  float part[kBoth ? 2 : 1][kN / 2];
#pragma unroll
  for (int i = 0; i < T::kWarpgroupTokens / 2; ++i) acc[0][i] = acc[1][i] = 0.0f;
  const uint64_t tokens0 = ptx::Swizzle128Descriptor(ptx::SmemAddress(smem.tokens(0)));
  for (int step = 0; step < num_k_steps; ++step) {
    const int index = stage.index;
    ptx::BarrierWait(smem.full(index), stage.parity);
    const uint8_t* const weights = smem.weights(index) + share.first_block * T::kBlockBytes;
    const float4* const sums =
        reinterpret_cast<const float4*>(smem.step_scales(index)) + thread % 4;
    const uint64_t tokens = ptx::MoveDescriptor(tokens0, index * T::kTokenPitch);
    const auto strip = [&](int block) {
      return CodedScales(weights + block * T::kBlockBytes + T::kValueBytes, thread, half);
    };
    const auto multiply = [&](const uint32_t(&codes)[4][4], int column, float(&to)[kN / 2]) {
      const uint64_t from = ptx::MoveDescriptor(tokens, column * T::kTokenStepBytes);
      IssueStep(to, [&](int i, uint32_t k) {
        ptx::WgmmaRegisters<typename T::Weight, kN>(
            codes[i], ptx::MoveDescriptor(from, k), to, i > 0);
      });
    };
    const auto keep = [](uint32_t(&codes)[4][4]) {  // until they have been read
#pragma unroll
      for (int i = 0; i < 4; ++i) ptx::FenceRegisters(codes[i]);
    };
    if constexpr (kBoth) {
      uint32_t codes[2][4][4];
      LoadCodes(weights, thread, codes[0]);
      multiply(codes[0], 0, part[0]);
      LoadCodes(weights + T::kBlockBytes, thread, codes[1]);
      multiply(codes[1], 0, part[1]);
      const float2 scales[2] = {strip(0), strip(1)};
      const ScaleQueue<kN> queue(sums);
      cute::warpgroup_wait<1>();
      keep(codes[0]);
      ptx::FenceAccumulator(part[0]);
      AddCoded<0>(sums, queue, scales[0], part[0], acc[0]);
      cute::warpgroup_wait<0>();
      keep(codes[1]);
      ptx::FenceAccumulator(part[1]);
      AddCoded<0>(sums, ScaleQueue<kN>(sums), scales[1], part[1], acc[1]);
    } else {
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        uint32_t codes[4][4];
        LoadCodes(weights + block * T::kBlockBytes, thread, codes);
        multiply(codes, 0, part[0]);
        const float2 scales = strip(block);
        const ScaleQueue<kN> first(sums);
        cute::warpgroup_wait<0>();
        keep(codes);
        ptx::FenceAccumulator(part[0]);
        AddCoded<0>(sums, first, scales, part[0], acc[block]);
        if (share.rows > kN) {
          multiply(codes, kN, part[0]);
          const ScaleQueue<kN> second(sums + kN / 4);
          cute::warpgroup_wait<0>();
          keep(codes);
          ptx::FenceAccumulator(part[0]);
          AddCoded<kN>(sums + kN / 4, second, scales, part[0], acc[block]);
        }
      }
    }
    __syncwarp();  // every lane has read its codes, scales and sums
    ReleaseStage(smem, index, thread % 32);
    stage.Advance();
  }
}

}  // namespace jaxmoe
