// K loop of FP8 products over codes of four bits, which are e4m3 numbers as they are: see
// formats/int4_e4m3.cuh.
#pragma once

#include "csrc/gemm/sm90/producer.cuh"
#include "csrc/gemm/sm90/promoted.cuh"

namespace jaxmoe {

// Index in a strip of the scales of a thread's two rows, which lie side by side.
__device__ __forceinline__ int WordOfRows(int thread) { return thread / 32 * 8 + thread % 32 / 4; }

// What codes are too large or too small by: scales of weight rows times sums of tokens, of each
// step one. So it is a product of its own, of few k, and not an addition to all sums of a step.
// RoundTokens leaves the sums in two parts of bf16, 17 bits, where products have 13. Factors of 16
// steps are fetched into the warpgroup's staging buffer while those steps are multiplied; then
// warps multiply them, as wgmma would need their accumulators in places that ptxas does not find.
template <class T>
class TokenSums {
  static_assert(T::kSplitK == 1 && T::kSplit == Split::kWeights);

 public:
  static constexpr int kSteps = kCodedSums;
  static_assert(kSteps == 16, "the k of a warp's product");

  __device__ __forceinline__ TokenSums(const MoeGemmArgs& args,
                                       const SharedStorage<T>& smem,
                                       const TileInfo& info,
                                       int consumer,
                                       int thread)
      : args_(args),
        staging_(smem.staging(consumer)),
        info_(info),
        consumer_(consumer),
        thread_(thread) {}

  // Begins to copy factors of steps `first` and following, as far as there are any; the rest are
  // zeros. The staging buffer is free.
  __device__ __forceinline__ void Fetch(int first) const {
    const int steps = args_.num_k_steps - first;
    const PackedArgs& packed = args_.packed;
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const int row =
          RowInArray(args_, WeightRow<T>(args_, info_.w_tile, 2 * consumer_ + block), block);
      const uint8_t* const w = block > 0 && args_.up_origin != 0 ? packed.w_up : packed.w;
      const int step = thread_ / 8;
      const bool exists = row < args_.n - args_.up_origin && step < steps;
      const uint8_t* const strip = w + info_.weight * packed.weight_bytes +
                                   row / 64 * packed.block_bytes +
                                   (first + step) * packed.superblock_bytes + T::kValueBytes;
      ptx::CopyAsync16(ptx::SmemAddress(ScaleAt(block, step) + thread_ % 8 * 16),
                       exists ? strip + thread_ % 8 * 16 : packed.w,
                       exists);
    }
    const auto* const x = static_cast<const uint8_t*>(args_.x);
    for (int i = thread_; i < 2 * info_.rows; i += 128) {
      const int half = i % 2;  // eight steps
      const int bytes = min(max(2 * (steps - 8 * half), 0), 16);
      const uint8_t* const sums =
          x + (2 * static_cast<int64_t>(info_.row + i / 2) + 1) * args_.k + 4 * first + 16 * half;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        ptx::CopyAsyncUpTo16(
            SumsAt(part, i / 2, half), bytes > 0 ? sums + part * kSteps * 2 : x, bytes);
      }
    }
  }

  // Adds the products of the factors that have been fetched.
  __device__ __forceinline__ void Add(Accumulators<T>& acc) const {
    ptx::CopyAsyncWaitAll();
    Sync();
    const int lane = thread_ % 32;
    uint32_t scales[2][4];
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Steps 2 (lane % 4) and the next one, or those 8 later, of two rows in each word.
        const auto* const at =
            reinterpret_cast<const uint32_t*>(ScaleAt(block, 2 * (lane % 4) + 8 * half));
        const uint32_t one = at[WordOfRows(thread_)];
        const uint32_t next = at[kStripBytes / 4 + WordOfRows(thread_)];
        scales[block][2 * half] = __byte_perm(one, next, 0x5410);
        scales[block][2 * half + 1] = __byte_perm(one, next, 0x7632);
      }
    }
    const uint32_t row = SumsAt(lane / 16, lane % 8, lane / 8 % 2);
#pragma unroll
    for (int j = 0; j < T::kWarpgroupTokens / 8; ++j) {
      if (j % 8 == 0 && 8 * j >= info_.rows) break;
      uint32_t sums[4];  // both halves of the first part, and of the second
      ptx::LoadMatrix4(row + j * 8 * kRowBytes, sums);
#pragma unroll
      for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          ptx::MmaWarp<__nv_bfloat16>(
              scales[block], sums[2 * part], sums[2 * part + 1], &acc[block][4 * j]);
        }
      }
    }
    Sync();  // the staging buffer is free
  }

 private:
  static constexpr int kStripBytes = 128;       // bf16 of 64 rows
  static constexpr int kRowBytes = 2 * kSteps;  // bf16 of a part of a token's sums
  static_assert(T::kBlockBytes == T::kValueBytes + kStripBytes, "each step has a strip");

  __device__ __forceinline__ uint8_t* ScaleAt(int block, int step) const {
    return staging_ + (block * kSteps + step) * kStripBytes;
  }
  // Eight steps of a part of a token's sums: where 8 tokens lie in different banks.
  __device__ __forceinline__ uint32_t SumsAt(int part, int token, int half) const {
    return ptx::SmemAddress(staging_ + 2 * kSteps * kStripBytes) +
           (part * T::kWarpgroupTokens + token) * kRowBytes + (half ^ (token / 4 % 2)) * 16;
  }
  __device__ __forceinline__ void Sync() const { ptx::NamedBarrierSync(1 + consumer_, 128); }

  const MoeGemmArgs& args_;
  uint8_t* const staging_;
  const TileInfo& info_;
  const int consumer_;
  const int thread_;
};

// Codes of a thread for 128 of k of a block, 32 of k in each pair of words.
struct CodedWords {
  uint2 of[4];

  __device__ __forceinline__ void Load(const uint8_t* values, int thread) {
#pragma unroll
    for (int i = 0; i < 4; ++i) of[i] = reinterpret_cast<const uint2*>(values)[i * 128 + thread];
  }

  // The operands. Rows 8 apart have neighbouring codes of a word. Every second code c becomes
  // c - 15, whose byte is a mask away.
  __device__ __forceinline__ void Operands(uint32_t (&codes)[4][4]) const {
    constexpr uint32_t kCode = 0x0F0F0F0F;
    uint32_t minus15 = 0x8F008F00;
    asm volatile("" : "+r"(minus15));  // two constants would be two instructions
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t words[4] = {of[i].x, of[i].x >> 4, of[i].y, of[i].y >> 4};
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // (word & code) ^ minus15
        asm("lop3.b32 %0, %1, %2, %3, 0x6A;"
            : "=r"(codes[i][j])
            : "r"(words[j]), "r"(kCode), "r"(minus15));
      }
      ptx::FenceRegisters(codes[i]);
    }
  }
};

// The scales of a thread's two rows.
__device__ __forceinline__ float2 CodedScales(const uint8_t* strip, int thread) {
  const uint32_t bits = reinterpret_cast<const uint32_t*>(strip)[WordOfRows(thread)];
  return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u));
}

// Sums of 128 of k leave the tensor cores and are scaled while the other warpgroup multiplies. The
// next words are read meanwhile, as shared memory answers slowly while wgmma reads it.
template <class T, int kN>
__device__ __forceinline__ void RunCodedKSteps(const SharedStorage<T>& smem,
                                               int num_k_steps,
                                               const WarpgroupShare& share,
                                               int thread,
                                               const TokenSums<T>& sums,
                                               PipelineState<T::kStages>& stage,
                                               Accumulators<T>& acc) {
  float part[kN / 2];
#pragma unroll
  for (int i = 0; i < T::kWarpgroupTokens / 2; ++i) acc[0][i] = acc[1][i] = 0.0f;
  const uint64_t tokens0 = ptx::Swizzle128Descriptor(ptx::SmemAddress(smem.tokens(0)));
  const auto values_of = [&](int index, int block) {
    return smem.weights(index) + (share.first_block + block) * T::kBlockBytes;
  };
  for (int first = 0; first < num_k_steps; first += TokenSums<T>::kSteps) {
    sums.Fetch(first);
    const int end = min(first + TokenSums<T>::kSteps, num_k_steps);
    CodedWords words;
    ptx::BarrierWait(smem.full(stage.index), stage.parity);
    words.Load(values_of(stage.index, 0), thread);
    for (int step = first; step < end; ++step) {
      const int index = stage.index;
      stage.Advance();
      const uint64_t tokens = ptx::MoveDescriptor(tokens0, index * T::kTokenPitch);
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        uint32_t codes[4][4];
        words.Operands(codes);
        IssueStep(part, [&](int i, uint32_t k) {
          ptx::WgmmaRegisters<typename T::Weight, kN>(
              codes[i], ptx::MoveDescriptor(tokens, k), part, i > 0);
        });
        const float2 scales = CodedScales(values_of(index, block) + T::kValueBytes, thread);
        if (block == 0) {
          words.Load(values_of(index, 1), thread);
        } else if (step + 1 < end) {
          ptx::BarrierWait(smem.full(stage.index), stage.parity);
          words.Load(values_of(stage.index, 0), thread);
        }
        cute::warpgroup_wait<0>();
#pragma unroll
        for (int i = 0; i < 4; ++i) ptx::FenceRegisters(codes[i]);  // they have been read
        ptx::FenceAccumulator(part);
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) {
          acc[block][i] = fmaf(part[i], i / 2 % 2 == 0 ? scales.x : scales.y, acc[block][i]);
        }
      }
      FinishReads();
      ReleaseStage(smem, index, thread % 32);
    }
    sums.Add(acc);
  }
}

}  // namespace jaxmoe
