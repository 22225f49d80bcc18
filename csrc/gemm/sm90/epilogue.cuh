// Epilogue with weights on wgmma's M: scales, bias, activation, rounding, quantization,
// transposition, stores.
//
// A thread's accumulators lie along tokens of one weight row (feature), memory lies along features
// of one token. stmatrix.trans turns them: chunks of tokens are staged as [token][feature] in
// shared memory, then every thread stores 16 bytes of features.
#pragma once

#include "csrc/gemm/sm90/activation.cuh"
#include "csrc/gemm/sm90/scales.cuh"
#include "csrc/gemm/sm90/warpgroup.cuh"

namespace jaxmoe {

// Conversions of bias and output, whose element is the format's or chosen at run time.
template <class T>
struct OutType {
  bool half;  // if chosen: fp16, not bf16

  static constexpr bool kChosen = std::is_void_v<typename T::Out>;
  using Other = std::conditional_t<kChosen, __nv_bfloat16, typename T::Out>;

  __device__ __forceinline__ float Load(const void* at, int64_t i) const {
    if (kChosen && half) return ptx::ToFloat(static_cast<const __half*>(at)[i]);
    return ptx::ToFloat(static_cast<const Other*>(at)[i]);
  }

  __device__ __forceinline__ uint32_t Pack2(float lo, float hi) const {
    if (kChosen && half) return ptx::Pack2<__half>(lo, hi);
    return ptx::Pack2<Other>(lo, hi);
  }

  __device__ __forceinline__ float2 Unpack2(uint32_t v) const {
    if (std::is_same_v<Other, __half> || (kChosen && half)) {
      return __half22float2(reinterpret_cast<__half2&>(v));
    }
    return __bfloat1622float2(reinterpret_cast<__nv_bfloat162&>(v));
  }

  // Eight values times s in e4m3.
  __device__ __forceinline__ uint2 Quantize(const uint4& v, float s) const {
    const float2 a = Unpack2(v.x);
    const float2 b = Unpack2(v.y);
    const float2 c = Unpack2(v.z);
    const float2 d = Unpack2(v.w);
    return make_uint2(ptx::PackE4M3(a.x * s, a.y * s, b.x * s, b.y * s),
                      ptx::PackE4M3(c.x * s, c.y * s, d.x * s, d.y * s));
  }
};

// Stores features `feature` and following of a row where MoeGemmArgs::out_rows says, which is in
// the memory of any GPU. NOTE: past L1, as the table may be younger than the kernel's first
// instructions.
__device__ __forceinline__ void StoreElsewhere(const MoeGemmArgs& args,
                                               int64_t row,
                                               int feature,
                                               const uint4& v) {
  const uint64_t address = __ldcg(reinterpret_cast<const unsigned long long*>(args.out_rows) + row);
  if (address == 0) return;
  // Known to be global memory, so that it need not wait for loads of shared memory.
  auto* const to = static_cast<uint16_t*>(__cvta_global_to_generic(address));
  *reinterpret_cast<uint4*>(to + feature) = v;
}

// A thread's part of kTokens staged rows of kPieces times 16 bytes, which a warpgroup copies out:
// one piece of every kRows-th row, in passes. NOTE: everything is worked out before, and all is
// read before anything is stored: else a pass takes ten instructions more, and waits for its load.
template <int kPieces, int kTokens, int kPitch>
struct StagedCopy {
  static constexpr int kRows = 128 / kPieces;

  const uint8_t* from;
  int token;  // in the first pass
  int rows;   // from there on that are stored

  // Of `tile_rows` from the first staged one on. `exists`: whether the piece's features do.
  __device__ __forceinline__
  StagedCopy(const uint8_t* staging, int thread, int tile_rows, bool exists)
      : token(thread / kPieces) {
    from = staging + token * kPitch + 16 * (thread % kPieces);
    rows = exists && IsStaged() ? tile_rows - token : 0;
  }

  // Calls use(pass, 16 bytes) for rows that are staged now, in passes from `first` on.
  template <class Use>
  __device__ __forceinline__ void Run(int first, const Use& use) const {
    constexpr int kPasses = (kTokens + kRows - 1) / kRows;
    uint4 v[kPasses];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      if (IsStaged()) v[i] = *reinterpret_cast<const uint4*>(from + i * kRows * kPitch);
    }
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      if ((first + i) * kRows < rows) use(first + i, v[i]);
    }
  }

 private:
  __device__ __forceinline__ bool IsStaged() const { return kRows <= kTokens || token < kTokens; }
};

// Stands for TileScales in formats without scales.
struct NoScales {
  static constexpr bool kOfRows = false;
};

template <class T, class Scales>
class Epilogue {
 public:
  __device__ Epilogue(const MoeGemmArgs& args,
                      const SharedStorage<T>& smem,
                      const EpilogueSite& site,
                      const Scales& scales)
      : args_(args),
        site_(site),
        scales_(scales),
        staging_(smem.staging(site.consumer)),
        token_scales_(TokenScalesOf(smem, site.consumer)),
        warp_(site.thread / 32),
        lane_(site.thread % 32) {}

  __device__ __forceinline__ void Run(Accumulators<T>& acc) {
    LoadBias();
    if constexpr (kPublishes) {
      scales_.Publish(token_scales_, site_.thread);
      Sync();
    }
    if constexpr (T::kFloatOut) {
      ApplyAny(acc);
    } else {
      RoundAndStore(acc);
    }
  }

 private:
  // Whether the warpgroup's threads have a token's scale each, which all of them need.
  static constexpr bool kPublishes = T::kTokenScaled && !T::kBringsScales;

  enum class StageMode { kHalves, kInterleaved, kSingle };

  static __device__ __forceinline__ float* TokenScalesOf(const SharedStorage<T>& smem,
                                                         int consumer) {
    if constexpr (T::kBringsScales) {
      return smem.tile_scales().token;
    } else {
      return smem.token_scales(consumer);
    }
  }

  // The sums and results of two bytes.
  __device__ __forceinline__ void RoundAndStore(Accumulators<T>& acc) {
    if constexpr (T::kFinalizes) return StageAll<StageMode::kSingle, IdentityForm>(acc);
    if constexpr (!T::kScaled) {
      if (args_.z != nullptr) StoreSums(acc);
    }
    const ActivationParams& p = args_.activation;
    if (T::IsGated(args_) && IsSilu(p)) {
      args_.interleaved ? StageAll<StageMode::kInterleaved, SiluForm>(acc)
                        : StageAll<StageMode::kHalves, SiluForm>(acc);
    } else if (!T::IsGated(args_) && p.kind == ActivationParams::kRelu2) {
      StageAll<StageMode::kSingle, Relu2Form>(acc);
    } else if (!T::IsGated(args_) && p.kind == ActivationParams::kIdentity && !args_.out_f32) {
      // Asked once: code for both in each chunk costs all products 0.7 %.
      if (T::kStoresElsewhere && args_.out_rows != nullptr) {
        StageAll<StageMode::kSingle, IdentityForm, T::kStoresElsewhere>(acc);
      } else {
        StageAll<StageMode::kSingle, IdentityForm>(acc);
      }
    } else {
      ApplyAny(acc);
    }
  }

  // Staged tokens: of gated products with 64 output features, of others with all 128.
  template <StageMode kMode>
  using ChunkOf = typename T::template Staging<kMode != StageMode::kSingle>;

  // Division of a staged chunk among the threads that copy it out: each takes 8 features of a
  // token.
  template <class Chunk>
  static constexpr int kPieces = Chunk::kOutFeatures / 8;  // of a row
  template <class Chunk>
  using Copy = StagedCopy<kPieces<Chunk>, Chunk::kChunkTokens, Chunk::kPitch>;

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
    return Out().Load(args_.bias, static_cast<int64_t>(site_.weight) * args_.n + weight_row);
  }

  __device__ __forceinline__ OutType<T> Out() const { return {args_.scales.half}; }

  // Accumulators 4 * group ... of a block, scaled and with bias.
  // `x`: scales of this thread's two tokens, if tokens have any.
  __device__ __forceinline__ float4 Values(const Accumulators<T>& acc,
                                           int block,
                                           int group,
                                           const float2& x) const {
    const float* a = &acc[block][4 * group];
    const float* b = bias_[block];
    if constexpr (T::kScaled && !T::kTokenScaled && !Scales::kOfRows) {
      const float w0 = scales_.weight(block, 0);
      const float w1 = scales_.weight(block, 1);
      return make_float4(
          fmaf(a[0], w0, b[0]), fmaf(a[1], w0, b[0]), fmaf(a[2], w1, b[1]), fmaf(a[3], w1, b[1]));
    } else if constexpr (T::kScaled) {
      const float w0 = scales_.weight(block, 0);
      const float w1 = scales_.weight(block, 1);
      return make_float4(fmaf(a[0], x.x * w0, b[0]),
                         fmaf(a[1], x.y * w0, b[0]),
                         fmaf(a[2], x.x * w1, b[1]),
                         fmaf(a[3], x.y * w1, b[1]));
    }
    return make_float4(a[0] + b[0], a[1] + b[0], a[2] + b[1], a[3] + b[1]);
  }

  // Scales of this thread's two tokens among eight, if tokens have any; the whole warp calls it.
  __device__ __forceinline__ float2 OfTokens(int group) const {
    if constexpr (!T::kTokenScaled && !Scales::kOfRows) {
      return make_float2(1.0f, 1.0f);
    } else if constexpr (Scales::kOfRows) {
      return scales_.OfTokens(group, lane_);
    } else {
      return *reinterpret_cast<const float2*>(token_scales_ + 8 * group + 2 * (lane_ % 4));
    }
  }

  __device__ __forceinline__ void Sync() const { ptx::NamedBarrierSync(1 + site_.consumer, 128); }

  // Stages all tokens, chunk by chunk, and stores them; kElsewhere: where MoeGemmArgs::out_rows
  // says. Rows past the group belong to the next expert and are not stored; neither are features
  // past n_out (a multiple of 8, so 16 bytes are all in or all out).
  template <StageMode kMode, class Form, bool kElsewhere = false>
  __device__ __forceinline__ void StageAll(Accumulators<T>& acc) {
    using Chunk = ChunkOf<kMode>;
    const int feature = site_.feature + 8 * (site_.thread % kPieces<Chunk>);
    const Copy<Chunk> copy(staging_, site_.thread, site_.rows, feature < args_.n_out);
    const bool quantizes = T::kQuantizesOut && args_.scales.out != nullptr;
    const int row = site_.row + copy.token;
    const int64_t at = row * static_cast<int64_t>(args_.n_out) + feature;
    uint8_t* const out = static_cast<uint8_t*>(args_.out) + (quantizes ? at : 2 * at);
    const int pass_bytes = Copy<Chunk>::kRows * args_.n_out * (quantizes ? 1 : 2);
#pragma unroll
    for (int t0 = 0; t0 < T::kWarpgroupTokens; t0 += Chunk::kChunkTokens) {
      if (t0 < site_.rows) {
        // Of shared memory: read before anything is staged, behind which loads would wait.
        [[maybe_unused]] float2 x[Chunk::kChunkTokens / 8];
        if constexpr (T::kTokenScaled) {
#pragma unroll
          for (int j = 0; j < Chunk::kChunkTokens / 8; ++j) x[j] = OfTokens(t0 / 8 + j);
        }
        if (t0 > 0) Sync();  // the chunk before has been copied out
#pragma unroll
        for (int j = 0; j < Chunk::kChunkTokens / 8; ++j) {
          const int group = t0 / 8 + j;
          StageColumns<kMode, Form>(acc, group, j, T::kTokenScaled ? x[j] : OfTokens(group));
        }
        Sync();
        const auto place = [&](int pass) { return out + static_cast<int64_t>(pass) * pass_bytes; };
        if constexpr (T::kFinalizes) {
          copy.Run(t0 / Copy<Chunk>::kRows, [&](int pass, const uint4& v) {
            SendRow(row + pass * Copy<Chunk>::kRows, feature - site_.feature, v);
          });
        } else if constexpr (kElsewhere) {
          copy.Run(t0 / Copy<Chunk>::kRows, [&](int pass, const uint4& v) {
            StoreElsewhere(args_, row + pass * Copy<Chunk>::kRows, feature, v);
          });
        } else if (!quantizes) {
          copy.Run(t0 / Copy<Chunk>::kRows, [&](int pass, const uint4& v) {
            *reinterpret_cast<uint4*>(place(pass)) = InOrder<kMode>(v);
          });
        } else if constexpr (T::kQuantizesOut) {
          copy.Run(t0 / Copy<Chunk>::kRows, [&](int pass, const uint4& v) {
            *reinterpret_cast<uint2*>(place(pass)) =
                Out().Quantize(InOrder<kMode>(v), scales_.out_inverse());
          });
        }
      }
    }
    if (kPublishes || site_.rows > 0) Sync();  // staging and scales are free for the next tile
  }

  // Hands 8 features of a row to the CTA that adds up rows, see token_finalize.cuh.
  __device__ __forceinline__ void SendRow(int row, int feature, const uint4& v) const {
    const SharedStorage<T> smem(staging_ - T::kStagingOffset);  // of the only consumer
    uint8_t* const to = smem.finalized_row(row) + 2 * feature;
    ptx::StoreAsyncAt(to, smem.partial_full(), 0, make_int4(v.x, v.y, v.z, v.w));
  }

  // Stores z, the sums before the activation, in the weight's own order of columns.
  __device__ __forceinline__ void StoreSums(const Accumulators<T>& acc) const {
    using Chunk = ChunkOf<StageMode::kSingle>;
    const int piece = site_.thread % kPieces<Chunk>;
    const int of_block = 8 * (piece % 8);
    const int column = (piece < 8 ? site_.weight_row0 : site_.weight_row1) + of_block;
    const bool exists = T::IsGated(args_) && !args_.interleaved
                            ? site_.feature + of_block < args_.n_out
                            : column < args_.n;
    const Copy<Chunk> copy(staging_, site_.thread, site_.rows, exists);
    const int64_t at = (site_.row + copy.token) * static_cast<int64_t>(args_.n) + column;
    uint16_t* const z = static_cast<uint16_t*>(args_.z) + at;
    const int pass_size = Copy<Chunk>::kRows * args_.n;
#pragma unroll
    for (int t0 = 0; t0 < T::kWarpgroupTokens; t0 += Chunk::kChunkTokens) {
      if (t0 >= site_.rows) break;
#pragma unroll
      for (int j = 0; j < Chunk::kChunkTokens / 8; ++j) {
        const int group = t0 / 8 + j;
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          const float4 v = Values(acc, block, group, OfTokens(group));
          StageBlock<Chunk>(block, j, v.x, v.y, v.z, v.w);
        }
      }
      Sync();
      copy.Run(t0 / Copy<Chunk>::kRows, [&](int pass, const uint4& v) {
        *reinterpret_cast<uint4*>(z + static_cast<int64_t>(pass) * pass_size) = v;
      });
      Sync();  // the staging buffer is free again
    }
  }

  // Rounds and stages eight tokens of a 64-row weight block.
  template <class Chunk>
  __device__ __forceinline__ void StageBlock(
      int block, int j, float v0, float v1, float v2, float v3) const {
    const int token = 8 * j + lane_ % 8;
    const int feature = block * 64 + warp_ * 16 + (lane_ / 8 % 2) * 8;
    ptx::StoreMatrix2Transposed(
        staging_ + token * Chunk::kPitch + feature * 2, Out().Pack2(v0, v1), Out().Pack2(v2, v3));
  }

  // Applies an activation to eight tokens, accumulators 4 * group and following, and stages them in
  // rows 8 * j and following. `x`: see Values.
  template <StageMode kMode, class Form>
  __device__ __forceinline__ void StageColumns(Accumulators<T>& acc,
                                               int group,
                                               int j,
                                               const float2& x) {
    using Chunk = ChunkOf<kMode>;
    const ActivationParams& p = args_.activation;
    if constexpr (kMode == StageMode::kInterleaved) {
      // Gate and up of a feature are neighbouring rows, so neighbouring lanes / 4. Of a warp's
      // eight features of a block, lanes on even rows take the first four, each that of its row,
      // lanes on odd rows the others.
      const bool odd = lane_ / 4 % 2 != 0;
      uint32_t pairs[2];
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        const float4 v = Values(acc, block, group, x);
        const float other0 = __shfl_xor_sync(0xffffffffu, odd ? v.x : v.z, 4);
        const float other1 = __shfl_xor_sync(0xffffffffu, odd ? v.y : v.w, 4);
        pairs[block] = Out().Pack2(Form::Apply(p, odd ? other0 : v.x, odd ? v.z : other0),
                                   Form::Apply(p, odd ? other1 : v.y, odd ? v.w : other1));
      }
      const int feature = warp_ * 8 + lane_ / 8 % 2 * 32;  // of this lane's matrix, InOrder later
      ptx::StoreMatrix2Transposed(
          staging_ + (8 * j + lane_ % 8) * Chunk::kPitch + feature * 2, pairs[0], pairs[1]);
    } else {
      constexpr int kBlocks = kMode == StageMode::kHalves ? 1 : 2;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        float4 y = Values(acc, block, group, x);
        float4 up = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
        if constexpr (kMode == StageMode::kHalves) up = Values(acc, 1, group, x);
        y = make_float4(Form::Apply(p, y.x, up.x),
                        Form::Apply(p, y.y, up.y),
                        Form::Apply(p, y.z, up.z),
                        Form::Apply(p, y.w, up.w));
        StageBlock<Chunk>(block, j, y.x, y.y, y.z, y.w);
      }
    }
  }

  // Eight features as they are in memory, of those that were staged: 0, 4, 1, 5, 2, 6, 3, 7 if gate
  // and up alternate.
  template <StageMode kMode>
  static __device__ __forceinline__ uint4 InOrder(const uint4& v) {
    if constexpr (kMode != StageMode::kInterleaved) return v;
    return make_uint4(__byte_perm(v.x, v.y, 0x5410),
                      __byte_perm(v.z, v.w, 0x5410),
                      __byte_perm(v.x, v.y, 0x7632),
                      __byte_perm(v.z, v.w, 0x7632));
  }

  static __device__ __forceinline__ float Get(const float4& v, int e) {
    return e == 0 ? v.x : e == 1 ? v.y : e == 2 ? v.z : v.w;
  }

  // Any activation, and float32 output, in one piece of code: unrolled over the accumulators like
  // silu, it was most of what a kernel takes to compile. Sums are staged as they are,
  // [token][weight row]. Accumulators are registers, so every pass has staging code of its own.
  __device__ __forceinline__ void ApplyAny(const Accumulators<T>& acc) const {
    constexpr int kTokens = T::kStagingBytes >= 16 * T::kSumPitch ? 16 : 8;  // of a pass
    // Wide kernels of plain weights would spill accumulators that are alive around a loop. Those of
    // wide packed tiles would have more instructions in their k loops.
    constexpr bool kUnrolls =
        (!T::kDecode && !T::kScaled) || (T::kPacked && T::kWarpgroupTokens > 64);
#pragma unroll(kUnrolls ? T::kWarpgroupTokens / kTokens : 1)
    for (int t0 = 0; t0 < T::kWarpgroupTokens; t0 += kTokens) {
      if (t0 >= site_.rows) break;
      if (t0 > 0) Sync();  // the sums before have been read
#pragma unroll
      for (int t = 0; t < T::kWarpgroupTokens; t += 8) {
        if (t / kTokens * kTokens == t0) StageFloat(acc, t / 8, t % kTokens);
      }
      Sync();
      // A thread takes a pair of features of every fourth token, or without a gate every second.
      // NOTE: made here, by selections: a shift by a number from outside is a register more.
      const int pairs = T::IsGated(args_) ? 32 : 64;  // of a token
      const int feature = 2 * (site_.thread & (pairs - 1));
      if (site_.feature + feature < args_.n_out) {
        const int end = min(kTokens, site_.rows - t0);
#pragma unroll 1
        for (int token = pairs == 32 ? site_.thread / 32 : site_.thread / 64; token < end;
             token += pairs == 32 ? 4 : 2) {
          StorePair(site_.row + t0 + token, feature, ApplyPair(StagedSums(token), feature));
        }
      }
    }
    if (kPublishes || site_.rows > 0) Sync();  // staging and scales are free again
  }

  __device__ __forceinline__ float* StagedSums(int token) const {
    return reinterpret_cast<float*>(staging_ + token * T::kSumPitch);
  }

  __device__ __forceinline__ void StageFloat(const Accumulators<T>& acc,
                                             int group,
                                             int first) const {
    const float2 x = OfTokens(group);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const float4 values = Values(acc, block, group, x);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        StagedSums(first + 2 * (lane_ % 4) +
                   e % 2)[block * 64 + warp_ * 16 + (e / 2) * 8 + lane_ / 4] = Get(values, e);
      }
    }
  }

  // Two output features of a token, of its sums.
  __device__ __forceinline__ float2 ApplyPair(const float* sums, int feature) const {
    // NOTE: read one by one: as pairs they take a register more, which wide packed tiles lack.
    const bool gated = T::IsGated(args_);
    const int next = args_.interleaved ? 2 : 1;
    const float* gate = sums + next * feature;
    const float* up = gate + (args_.interleaved ? 1 : 64);
    float y[2] = {gate[0], gate[next]};
    OtherForm::Apply(args_.activation, y, {gated ? up[0] : 1.0f, gated ? up[next] : 1.0f});
    return make_float2(y[0], y[1]);
  }

  __device__ __forceinline__ void StorePair(int row, int feature, float2 y) const {
    const int64_t at = row * static_cast<int64_t>(args_.n_out) + site_.feature + feature;
    if (T::kFloatOut || args_.out_f32) {
      *reinterpret_cast<float2*>(static_cast<float*>(args_.out) + at) = y;
      return;
    }
    if constexpr (!T::kFloatOut) StoreRounded(at, y);
  }

  __device__ __forceinline__ void StoreRounded(int64_t at, float2 y) const {
    const uint32_t v = Out().Pack2(y.x, y.y);
    if constexpr (T::kQuantizesOut) {
      if (args_.scales.out != nullptr) {
        const uint2 bytes = Out().Quantize(make_uint4(v, 0, 0, 0), scales_.out_inverse());
        *reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(args_.out) + at) =
            static_cast<uint16_t>(bytes.x);
        return;
      }
    }
    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(args_.out) + at) = v;
  }

  const MoeGemmArgs& args_;
  const EpilogueSite site_;
  const Scales& scales_;
  uint8_t* const staging_;
  float* const token_scales_;
  const int warp_;
  const int lane_;
  float bias_[2][2];
};

}  // namespace jaxmoe
