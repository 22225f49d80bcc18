// Scales of an FP8 tile: of its weight rows, of its tokens, of its output.
#pragma once

#include <math_constants.h>

#include "csrc/common/quant_scale.cuh"
#include "csrc/gemm/sm90/mainloop.cuh"
#include "csrc/gemm/sm90/producer.cuh"

namespace jaxmoe {

// Scale of token `t` of this warpgroup; 1 if the k loop already applied it. Call with the whole
// warp (it shuffles).
template <class T>
__device__ __forceinline__ float TokenScale(const MoeGemmArgs& args,
                                            const TileInfo& info,
                                            const WarpgroupShare& share,
                                            int token_of_row,
                                            int t) {
  const ScaleArgs& s = args.scales;
  int64_t row = info.row + share.first_token + t;
  // The kernel made the plan itself: lane r of a warp has the token of row r.
  if (T::kDecode && token_of_row >= 0) {
    row = __shfl_sync(0xffffffffu, token_of_row, static_cast<int>(row));
  }
  if (s.by_step || t >= share.rows) return 1.0f;
  if (s.x_index != nullptr && s.x_row_stride != 0) row = s.x_index[row];
  // Scales may come while the kernel runs, behind a word that another CTA of the cluster has read:
  // L1 of this one may have a line of before.
  return __ldcg(s.x + info.weight % s.num_x + row * s.x_row_stride);
}

// Index of the scale of row `row`, in block `block`, among those of its weight. Rows past the last
// one have its scale. kRows neighbouring weight rows share a scale.
template <int kRows = 1>
__device__ __forceinline__ int WeightScaleAt(const MoeGemmArgs& args, int row, int block) {
  const int last = args.n - args.up_origin - 1;
  const int up = IsUpBlock(block) ? args.scales.w_up : 0;
  return min(RowInArray(args, row, block), last) / kRows * args.scales.w_row_stride + up;
}

// Scale of weight row `row`, in block `block`; 1 if the k loop already applied it.
template <class T>
__device__ __forceinline__ float WeightScale(const MoeGemmArgs& args,
                                             int weight,
                                             int row,
                                             int block) {
  const ScaleArgs& s = args.scales;
  if (s.by_step) return 1.0f;
  const float scale = s.w[weight * s.w_stride + WeightScaleAt(args, row, block)];
  if constexpr (T::kPacked) return scale * T::Decoder::kFactor;
  return scale;
}

// Reciprocal of the output's scale, by which values are multiplied before they become e4m3. NaN for
// scales that quantize refuses.
__device__ __forceinline__ float OutInverse(const ScaleArgs& s, int weight) {
  const float out = s.out != nullptr ? s.out[weight % s.num_out] : 1.0f;
  return out >= kMinQuantScale && out <= kMaxQuantScale ? 1.0f / out : CUDART_NAN_F;
}

// Scales that a consumer thread applies to its sums. They are fetched before the k loop where
// registers allow it, so that nothing waits for them after it.
template <class T>
class TileScales {
 public:
  static constexpr bool kOfRows = false;

  __device__ void Fetch(const MoeGemmArgs& args,
                        const TileInfo& info,
                        const WarpgroupShare& share,
                        int token_of_row,
                        int thread) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const int first = WeightRow<T>(args, info.w_tile, share.first_block + block);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first + thread / 32 * 16 + half * 8 + thread % 32 / 4;
        weight_[block][half] = WeightScale<T>(args, info.weight, row, block);
      }
    }
    if constexpr (T::kTokenScaled) {
#pragma unroll
      for (int i = 0; i < kTokensPerThread; ++i) {
        token_[i] = TokenScale<T>(args, info, share, token_of_row, thread + 128 * i);
      }
    }
    if constexpr (T::kQuantizesOut) out_inverse_ = OutInverse(args.scales, info.weight);
  }

  __device__ float weight(int block, int half) const { return weight_[block][half]; }

  __device__ float out_inverse() const { return out_inverse_; }

  // Token of row `lane` if this kernel made the plan and gathers rows of X by it; else -1.
  static __device__ int TokenOfRow(const MoeGemmArgs& args, int lane) {
    const bool planned = args.plans && args.gather && args.scales.x_row_stride != 0;
    return planned ? SlotPlan(args.plan, lane).TokenOfRow() : -1;
  }

  // Writes the token scales to shared memory, for the warpgroup to read after its next barrier.
  __device__ void Publish(float* shared, int thread) const {
#pragma unroll
    for (int i = 0; i < kTokensPerThread; ++i) {
      const int t = thread + 128 * i;
      if (t < T::kWarpgroupTokens) shared[t] = token_[i];
    }
  }

 private:
  static constexpr int kTokensPerThread = (T::kWarpgroupTokens + 127) / 128;

  float weight_[2][2];  // [block][row lane / 4, row lane / 4 + 8]
  float token_[kTokensPerThread];
  float out_inverse_;
};

// The whole life of the warp that brings the scales of tiles, see Tile::kBringsScales.
template <class T>
__device__ void RunTileScales(const MoeGemmArgs& args, const SharedStorage<T>& smem, int lane) {
  constexpr int kWeights = T::kWeightTile / 32;
  constexpr int kTokens = T::kTokenTile / 32;
  static_assert(T::kTokenTile % 32 == 0, "lanes have as many tokens each");
  uint32_t parity = 0;
  ForEachTile(smem, lane, [&](const TileInfo& info, const auto& slot) {
    float weight[kWeights];
    float token[kTokens];
#pragma unroll
    for (int i = 0; i < kWeights; ++i) {
      const int block = i / 2;
      const int row = WeightRow<T>(args, info.w_tile, block) + i % 2 * 32 + lane;
      weight[i] = WeightScale<T>(args, info.weight, row, block);
    }
    const WarpgroupShare all{0, 0, info.rows, info.rows, args.gather};
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      token[i] = TokenScale<T>(args, info, all, -1, lane + 32 * i);
    }
    const float out_inverse = OutInverse(args.scales, info.weight);
    slot.Release();
    ptx::BarrierWait(smem.scales_empty(), parity ^ 1);
    auto& to = smem.tile_scales();
#pragma unroll
    for (int i = 0; i < kWeights; ++i) to.weight[lane + 32 * i] = weight[i];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) to.token[lane + 32 * i] = token[i];
    if (lane == 0) to.out_inverse = out_inverse;
    ptx::BarrierArrive(smem.scales_full());
    parity ^= 1;
  });
}

// Scales that a warp has brought.
template <class T>
class BroughtScales {
 public:
  static constexpr bool kOfRows = false;

  // Waits for those of the next tile.
  __device__ void Wait(const SharedStorage<T>& smem, int consumer, int thread) {
    ptx::BarrierWait(smem.scales_full(), parity_);
    parity_ ^= 1;
    const auto& from = smem.tile_scales();
    const int row = consumer * T::kWarpgroupRows + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        weight_[block][half] = from.weight[row + 64 * block + 8 * half];
      }
    }
    out_inverse_ = from.out_inverse;
  }

  // Hands the memory back, as a warp that needs no scale of this tile any more.
  static __device__ void Release(const SharedStorage<T>& smem, int lane) {
    __syncwarp();
    if (lane == 0) ptx::BarrierArrive(smem.scales_empty());
  }

  __device__ float weight(int block, int half) const { return weight_[block][half]; }
  __device__ float out_inverse() const { return out_inverse_; }

 private:
  uint32_t parity_ = 0;
  float weight_[2][2];
  float out_inverse_;
};

// Whether rows of X may have scales beside packed weights.
template <class T>
constexpr bool TakesRowScales() {
  if constexpr (T::kPacked) return T::Decoder::kRowScales;
  return false;
}

// The same and scales of rows, beside packed weights: lane l has those of tokens l, l + 32 and so
// on, 1 where rows have none. They take no shared memory, and few registers.
template <class T>
class RowScales : public TileScales<T> {
 public:
  static constexpr bool kOfRows = true;

  __device__ void FetchRows(const MoeGemmArgs& args,
                            const TileInfo& info,
                            const WarpgroupShare& share,
                            int lane) {
    const float* scales = args.scales.x + info.row + share.first_token;
#pragma unroll
    for (int i = 0; i < kTokensPerLane; ++i) {
      const int t = lane + 32 * i;
      token_[i] = args.scales.x != nullptr && t < share.rows ? __ldcg(scales + t) : 1.0f;
    }
  }

  // Scales of tokens 8 * group + 2 * (lane % 4) and the next. The whole warp calls it.
  __device__ __forceinline__ float2 OfTokens(int group, int lane) const {
    const int first = 8 * (group % 4) + 2 * (lane % 4);
    return make_float2(__shfl_sync(0xffffffffu, token_[group / 4], first),
                       __shfl_sync(0xffffffffu, token_[group / 4], first + 1));
  }

 private:
  static constexpr int kTokensPerLane = (T::kWarpgroupTokens + 31) / 32;

  float token_[kTokensPerLane];
};

// Weight scales of every k step. The 16 weight rows of a warp begin at a multiple of 16, so they
// lie in one block of 128 and share a scale.
template <class T>
__device__ __forceinline__ StepScales FetchStepScales(const MoeGemmArgs& args,
                                                      const TileInfo& info,
                                                      const WarpgroupShare& share,
                                                      int thread) {
  const ScaleArgs& s = args.scales;
  if (!s.by_step) return {{nullptr, nullptr}};
  const float* w = s.w + info.weight * s.w_stride + StepsOf<T>(args.num_k_steps).first;
  StepScales scales;
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    const int row = WeightRow<T>(args, info.w_tile, share.first_block + block) + thread / 32 * 16;
    scales.weight[block] = w + WeightScaleAt<128>(args, row, block);
  }
  return scales;
}

// Copies the scales of a tile's rows of X, step by step, and with tokens on M those of its weights:
// 64 rows of a block begin at a multiple of 64 and share a scale.
template <class T>
__device__ __forceinline__ void CopyStepScales(const MoeGemmArgs& args,
                                               const SharedStorage<T>& smem,
                                               const TileInfo& info,
                                               int token_of_row,
                                               int lane,
                                               PipelineState<T::kStages>& stage) {
  constexpr int kRowsPerLane = (T::kTokenTile + 31) / 32;
  const StepRange steps = StepsOf<T>(args.num_k_steps);
  int source[kRowsPerLane];
#pragma unroll
  for (int i = 0; i < kRowsPerLane; ++i) {
    const int r = lane + 32 * i;
    int row = info.row + min(r, max(info.rows - 1, 0));
    if (token_of_row >= 0) {
      row = __shfl_sync(0xffffffffu, token_of_row, info.row + r);
    } else if (args.scales.x_index != nullptr && r < info.rows) {
      row = args.scales.x_index[row];
    }
    source[i] = row * args.scales.x_row_stride;
  }
  const bool has_block = T::kTokensOnM && lane < T::kWeightBlocks;
  const float* weight = args.scales.w + info.weight * args.scales.w_stride;
  if (has_block) {
    weight += WeightScaleAt<128>(args, WeightRow<T>(args, info.w_tile, lane), lane);
  }
  for (int step = steps.first; step < steps.last; ++step) {
    ptx::BarrierWait(smem.empty(stage.index), stage.parity ^ 1);
    const uint32_t dst = ptx::SmemAddress(smem.step_scales(stage.index));
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      const int r = lane + 32 * i;
      if (r < info.rows)
        ptx::CopyAsync4(dst + 4 * StepScaleAt<T>(r), args.scales.x + source[i] + step);
    }
    if (has_block) ptx::CopyAsync4(dst + 4 * (T::kBlockScales + lane), weight + step);
    ptx::CopyAsyncArrive(smem.full(stage.index));
    stage.Advance();
  }
}

// The whole life of the warp that brings the scales of X of every k step.
template <class T, class Args>
__device__ void RunScaleProducer(const Args& args, const SharedStorage<T>& smem, int lane) {
  const int token_of_row = TileScales<T>::TokenOfRow(First(args), lane);
  PipelineState<T::kStages> stage;
  ForEachTile(smem, lane, [&](const TileInfo& info, const auto& slot) {
    const bool in_order = IsSecond(args, info);
    if (in_order) WaitForRows(args, info, lane);
    CopyStepScales<T>(ProductOf(args, info),
                      smem,
                      InProduct(args, info),
                      in_order ? -1 : token_of_row,
                      lane,
                      stage);
    slot.Release();
  });
  ptx::CopyAsyncWaitAll();  // no copy outlives its thread
}

}  // namespace jaxmoe
