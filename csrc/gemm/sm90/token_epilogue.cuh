// Epilogue with tokens on wgmma's M: a thread's accumulators lie along features of two tokens of
// each block, as memory does, and a warp has 16 whole rows. Nothing is transposed. Warps wait for
// each other only to share scales and biases and, when groups of 128 features are quantized, the
// largest magnitudes of tokens whose group two warps hold.
#pragma once

#include "csrc/gemm/sm90/epilogue.cuh"

namespace jaxmoe {

template <class T, bool kGated>
class TokenMajorEpilogue {
 public:
  __device__ TokenMajorEpilogue(const MoeGemmArgs& args,
                                const SharedStorage<T>& smem,
                                const EpilogueSite& site)
      : args_(args),
        site_(site),
        warp_(site.thread / 32),
        lane_(site.thread % 32),
        staging_(smem.staging(site.consumer) + warp_ * kRows * Chunk::kPitch),
        columns_(smem.columns(site.consumer)),
        token_scales_(smem.token_scales(site.consumer)),
        maxima_(smem.group_max(site.consumer)),
        other_maxima_(smem.group_max(1 - site.consumer)) {}

  __device__ __forceinline__ void Run(const TileInfo& info,
                                      const WarpgroupShare& share,
                                      const Accumulators<T>& acc) {
    const ActivationParams& p = args_.activation;
    const bool identity = !kGated && p.kind == ActivationParams::kIdentity;
    const bool relu2 = !kGated && p.kind == ActivationParams::kRelu2;
    const bool usual = kGated ? IsSilu(p) : relu2 || (identity && !args_.out_f32);
    // There are no scales and biases but those that the k loop applied.
    const bool sums_are_values = usual && args_.scales.by_step && args_.bias == nullptr;
    if (!sums_are_values) {
      Publish(info, share);
      Sync();
    }
    if (identity && !usual) {
      StoreFloat(acc);
    } else {
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        const int t0 = 64 * block + kRows * warp_;
        if (64 * block >= site_.rows) break;
        uint32_t out[kOctets][2];
        if (sums_are_values) {
          ApplyUsual<true>(acc[block], t0, out);
        } else if (usual) {
          ApplyUsual<false>(acc[block], t0, out);
        } else {
          ApplyAny(acc[block], t0, out);
        }
        Store(out, t0);
      }
    }
    if (!sums_are_values) Sync();  // scales and biases are free for the next tile
    if (kShared && by_groups()) SyncPair();
  }

 private:
  enum class Mode { kHalves, kInterleaved, kSingle };
  using Chunk = typename T::template Staging<kGated>;

  static_assert(T::kWarpgroupTokens == 128, "a thread publishes a token and a weight row");
  static_assert(Chunk::kChunkTokens == 64, "every warp stages 16 tokens");
  static constexpr int kRows = 16;                         // of a block, of a warp
  static constexpr int kOctets = Chunk::kOutFeatures / 8;  // of 8 features
  static constexpr int kStaged = Chunk::kFeatures / 8;     // groups that are staged at once
  static constexpr int kScaleFeatures = 128;               // features that share a scale
  static constexpr bool kShared = Chunk::kOutFeatures < kScaleFeatures;  // by two warps
  static constexpr int kPasses = kRows * kStaged / 32;
  // Bytes of a quantized row that is staged, and copies of 16 bytes that it takes.
  static constexpr int kBytesPitch = Chunk::kOutFeatures + 16;
  static constexpr int kByteChunks = Chunk::kOutFeatures / 16;
  static_assert(kBytesPitch <= Chunk::kPitch, "quantized rows fit the staging buffer");

  __device__ __forceinline__ OutType<T> Out() const { return {args_.scales.half}; }
  __device__ __forceinline__ void Sync() const { ptx::NamedBarrierSync(1 + site_.consumer, 128); }

  // Barrier of this warp and the warp of the other warpgroup that has the same tokens.
  __device__ __forceinline__ void SyncPair() const { ptx::NamedBarrierSync(3 + warp_, 64); }
  __device__ __forceinline__ bool by_groups() const {
    return T::kQuantizesGroups && args_.scales.out_groups != nullptr;
  }

  // Writes scale and bias of one weight row and the scale of one token to shared memory.
  __device__ __forceinline__ void Publish(const TileInfo& info, const WarpgroupShare& share) const {
    const int t = site_.thread;
    const int row = t < 64 ? site_.weight_row0 + t : site_.weight_row1 + t - 64;
    float bias = 0.0f;
    if (args_.bias != nullptr && row < args_.n) {
      bias = Out().Load(args_.bias, static_cast<int64_t>(site_.weight) * args_.n + row);
    }
    columns_[t] = make_float2(WeightScale<T>(args_, site_.weight, row, t / 64), bias);
    token_scales_[t] = TokenScale<T>(args_, info, share, -1, t);
  }

  // Values of token lane / 4 + 8 * half of a block, in column 8 * group + 2 * (lane % 4) and the
  // next. kSums: the sums as they are.
  template <bool kSums>
  __device__ __forceinline__ float2
  Values(const float (&acc)[64], float token_scale, int group, int half) const {
    const float* a = &acc[4 * group + 2 * half];
    if constexpr (kSums) return make_float2(a[0], a[1]);
    // Scale and bias of both columns.
    const float4 c = *reinterpret_cast<const float4*>(columns_ + 8 * group + 2 * (lane_ % 4));
    return make_float2(fmaf(a[0], token_scale * c.x, c.y), fmaf(a[1], token_scale * c.z, c.w));
  }

  // Four of a thread's eight numbers of octet g of the output, see Pack, and what they are of.
  struct Quad {
    float gate[4];
    float up[4];
  };

  template <Mode kMode, bool kSums>
  __device__ __forceinline__ Quad ValuesOf(const float (&acc)[64],
                                           const float (&scale)[2],
                                           int g) const {
    Quad quad;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kMode == Mode::kInterleaved) {  // columns are gate and up of one feature
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 v = Values<kSums>(acc, scale[half], 2 * g + i, half);
          quad.gate[2 * i + half] = v.x;
          quad.up[2 * i + half] = v.y;
        }
      } else {
        const float2 gate = Values<kSums>(acc, scale[i], g, i);
        float2 up = make_float2(1.0f, 1.0f);
        if constexpr (kMode == Mode::kHalves) up = Values<kSums>(acc, scale[i], g + kOctets, i);
        quad.gate[2 * i] = gate.x;
        quad.gate[2 * i + 1] = gate.y;
        quad.up[2 * i] = up.x;
        quad.up[2 * i + 1] = up.y;
      }
    }
    return quad;
  }

  // Scales of a thread's two tokens of the 16 from t0 on, where they have been published.
  __device__ __forceinline__ void TokenScales(int t0, float (&scale)[2]) const {
    scale[0] = token_scales_[t0 + lane_ / 4];
    scale[1] = token_scales_[t0 + lane_ / 4 + 8];
  }

  // The activations of nearly all layers: silu, squared relu without a gate, or none.
  template <bool kSums>
  __device__ __forceinline__ void ApplyUsual(const float (&acc)[64],
                                             int t0,
                                             uint32_t (&out)[kOctets][2]) const {
    if constexpr (!kGated) {
      if (args_.activation.kind == ActivationParams::kRelu2) {
        ApplyTo<Mode::kSingle, Relu2Form, kSums>(acc, t0, out);
      } else {
        ApplyTo<Mode::kSingle, IdentityForm, kSums>(acc, t0, out);
      }
    } else if (args_.interleaved) {
      ApplyTo<Mode::kInterleaved, SiluForm, kSums>(acc, t0, out);
    } else {
      ApplyTo<Mode::kHalves, SiluForm, kSums>(acc, t0, out);
    }
  }

  template <Mode kMode, class Form, bool kSums>
  __device__ __forceinline__ void ApplyTo(const float (&acc)[64],
                                          int t0,
                                          uint32_t (&out)[kOctets][2]) const {
    float scale[2] = {1.0f, 1.0f};
    if constexpr (!kSums) TokenScales(t0, scale);
#pragma unroll
    for (int g = 0; g < kOctets; ++g) {
      Quad quad = ValuesOf<kMode, kSums>(acc, scale, g);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        quad.gate[i] = Form::Apply(args_.activation, quad.gate[i], quad.up[i]);
      }
      Pack<kMode>(quad.gate, out[g]);
    }
  }

  // Any activation, in a loop over numbers in shared memory: unrolled over the accumulators like
  // silu, the others were most of the kernel.
  __device__ __forceinline__ void ApplyAny(const float (&acc)[64],
                                           int t0,
                                           uint32_t (&out)[kOctets][2]) const {
    constexpr int kOperands = kGated ? 2 : 1;
    constexpr int kAtOnce = 4 / kOperands;  // octets
    constexpr int kWords = 4 * kOperands;   // of a thread, of an octet
    static_assert(kAtOnce * kWords * 32 * 4 <= kRows * Chunk::kPitch, "a warp's staging has room");
    float* const mine = reinterpret_cast<float*>(staging_) + lane_;  // every 32nd from here on
    const bool interleaved = kGated && args_.interleaved;
    float scale[2];
    TokenScales(t0, scale);
#pragma unroll
    for (int first = 0; first < kOctets; first += kAtOnce) {
#pragma unroll
      for (int g = 0; g < kAtOnce; ++g) {
        constexpr Mode kApart = kGated ? Mode::kHalves : Mode::kSingle;
        Quad quad;
        if (interleaved) {
          if constexpr (kGated) quad = ValuesOf<Mode::kInterleaved, false>(acc, scale, first + g);
        } else {
          quad = ValuesOf<kApart, false>(acc, scale, first + g);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float* const at = mine + (kWords * g + kOperands * i) * 32;
          at[0] = quad.gate[i];
          if constexpr (kGated) at[32] = quad.up[i];
        }
      }
#pragma unroll 1
      for (float* at = mine; at < mine + kAtOnce * kWords * 32; at += 2 * kOperands * 32) {
        float* const next = at + kOperands * 32;
        float y[2] = {at[0], next[0]};
        OtherForm::Apply(args_.activation, y, {kGated ? at[32] : 1.0f, kGated ? next[32] : 1.0f});
        at[0] = y[0];
        next[0] = y[1];
      }
#pragma unroll
      for (int g = 0; g < kAtOnce; ++g) {
        float y[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) y[i] = mine[(kWords * g + kOperands * i) * 32];
        if (interleaved) {
          Pack<Mode::kInterleaved>(y, out[first + g]);
        } else {
          Pack<Mode::kHalves>(y, out[first + g]);
        }
      }
    }
    __syncwarp();  // every lane has read its numbers, where rows are staged next
  }

  // Rounds a thread's four numbers of an octet to its two features of its two tokens.
  template <Mode kMode>
  __device__ __forceinline__ void Pack(const float (&y)[4], uint32_t (&out)[2]) const {
    const uint32_t pairs[2] = {Out().Pack2(y[0], y[1]), Out().Pack2(y[2], y[3])};
    if constexpr (kMode == Mode::kInterleaved) {
      Exchange(pairs, out);
    } else {
      out[0] = pairs[0];
      out[1] = pairs[1];
    }
  }

  // Stores the 16 tokens from t0 on.
  __device__ __forceinline__ void Store(const uint32_t (&out)[kOctets][2], int t0) const {
    if (by_groups()) {
      float inverse[2];
      GroupScales(out, t0, inverse);
      StoreQuantized(out, t0, inverse);
    } else if (args_.scales.out != nullptr) {
      const float inverse = OutInverse(args_.scales, site_.weight);
      StoreQuantized(out, t0, {inverse, inverse});
    } else {
#pragma unroll
      for (int first = 0; first < kOctets; first += kStaged) {
        Stage(out, first);
        __syncwarp();
        CopyOut(t0, 8 * first);
        __syncwarp();
      }
    }
  }

  // A thread's two columns are gate and up of one feature. Two groups of columns give every thread
  // two features of different groups, packed with both tokens; shuffles bring neighbouring features
  // together.
  __device__ __forceinline__ void Exchange(const uint32_t (&tokens)[2], uint32_t (&out)[2]) const {
    constexpr unsigned kAll = 0xffffffffu;
    uint32_t feature[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int source = lane_ / 4 * 4 + lane_ * 2 % 4 + i;
      const uint32_t a = __shfl_sync(kAll, tokens[0], source);
      const uint32_t b = __shfl_sync(kAll, tokens[1], source);
      feature[i] = lane_ % 4 < 2 ? a : b;
    }
    out[0] = __byte_perm(feature[0], feature[1], 0x5410);
    out[1] = __byte_perm(feature[0], feature[1], 0x7632);
  }

  // Bits, as a float, of the largest finite magnitude among this thread's features of a token that
  // exist. Two are compared at once as they are, and again without infinities and NaN if there are
  // any.
  __device__ __forceinline__ unsigned LargestFinite(const uint32_t (&out)[kOctets][2],
                                                    int half) const {
    unsigned pair = 0;
#pragma unroll
    for (int g = 0; g < kOctets; ++g) {
      if (site_.feature + 8 * g < args_.n_out) {
        pair = __vmaxu2(pair, out[g][half] & 0x7fff7fffu);
      }
    }
    const float2 both = Out().Unpack2(pair);
    unsigned largest = max(__float_as_uint(both.x), __float_as_uint(both.y));
    if (largest >= 0x7f800000u) {
      largest = 0;
#pragma unroll
      for (int g = 0; g < kOctets; ++g) {
        if (site_.feature + 8 * g < args_.n_out) {
          const float2 v = Out().Unpack2(out[g][half]);
          largest = max(largest, max(FiniteMagnitude(v.x), FiniteMagnitude(v.y)));
        }
      }
    }
    return largest;
  }

  // Writes the scales of the features' groups of 128, made from the rounded output as quantize
  // makes them, and returns their reciprocals for this thread's two tokens.
  __device__ __forceinline__ void GroupScales(const uint32_t (&out)[kOctets][2],
                                              int t0,
                                              float (&inverse)[2]) const {
    unsigned largest[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[half] = LargestFinite(out, half);
#pragma unroll
      for (int offset = 1; offset < 4; offset *= 2) {
        largest[half] = max(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], offset));
      }
      if (kShared && lane_ % 4 == 0) maxima_[t0 + lane_ / 4 + 8 * half] = largest[half];
    }
    if constexpr (kShared) SyncPair();
    const int groups = (args_.n_out + kScaleFeatures - 1) / kScaleFeatures;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = t0 + lane_ / 4 + 8 * half;
      if (kShared) largest[half] = max(largest[half], other_maxima_[token]);
      const float scale = QuantScale(largest[half], kLargestE4M3);
      inverse[half] = __frcp_rn(scale);
      const bool first = lane_ % 4 == 0 && site_.feature % kScaleFeatures == 0;
      if (first && site_.feature < args_.n_out && token < site_.rows) {
        const int64_t row = site_.row + token;
        args_.scales.out_groups[row * groups + site_.feature / kScaleFeatures] = scale;
      }
    }
  }

  // Stages kStaged groups of features of 16 tokens: [token][feature].
  __device__ __forceinline__ void Stage(const uint32_t (&out)[kOctets][2], int first) const {
    uint8_t* const row = staging_ + (lane_ / 8 % 2 * 8 + lane_ % 8) * Chunk::kPitch;
#pragma unroll
    for (int g = 0; g < kStaged; g += 2) {
      ptx::StoreMatrix4(row + (g + lane_ / 16) * 16,
                        out[first + g][0],
                        out[first + g][1],
                        out[first + g + 1][0],
                        out[first + g + 1][1]);
    }
  }

  // Rows past the group belong to the next expert and are not stored; neither are features past
  // n_out (a multiple of 8, so 16-byte chunks are all in or all out).
  __device__ __forceinline__ void CopyOut(int t0, int first) const {
    const int chunk = lane_ % kStaged;
    const int feature = site_.feature + first + 8 * chunk;
    if constexpr (!kGated) {  // not asked for each row: loads and stores of several overlap below
      if (args_.out_rows != nullptr) return CopyElsewhere(t0, chunk, feature);
    }
    uint16_t* const out = static_cast<uint16_t*>(args_.out) + feature;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int token = (32 * pass + lane_) / kStaged;
      if (feature >= args_.n_out || t0 + token >= site_.rows) continue;
      *reinterpret_cast<uint4*>(out +
                                (site_.row + t0 + token) * static_cast<int64_t>(args_.n_out)) =
          *reinterpret_cast<const uint4*>(staging_ + token * Chunk::kPitch + 16 * chunk);
    }
  }

  // The same of rows that go elsewhere.
  __device__ __forceinline__ void CopyElsewhere(int t0, int chunk, int feature) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int token = (32 * pass + lane_) / kStaged;
      if (feature >= args_.n_out || t0 + token >= site_.rows) continue;
      StoreElsewhere(
          args_,
          site_.row + t0 + token,
          feature,
          *reinterpret_cast<const uint4*>(staging_ + token * Chunk::kPitch + 16 * chunk));
    }
  }

  // Stores 16 tokens times `inverse`, of this thread's two, in e4m3, of which n_out is a multiple
  // of 16.
  __device__ __forceinline__ void StoreQuantized(const uint32_t (&out)[kOctets][2],
                                                 int t0,
                                                 const float (&inverse)[2]) const {
    uint8_t* const row = staging_ + lane_ / 4 * kBytesPitch + lane_ % 4 * 2;
#pragma unroll
    for (int g = 0; g < kOctets; ++g) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 v = Out().Unpack2(out[g][half]);
        *reinterpret_cast<uint16_t*>(row + 8 * half * kBytesPitch + 8 * g) =
            ptx::PackE4M3(v.x * inverse[half], v.y * inverse[half]);
      }
    }
    __syncwarp();
    const int chunk = lane_ % kByteChunks;
    const int feature = site_.feature + 16 * chunk;
    uint8_t* const to = static_cast<uint8_t*>(args_.out) + feature;
#pragma unroll
    for (int pass = 0; pass < kRows * kByteChunks / 32; ++pass) {
      const int token = (32 * pass + lane_) / kByteChunks;
      if (feature >= args_.n_out || t0 + token >= site_.rows) continue;
      *reinterpret_cast<uint4*>(to + (site_.row + t0 + token) * static_cast<int64_t>(args_.n_out)) =
          *reinterpret_cast<const uint4*>(staging_ + token * kBytesPitch + 16 * chunk);
    }
    __syncwarp();
  }

  // float32 output skips the staging: 4 lanes write 32 contiguous bytes, whole sectors.
  __device__ __forceinline__ void StoreFloat(const Accumulators<T>& acc) const {
    float* const out = static_cast<float*>(args_.out);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = 64 * block + kRows * warp_ + 8 * half + lane_ / 4;
        if (token >= site_.rows) continue;
        const int64_t row = static_cast<int64_t>(site_.row + token) * args_.n_out;
#pragma unroll
        for (int g = 0; g < kOctets; ++g) {
          const int feature = site_.feature + 8 * g + 2 * (lane_ % 4);
          if (feature < args_.n_out) {
            *reinterpret_cast<float2*>(out + row + feature) =
                Values<false>(acc[block], token_scales_[token], g, half);
          }
        }
      }
    }
  }

  const MoeGemmArgs& args_;
  const EpilogueSite site_;
  const int warp_;
  const int lane_;
  uint8_t* const staging_;
  float2* const columns_;
  float* const token_scales_;
  unsigned* const maxima_;
  unsigned* const other_maxima_;
};

template <class T>
__device__ __forceinline__ void RunTokenMajorEpilogue(const MoeGemmArgs& args,
                                                      const SharedStorage<T>& smem,
                                                      const EpilogueSite& site,
                                                      const TileInfo& info,
                                                      const WarpgroupShare& share,
                                                      const Accumulators<T>& acc) {
  if (T::IsGated(args)) {
    TokenMajorEpilogue<T, true>(args, smem, site).Run(info, share, acc);
  } else {
    TokenMajorEpilogue<T, false>(args, smem, site).Run(info, share, acc);
  }
}

}  // namespace jaxmoe
