// Accumulators to global memory: bias, activation, rounding, transposition, predicated stores.
//
// A thread's accumulators lie along tokens of one weight row (feature), memory lies along features
// of one token. stmatrix.trans turns them: chunks of tokens are staged as [token][feature] in
// shared memory, then every thread stores 16 bytes of features.
#pragma once

#include "csrc/moe_gemm/activation.cuh"
#include "csrc/moe_gemm/mainloop.cuh"

namespace jaxmoe {

// What of the output a warpgroup holds.
struct EpilogueSite {
  int weight;       // index of the weight matrix, for the bias
  int row;          // first output row
  int rows;         // rows to store
  int feature;      // first output feature
  int weight_row0;  // first weight row of its two 64-row blocks, for the bias
  int weight_row1;
  int consumer;  // for its staging buffer and named barrier
  int thread;    // 0..127
};

template <class T>
class Epilogue {
 public:
  using Element = typename T::Element;

  __device__ Epilogue(const MoeGemmArgs& args,
                      const SharedStorage<T>& smem,
                      const EpilogueSite& site)
      : args_(args),
        site_(site),
        staging_(smem.staging(site.consumer)),
        warp_(site.thread / 32),
        lane_(site.thread % 32) {}

  __device__ __forceinline__ void Run(Accumulators<T>& acc) {
    LoadBias();
    if constexpr (T::kGated) {
      const bool silu =
          args_.activation.kind == ActivationParams::kSigmoid && args_.activation.c3 == 0.0f;
      if (args_.interleaved) {
        silu ? StageAll<StageMode::kInterleaved, SiluForm>(acc)
             : StageAll<StageMode::kInterleaved, OtherForm>(acc);
      } else {
        silu ? StageAll<StageMode::kHalves, SiluForm>(acc)
             : StageAll<StageMode::kHalves, OtherForm>(acc);
      }
    } else {
      if (args_.activation.kind == ActivationParams::kIdentity) {
        if (args_.out_f32) {
          StoreFloat(acc);
        } else {
          StageAll<StageMode::kSingle, IdentityForm>(acc);
        }
      } else {
        StageAll<StageMode::kSingle, OtherForm>(acc);
      }
    }
  }

 private:
  enum class StageMode { kHalves, kInterleaved, kSingle };

  // Accumulator e of an 8-column group: row lane/4 + 8 * (e / 2), column 2 * (lane % 4) + e % 2.
  __device__ __forceinline__ void LoadBias() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = warp_ * 16 + half * 8 + lane_ / 4;
      bias_[0][half] = BiasAt(site_.weight_row0 + r);
      bias_[1][half] = BiasAt(site_.weight_row1 + r);
    }
  }

  __device__ __forceinline__ float BiasAt(int weight_row) const {
    if (args_.bias == nullptr || weight_row >= args_.n) return 0.0f;
    const Element* bias = static_cast<const Element*>(args_.bias);
    return ptx::ToFloat(bias[static_cast<int64_t>(site_.weight) * args_.n + weight_row]);
  }

  __device__ __forceinline__ void Sync() const { ptx::NamedBarrierSync(1 + site_.consumer, 128); }

  template <StageMode kMode, class Form>
  __device__ __forceinline__ void StageAll(Accumulators<T>& acc) {
#pragma unroll
    for (int t0 = 0; t0 < T::kWarpgroupTokens; t0 += T::kChunkTokens) {
      if (t0 < site_.rows) {
        if (t0 > 0) Sync();  // the chunk before has been copied out
#pragma unroll
        for (int j = 0; j < T::kChunkTokens / 8; ++j) {
          StageColumns<kMode, Form>(acc, t0 / 8 + j, j);
        }
        Sync();
        CopyOut(t0);
      }
    }
    if (site_.rows > 0) Sync();  // the staging buffer is free for the next tile
  }

  // Eight tokens: accumulator columns group `group`, staging rows 8 * j ...
  template <StageMode kMode, class Form>
  __device__ __forceinline__ void StageColumns(Accumulators<T>& acc, int group, int j) {
    const ActivationParams& p = args_.activation;
    if constexpr (kMode == StageMode::kInterleaved) {
      // Gate and up of a feature are neighbouring rows, so neighbouring lanes / 4. Lanes on even
      // rows take the features of block 0, lanes on odd rows those of block 1.
      const int row = lane_ / 4;
      const bool odd = row % 2 != 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float v0 = acc[0][4 * group + e] + bias_[0][e / 2];
        const float v1 = acc[1][4 * group + e] + bias_[1][e / 2];
        const float other = __shfl_xor_sync(0xffffffffu, odd ? v0 : v1, 4);
        const float y = Form::Apply(p, odd ? other : v0, odd ? v1 : other);
        const int feature = (odd ? 32 : 0) + (warp_ * 16 + (e / 2) * 8 + row) / 2;
        const int token = 8 * j + 2 * (lane_ % 4) + e % 2;
        *reinterpret_cast<Element*>(staging_ + token * T::kStagingPitch + feature * 2) =
            ptx::FromFloat<Element>(y);
      }
    } else {
      constexpr int kBlocks = kMode == StageMode::kHalves ? 1 : 2;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        float y[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float g = acc[block][4 * group + e] + bias_[block][e / 2];
          float u = 1.0f;
          if constexpr (kMode == StageMode::kHalves) {
            u = acc[1][4 * group + e] + bias_[1][e / 2];
          }
          y[e] = Form::Apply(p, g, u);
        }
        const int token = 8 * j + lane_ % 8;
        const int feature = block * 64 + warp_ * 16 + (lane_ / 8 % 2) * 8;
        ptx::StoreMatrix2Transposed(staging_ + token * T::kStagingPitch + feature * 2,
                                    ptx::Pack2<Element>(y[0], y[1]),
                                    ptx::Pack2<Element>(y[2], y[3]));
      }
    }
  }

  // Rows past the group belong to the next expert and are not stored; neither are features past
  // n_out (a multiple of 8, so 16-byte chunks are all in or all out).
  __device__ __forceinline__ void CopyOut(int t0) const {
    constexpr int kChunksPerRow = T::kOutFeatures / 8;
    constexpr int kRowsPerPass = 128 / kChunksPerRow;
    const int chunk = site_.thread % kChunksPerRow;
    const int feature = site_.feature + chunk * 8;
    if (feature >= args_.n_out) return;
    Element* out = static_cast<Element*>(args_.out);
#pragma unroll
    for (int pass = 0; pass < (T::kChunkTokens + kRowsPerPass - 1) / kRowsPerPass; ++pass) {
      const int token = pass * kRowsPerPass + site_.thread / kChunksPerRow;
      if (token < T::kChunkTokens && t0 + token < site_.rows) {
        const int64_t row = site_.row + t0 + token;
        *reinterpret_cast<uint4*>(out + row * args_.n_out + feature) =
            *reinterpret_cast<const uint4*>(staging_ + token * T::kStagingPitch + chunk * 16);
      }
    }
  }

  // float32 output skips the staging: 8 lanes write 32 contiguous bytes, whole sectors.
  __device__ __forceinline__ void StoreFloat(Accumulators<T>& acc) const {
    float* out = static_cast<float*>(args_.out);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int i = 0; i < T::kWarpgroupTokens / 2; ++i) {
        const int e = i % 4;
        const int token = i / 4 * 8 + 2 * (lane_ % 4) + e % 2;
        const int feature = site_.feature + block * 64 + warp_ * 16 + (e / 2) * 8 + lane_ / 4;
        if (token < site_.rows && feature < args_.n_out) {
          const int64_t row = site_.row + token;
          out[row * args_.n_out + feature] = acc[block][i] + bias_[block][e / 2];
        }
      }
    }
  }

  const MoeGemmArgs& args_;
  const EpilogueSite site_;
  uint8_t* const staging_;
  const int warp_;
  const int lane_;
  float bias_[2][2];
};

}  // namespace jaxmoe
