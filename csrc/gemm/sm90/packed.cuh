// K loop over packed weights: decoded in registers, from where wgmma reads them.
//
// A trait of packed weights is a Decoder:
//   kValueBytes  of 64 rows by 64 of k
//   kStripBytes  of the scales of such a block, at most
//   kFactor      by which sums are to be multiplied, beside the scale of their weight
//   Site         where a thread finds the scales of its rows in a strip
//   Scales       those of half a step, as LoadScales gives them
//   Decode       the A operand of an instruction, which is 16 k: the first or second of a half, of
//                four bits from the words of both, of eight from its own two
//   kRowScales   rows of X may have scales, see RowScales
//   Symmetric    a faster Decoder where there are no zero points, or void
#pragma once

#include "csrc/gemm/sm90/warpgroup.cuh"

namespace jaxmoe {

// Where the steps of a stage are in a block, as bytes: a strip of scales is behind the values of
// each step or, if it is of several, behind those of all.
template <class T>
struct StagePlaces {
  int values[T::kStageSteps];
  int strip[T::kStageSteps];

  __device__ __forceinline__ explicit StagePlaces(const PackedArgs& packed) {
    const bool joined = T::kStageSteps == 1 || packed.superblock_steps == 1;
#pragma unroll
    for (int i = 0; i < T::kStageSteps; ++i) {
      values[i] = i * (T::kValueBytes + (joined && i > 0 ? packed.strip_bytes : 0));
      strip[i] = joined ? values[i] + T::kValueBytes : T::kStageSteps * T::kValueBytes;
    }
  }
};

// Words and scales of half a step, of a thread: rows of the two weight blocks of its warpgroup.
template <class T, class Decoder>
struct PackedHalf {
  static constexpr int kWords = T::kValueBytes / 2048;  // of a block, for an instruction
  using Words = std::conditional_t<kWords == 1, uint2, uint4>;

  Words words[2];
  typename Decoder::Scales scales[2];

  __device__ __forceinline__ void Load(const SharedStorage<T>& smem,
                                       const StagePlaces<T>& places,
                                       int stage,
                                       int part,
                                       int first_block,
                                       int half,
                                       int thread,
                                       const typename Decoder::Site& site) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const uint8_t* at = smem.weights(stage) + (first_block + block) * T::kBlockBytes;
      words[block] = reinterpret_cast<const Words*>(at + places.values[part])[half * 128 + thread];
      scales[block] = Decoder::LoadScales(at + places.strip[part], site, half);
    }
  }

  // The operand of the first or second instruction of the half that was loaded.
  __device__ __forceinline__ void Decode(
      const typename Decoder::Site& site, int block, int half, int part, uint32_t (&a)[4]) const {
    const Words& both = words[block];
    if constexpr (kWords == 1) {
      const uint32_t mine[] = {both.x, both.y};
      Decoder::Decode(mine, scales[block], site, half, part, a);
    } else {
      const uint32_t mine[] = {part == 0 ? both.x : both.z, part == 0 ? both.y : both.w};
      Decoder::Decode(mine, scales[block], site, half, part, a);
    }
  }
};

// Calls run(part, ends, index, before, more) for every step: its part of the stage and whether it
// is the last one there, both constants, the stage's index, and whether steps came before and
// stages follow. `stage` is the one that follows.
template <int kStageSteps, class Stage, class Run>
__device__ __forceinline__ void ForEachStage(int num_k_steps, Stage& stage, const Run& run) {
  constexpr std::integral_constant<int, 0> kFirst;
  if constexpr (kStageSteps == 1) {
    for (int step = 0; step < num_k_steps; ++step) {
      const int current = stage.index;
      stage.Advance();
      run(kFirst, std::true_type{}, current, step > 0, step + 1 < num_k_steps);
    }
  } else {
    static_assert(kStageSteps == 2);
    constexpr std::integral_constant<int, 1> kSecond;
    for (int step = 0; step + 1 < num_k_steps; step += 2) {
      const int current = stage.index;
      stage.Advance();
      run(kFirst, std::false_type{}, current, step > 0, true);
      run(kSecond, std::true_type{}, current, true, step + 2 < num_k_steps);
    }
    if (num_k_steps % 2 != 0) {
      const int current = stage.index;
      stage.Advance();
      run(kFirst, std::true_type{}, current, num_k_steps > 1, false);
    }
  }
}

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
  const StagePlaces<T> places(packed);
  PackedHalf<T, Decoder> halves[2];
  const auto load = [&](int index, int part, int half) {
    halves[half].Load(smem, places, index, part, share.first_block, half, thread, site);
  };
  ptx::BarrierWait(smem.full(stage.index), stage.parity);
  load(stage.index, 0, 0);
  load(stage.index, 0, 1);
  const auto run = [&](auto part, auto ends, int current, bool, bool more) {
    constexpr int kPart = part;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t tokens[kTokenBlocks][4];  // [..][8 of k]
#pragma unroll
      for (int j = 0; j < kTokenBlocks; ++j) {
        ptx::LoadMatrix4(token_row[half] + current * T::kTokenPitch + kPart * T::kTokenPart +
                             j * 8 * T::kTokenStepBytes,
                         tokens[j]);
      }
#pragma unroll
      for (int second = 0; second < 2; ++second) {
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          uint32_t a[4];
          halves[half].Decode(site, block, half, second, a);
#pragma unroll
          for (int j = 0; j < kTokenBlocks; ++j) {
            ptx::MmaWarp<typename T::Weight>(
                a, tokens[j][2 * second], tokens[j][2 * second + 1], &acc[block][4 * j]);
          }
        }
      }
      if constexpr (!ends) {
        load(current, kPart + 1, half);
      } else {
        if (half == 1) {
          FinishReads();
          ReleaseStage(smem, current, lane);
        }
        if (more) {
          if (half == 0) ptx::BarrierWait(smem.full(stage.index), stage.parity);
          load(stage.index, 0, half);
        }
      }
    }
  };
  ForEachStage<T::kStageSteps>(num_k_steps, stage, run);
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
  const StagePlaces<T> places(packed);
  PackedHalf<T, Decoder> half;
  const auto load = [&](int index, int part, int which) {
    half.Load(smem, places, index, part, share.first_block, which, thread, site);
  };
  ptx::BarrierWait(smem.full(stage.index), stage.parity);
  load(stage.index, 0, 0);
  const uint64_t tokens0 = ptx::Swizzle128Descriptor(ptx::SmemAddress(smem.tokens(0)) +
                                                     share.first_token * T::kTokenStepBytes);
  const auto tokens_of = [&](int index, int part) {
    if constexpr (T::kStageSteps == 1) {
      return ptx::Swizzle128Descriptor(ptx::SmemAddress(smem.tokens(index)) +
                                       share.first_token * T::kTokenStepBytes);
    } else {  // or ptxas makes a descriptor for each instruction
      return ptx::MoveDescriptor(tokens0, index * T::kTokenPitch + part * T::kTokenPart);
    }
  };
  const auto run = [&](auto part, auto ends, int current, bool before, bool more) {
    constexpr int kPart = part;
    const uint64_t tokens = tokens_of(current, kPart);
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
          set, tokens, 32 * i, before || i > 0, share.columns, acc);
      if (i + kSet == 2) load(current, kPart, 1);
      if constexpr (!ends) {
        if (i + kSet == 4) load(current, kPart + 1, 0);
      } else if (i + kSet == 4 && more) {
        ptx::BarrierWait(smem.full(stage.index), stage.parity);
        load(stage.index, 0, 0);
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
      if (kPart == 0 && i == 0) FinishReads();
      if (kPart == 0 && i == 0 && previous >= 0) ReleaseStage(smem, previous, lane);
    }
    if constexpr (ends) previous = current;
  };
  ForEachStage<T::kStageSteps>(num_k_steps, stage, run);
  cute::warpgroup_wait<0>();
  ptx::FenceAccumulator(acc[0]);
  ptx::FenceAccumulator(acc[1]);
  FinishReads();
  ReleaseStage(smem, previous, lane);
}

}  // namespace jaxmoe
