// K loop over packed weights: decoded in registers, from where wgmma reads them.
//
// A trait of packed weights is a Decoder:
//   kValueBytes  of 64 rows by 64 of k
//   kStripBytes  of the scales of such a block, at most
//   kFactor      by which sums are to be multiplied, beside the scale of their weight
//   Scales       those of the two rows of a thread in half a step, as LoadScales gives them
//   Decode       the A operand of an instruction, which is 16 k: the first or second of this half
#pragma once

#include "csrc/gemm/sm90/warpgroup.cuh"

namespace jaxmoe {

// Place of a thread's rows, 16 warp + lane / 4 and 8 more, in a strip of scales.
__device__ __forceinline__ int StripSite(int thread) { return thread / 32 * 8 + thread % 32 / 4; }

// Words and scales of half a step, of a thread: rows of the two weight blocks of its warpgroup.
template <class T>
struct PackedHalf {
  using Decoder = typename T::Decoder;
  static constexpr int kWords = T::kValueBytes / 2048;  // of a block, for an instruction
  using Words = std::conditional_t<kWords == 1, uint2, uint4>;

  Words words[2];
  typename Decoder::Scales scales[2];

  __device__ __forceinline__ void Load(const PackedArgs& packed,
                                       const SharedStorage<T>& smem,
                                       int stage,
                                       int first_block,
                                       int half,
                                       int thread) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const uint8_t* values = smem.weights(stage) + (first_block + block) * T::kBlockBytes;
      words[block] = reinterpret_cast<const Words*>(values)[half * 128 + thread];
      scales[block] = Decoder::LoadScales(values + T::kValueBytes, StripSite(thread), half, packed);
    }
  }

  // The operand of the first or second instruction of this half.
  __device__ __forceinline__ void Decode(int block, int part, uint32_t (&a)[4]) const {
    const Words& pair = words[block];
    uint32_t mine[kWords];
    if constexpr (kWords == 1) {
      mine[0] = part == 0 ? pair.x : pair.y;
    } else {
      mine[0] = part == 0 ? pair.x : pair.z;
      mine[1] = part == 0 ? pair.y : pair.w;
    }
    Decoder::Decode(mine, scales[block], part, a);
  }
};

// Operands are decoded while wgmma multiplies those before them, so there are two sets; what they
// are decoded of is read while the set before is issued. Decode tiles have registers for operands
// of two instructions in a set, so that there is less to wait for.
template <class T, int kN>
__device__ __forceinline__ void RunPackedKSteps(const PackedArgs& packed,
                                                const SharedStorage<T>& smem,
                                                int num_k_steps,
                                                const WarpgroupShare& share,
                                                int thread,
                                                PipelineState<T::kStages>& stage,
                                                Accumulators<T>& acc) {
  constexpr int kSet = T::kDecode ? 2 : 1;
  const int lane = thread % 32;
  int previous = -1;
  uint32_t a[2][kSet][2][4];  // [set][instruction][weight block][register]
  PackedHalf<T> half;
  ptx::BarrierWait(smem.full(stage.index), stage.parity);
  half.Load(packed, smem, stage.index, share.first_block, 0, thread);
  for (int step = 0; step < num_k_steps; ++step) {
    // Rows copied by threads were written through the generic proxy, wgmma reads through the
    // async one.
    if (T::kGatherByThreads && share.gathered) ptx::FenceProxyAsync();
    const uint64_t tokens = ptx::Swizzle128Descriptor(ptx::SmemAddress(smem.tokens(stage.index)) +
                                                      share.first_token * T::kTokenStepBytes);
    const int current = stage.index;
    stage.Advance();
#pragma unroll
    for (int i = 0; i < 4; i += kSet) {
      auto& set = a[i / kSet % 2];
#pragma unroll
      for (int j = 0; j < kSet; ++j) {
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          half.Decode(block, (i + j) % 2, set[j][block]);
          ptx::FenceRegisters(set[j][block]);
        }
      }
      if (i + kSet == 2) half.Load(packed, smem, current, share.first_block, 1, thread);
      if (i + kSet == 4 && step + 1 < num_k_steps) {
        ptx::BarrierWait(smem.full(stage.index), stage.parity);
        half.Load(packed, smem, stage.index, share.first_block, 0, thread);
      }
      ptx::FenceAccumulator(acc[0]);
      ptx::FenceAccumulator(acc[1]);
      cute::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < kSet; ++j) {
        const uint64_t b = ptx::MoveDescriptor(tokens, 32 * (i + j));
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          ptx::WgmmaRegisters<typename T::Weight, kN>(
              set[j][block], b, acc[block], step > 0 || i + j > 0);
        }
      }
      cute::warpgroup_commit_batch();
      ptx::FenceAccumulator(acc[0]);
      ptx::FenceAccumulator(acc[1]);
      cute::warpgroup_wait<1>();
      // The operands before these have been read.
      auto& other = a[(i / kSet + 1) % 2];
#pragma unroll
      for (int j = 0; j < kSet; ++j) {
        ptx::FenceRegisters(other[j][0]);
        ptx::FenceRegisters(other[j][1]);
      }
      if (i == 0 && previous >= 0) ReleaseStage(smem, previous, lane);
    }
    previous = current;
  }
  cute::warpgroup_wait<0>();
  ptx::FenceAccumulator(acc[0]);
  ptx::FenceAccumulator(acc[1]);
  ReleaseStage(smem, previous, lane);
}

}  // namespace jaxmoe
