// K loop over packed weights: decoded in registers, from where wgmma reads them.
//
// A trait of packed weights is a Decoder:
//   kValueBytes  of 64 rows by 64 of k
//   kStripBytes  of the scales of such a block, at most
//   kFactor      by which sums are to be multiplied, beside the scale of their weight
//   Site         where a thread finds the scales of its rows in a strip
//   Scales       those of half a step, as LoadScales gives them
//   Decode       the A operand of an instruction, which is 16 k: the first or second of a half
//   kRowScales   rows of X may have scales, see RowScales
//   Symmetric    a faster Decoder where there are no zero points, or void
#pragma once

#include "csrc/gemm/sm90/warpgroup.cuh"

namespace jaxmoe {

// Words and scales of half a step, of a thread: rows of the two weight blocks of its warpgroup.
template <class T, class Decoder>
struct PackedHalf {
  static constexpr int kWords = T::kValueBytes / 2048;  // of a block, for an instruction
  using Words = std::conditional_t<kWords == 1, uint2, uint4>;

  Words words[2];
  typename Decoder::Scales scales[2];

  __device__ __forceinline__ void Load(const SharedStorage<T>& smem,
                                       int stage,
                                       int first_block,
                                       int half,
                                       int thread,
                                       const typename Decoder::Site& site) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const uint8_t* values = smem.weights(stage) + (first_block + block) * T::kBlockBytes;
      words[block] = reinterpret_cast<const Words*>(values)[half * 128 + thread];
      scales[block] = Decoder::LoadScales(values + T::kValueBytes, site, half);
    }
  }

  // The operand of the first or second instruction of the half that was loaded.
  __device__ __forceinline__ void Decode(
      const typename Decoder::Site& site, int block, int half, int part, uint32_t (&a)[4]) const {
    const Words& pair = words[block];
    uint32_t mine[kWords];
    if constexpr (kWords == 1) {
      mine[0] = part == 0 ? pair.x : pair.y;
    } else {
      mine[0] = part == 0 ? pair.x : pair.z;
      mine[1] = part == 0 ? pair.y : pair.w;
    }
    Decoder::Decode(mine, scales[block], site, half, part, a);
  }
};

// K loop of tiles with few tokens: each warp multiplies its own rows, and waits for no other. Sums
// have the bits of wgmma's. A stage goes back before all of it is multiplied.
template <class T, int kN, class Decoder>
__device__ __forceinline__ void RunPackedWarpKSteps(const PackedArgs& packed,
                                                    const SharedStorage<T>& smem,
                                                    int num_k_steps,
                                                    const WarpgroupShare& share,
                                                    int thread,
                                                    PipelineState<T::kStages>& stage,
                                                    Accumulators<T>& acc) {
  constexpr int kTokenBlocks = kN / 8;
  const int lane = thread % 32;
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) acc[0][i] = acc[1][i] = 0.0f;
  // Lane l reads 16 bytes of token l % 8, the l / 8th of half a step, where the swizzle put them.
  uint32_t token_row[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    token_row[half] = ptx::SmemAddress(smem.tokens(0)) + lane % 8 * T::kTokenStepBytes +
                      ((4 * half + lane / 8) ^ (lane % 8)) * 16;
  }
  const typename Decoder::Site site(packed, thread);
  PackedHalf<T, Decoder> halves[2];
  const auto load = [&](int half) {
    halves[half].Load(smem, stage.index, share.first_block, half, thread, site);
  };
  ptx::BarrierWait(smem.full(stage.index), stage.parity);
  load(0);
  load(1);
  for (int step = 0; step < num_k_steps; ++step) {
    const int current = stage.index;
    stage.Advance();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t tokens[kTokenBlocks][4];  // [..][8 of k]
#pragma unroll
      for (int j = 0; j < kTokenBlocks; ++j) {
        ptx::LoadMatrix4(token_row[half] + current * T::kTokenPitch + j * 8 * T::kTokenStepBytes,
                         tokens[j]);
      }
#pragma unroll
      for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          uint32_t a[4];
          halves[half].Decode(site, block, half, part, a);
#pragma unroll
          for (int j = 0; j < kTokenBlocks; ++j) {
            ptx::MmaWarp<typename T::Weight>(
                a, tokens[j][2 * part], tokens[j][2 * part + 1], &acc[block][4 * j]);
          }
        }
      }
      if (half == 1) {
        __syncwarp();  // every lane has read its tokens
        ReleaseStage(smem, current, lane);
      }
      if (step + 1 < num_k_steps) {
        if (half == 0) ptx::BarrierWait(smem.full(stage.index), stage.parity);
        load(half);
      }
    }
  }
}

// Multiplies a set of operands, which begin `offset` bytes into a step, by kN tokens: by the N that
// covers `columns` from kN on, if it is to be chosen.
template <class T, int kN, bool kChosen, int kSet>
__device__ __forceinline__ void IssueProducts(const uint32_t (&set)[kSet][2][4],
                                              uint64_t tokens,
                                              int offset,
                                              bool accumulate,
                                              int columns,
                                              Accumulators<T>& acc) {
  if constexpr (kChosen && kN < T::kWarpgroupTokens) {
    if (columns > kN) {
      IssueProducts<T, kN + T::kTokenStep, true>(set, tokens, offset, accumulate, columns, acc);
      return;
    }
  }
  cute::warpgroup_arrive();
#pragma unroll
  for (int j = 0; j < kSet; ++j) {
    const uint64_t b = ptx::MoveDescriptor(tokens, offset + 32 * j);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      ptx::WgmmaRegisters<typename T::Weight, kN>(
          set[j][block], b, acc[block], accumulate || j > 0);
    }
  }
  cute::warpgroup_commit_batch();
}

// Operands are decoded while wgmma multiplies those before them, so there are two sets; what they
// are decoded of is read when the set before has been issued. Tiles of few tokens have registers
// for operands of two instructions in a set, so that there is less to wait for; those of more than
// 128 for one set alone, and one warpgroup decodes while the other multiplies. A loop for one N is
// 10 % faster than one that chooses it, so those of weights with zero points alone do.
template <class T, int kN, class Decoder>
__device__ __forceinline__ void RunPackedKSteps(const PackedArgs& packed,
                                                const SharedStorage<T>& smem,
                                                int num_k_steps,
                                                const WarpgroupShare& share,
                                                int thread,
                                                PipelineState<T::kStages>& stage,
                                                Accumulators<T>& acc) {
  constexpr int kSet = T::kWarpgroupTokens <= 64 ? 2 : 1;
  constexpr int kSets = T::kWarpgroupTokens > 128 ? 1 : 2;
  constexpr bool kChosen = !std::is_void_v<typename Decoder::Symmetric>;
  const int lane = thread % 32;
  int previous = -1;
  uint32_t a[kSets][kSet][2][4];  // [set][instruction][weight block][register]
  const typename Decoder::Site site(packed, thread);
  PackedHalf<T, Decoder> half;
  ptx::BarrierWait(smem.full(stage.index), stage.parity);
  half.Load(smem, stage.index, share.first_block, 0, thread, site);
  for (int step = 0; step < num_k_steps; ++step) {
    const uint64_t tokens = ptx::Swizzle128Descriptor(ptx::SmemAddress(smem.tokens(stage.index)) +
                                                      share.first_token * T::kTokenStepBytes);
    const int current = stage.index;
    stage.Advance();
#pragma unroll
    for (int i = 0; i < 4; i += kSet) {
      auto& set = a[i / kSet % kSets];
#pragma unroll
      for (int j = 0; j < kSet; ++j) {
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          half.Decode(site, block, (i + j) / 2, (i + j) % 2, set[j][block]);
          ptx::FenceRegisters(set[j][block]);
        }
      }
      ptx::FenceAccumulator(acc[0]);
      ptx::FenceAccumulator(acc[1]);
      IssueProducts<T, kChosen ? T::kFirstN : kN, kChosen>(
          set, tokens, 32 * i, step > 0 || i > 0, share.columns, acc);
      if (i + kSet == 2) half.Load(smem, current, share.first_block, 1, thread, site);
      if (i + kSet == 4 && step + 1 < num_k_steps) {
        ptx::BarrierWait(smem.full(stage.index), stage.parity);
        half.Load(smem, stage.index, share.first_block, 0, thread, site);
      }
      ptx::FenceAccumulator(acc[0]);
      ptx::FenceAccumulator(acc[1]);
      cute::warpgroup_wait<kSets - 1>();
      // The operands that the next ones replace have been read.
      auto& other = a[(i / kSet + 1) % kSets];
#pragma unroll
      for (int j = 0; j < kSet; ++j) {
        ptx::FenceRegisters(other[j][0]);
        ptx::FenceRegisters(other[j][1]);
      }
      if (i == 0) __syncwarp();  // every lane has read its weights
      if (i == 0 && previous >= 0) ReleaseStage(smem, previous, lane);
    }
    previous = current;
  }
  cute::warpgroup_wait<0>();
  ptx::FenceAccumulator(acc[0]);
  ptx::FenceAccumulator(acc[1]);
  __syncwarp();
  ReleaseStage(smem, previous, lane);
}

}  // namespace jaxmoe
