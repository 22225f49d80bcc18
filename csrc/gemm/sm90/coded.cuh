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
__device__ __forceinline__ float2 CodedScales(const uint8_t* strip, int thread) {
  const uint32_t bits = reinterpret_cast<const uint32_t*>(strip)[thread / 32 * 8 + thread % 32 / 4];
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
// and are scaled, while the other warpgroup multiplies.
template <class T>
__device__ __forceinline__ void RunCodedKSteps(const SharedStorage<T>& smem,
                                               int num_k_steps,
                                               const WarpgroupShare& share,
                                               int thread,
                                               PipelineState<T::kStages>& stage,
                                               Accumulators<T>& acc) {
  constexpr int kN = kCodedColumns;
  static_assert(T::kWarpgroupTokens == 2 * kN);
  float part[kN / 2];
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
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const uint8_t* const of_block = weights + block * T::kBlockBytes;
      uint32_t codes[4][4];
      LoadCodes(of_block, thread, codes);
      float2 scales;
      const auto run = [&](auto columns) {
        constexpr int kFirst = columns;
        const uint64_t from = ptx::MoveDescriptor(tokens, kFirst * T::kTokenStepBytes);
        IssueStep(part, [&](int i, uint32_t k) {
          ptx::WgmmaRegisters<typename T::Weight, kN>(
              codes[i], ptx::MoveDescriptor(from, k), part, i > 0);
        });
        if (kFirst == 0) scales = CodedScales(of_block + T::kValueBytes, thread);
        const ScaleQueue<kN> queue(sums + kFirst / 4);
        cute::warpgroup_wait<0>();
#pragma unroll
        for (int i = 0; i < 4; ++i) ptx::FenceRegisters(codes[i]);  // they have been read
        ptx::FenceAccumulator(part);
        AddCoded<kFirst>(sums + kFirst / 4, queue, scales, part, acc[block]);
      };
      run(std::integral_constant<int, 0>());
      if (share.rows > kN) run(std::integral_constant<int, kN>());
    }
    __syncwarp();  // every lane has read its codes, scales and sums
    ReleaseStage(smem, index, thread % 32);
    stage.Advance();
  }
}

}  // namespace jaxmoe
