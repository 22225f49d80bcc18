// Compile-time shape of one kernel variant: tile sizes, stages, roles, shared-memory map.
#pragma once

#include <cute/arch/mma_sm90_gmma.hpp>

#include "csrc/common/pipeline.cuh"
#include "csrc/common/ptx.cuh"
#include "csrc/gemm/args.h"
#include "csrc/gemm/sm90/formats/format.cuh"
#include "csrc/kernels/round_tokens.h"

namespace jaxmoe {

// How two consumer warpgroups share the work.
enum class Split {
  kNone,     // there is one
  kWeights,  // each takes 128 of the tile's 256 weight rows
  kTokens,   // each takes half of the tile's tokens
};

// Products that a kernel computes. Both: those of a layer, one after the other. Finalized: the down
// product of one token, whose rows are added up as well, see token_finalize.cuh.
enum class Products { kAny, kGated, kUngated, kBoth, kFinalized };

// Bytes of a 64-row weight block in a pipeline step: values, and of packed weights scales.
template <class Format, int kPlainBytes>
constexpr int BlockValueBytes() {
  if constexpr (Format::kPacking != Packing::kNone) return Format::kValueBytes;
  return kPlainBytes;
}

template <class Format>
constexpr int BlockStripBytes() {
  if constexpr (Format::kPacking != Packing::kNone) return Format::kStripBytes;
  return 0;
}

template <class Format>
constexpr bool HasTokenSums() {
  if constexpr (Format::kPacking != Packing::kNone) return Format::kTokenSums;
  return false;
}

constexpr int Largest(int a, int b, int c, int d) {
  const int ab = a > b ? a : b, cd = c > d ? c : d;
  return ab > cd ? ab : cd;
}

// Tokens whose output features one warpgroup stages in shared memory at once. Rows are padded by 16
// bytes so that the 8 rows of a stmatrix fall into different banks.
template <bool kGated, int kTokens, bool kTokensOnM>
struct StagedChunk {
  static constexpr int kOutFeatures = kGated ? 64 : 128;  // of one warpgroup
  static constexpr int kFeatures = kTokensOnM ? 64 : kOutFeatures;
  static constexpr int kMaxTokens = kFeatures == 64 && kTokens % 64 == 0 ? 64 : 32;
  static constexpr int kChunkTokens = kTokens < kMaxTokens ? kTokens : kMaxTokens;
  static_assert(kTokens % kChunkTokens == 0, "chunks cover the tile exactly");
  static constexpr int kPitch = kFeatures * 2 + 16;
  static constexpr int kBytes = kChunkTokens * kPitch;
};

// Scales of a tile, see Tile::kBringsScales.
template <int kWeightRows, int kTokens>
struct alignas(16) TileScaleValues {
  float weight[kWeightRows];
  float token[kTokens];
  float out_inverse;
};

template <class Format,
          cute::SM90::GMMA::Major kMajor_,
          int kWeightTile_,
          int kTokenTile_,
          int kStages_,
          Split kSplit_,
          int kCtasPerSm_,
          int kMulticast_,
          int kSplitK_,
          Products kProducts_ = Products::kAny,
          bool kAddsLowRank_ = false>
struct Tile {
  using Weight = typename Format::Weight;
  using Token = typename Format::Token;
  using Out = typename Format::Out;
  using Decoder = Format;  // of packed weights
  static constexpr bool kFloatOut = std::is_same_v<Out, float>;
  template <Products kOf, bool kAdds>
  using Like = Tile<Format,
                    kMajor_,
                    kWeightTile_,
                    kTokenTile_,
                    kStages_,
                    kSplit_,
                    kCtasPerSm_,
                    kMulticast_,
                    kSplitK_,
                    kOf,
                    kAdds>;
  // The same tile in other kernels: for some products, or with what adapters add to their sums.
  template <Products kOf>
  using Only = Like<kOf, kAddsLowRank_>;
  using Adapted = Like<kProducts_, true>;
  using Layer = Only<Format::kPacking != Packing::kNone ? Products::kBoth : kProducts_>;
  static constexpr bool kPacked = Format::kPacking != Packing::kNone;
  static constexpr Packing kPacking = Format::kPacking;
  static constexpr bool kScaled = Format::kScaling != Scaling::kNone;
  static constexpr bool kTokenScaled = kScaled && Format::kScaling != Scaling::kWeight;
  static constexpr bool kPromoted = Format::kScaling == Scaling::kStep;
  static constexpr bool kQuantizesOut = Format::kQuantizesOut;
  // Codes are multiplied as they are, and the sums of every step corrected: see coded.cuh.
  static constexpr bool kTokenSums = HasTokenSums<Format>();
  static constexpr cute::SM90::GMMA::Major kMajor = kMajor_;
  static constexpr int kWeightTile = kWeightTile_;
  static constexpr int kTokenTile = kTokenTile_;
  static constexpr int kStages = kStages_;
  static constexpr Split kSplit = kSplit_;
  static constexpr int kCtasPerSm = kCtasPerSm_;
  // CTAs that share the rows of a cluster tile and read each weight tile once between them.
  static constexpr int kMulticast = kMulticast_;
  // CTAs that share the k loop of a tile; the first adds up what the others have.
  static constexpr int kSplitK = kSplitK_;
  static_assert(kMulticast == 1 || kSplitK == 1, "a cluster shares rows or the k loop");
  static constexpr int kCluster = kMulticast * kSplitK;
  // Bound by reading weights, not by wgmma. Packed: each weight is read once, or decoding binds.
  static constexpr bool kDecode = kCtasPerSm >= 2;

  // A kernel for gated products and one for others save a third of a microsecond each where weights
  // bind. Elsewhere there is one for both, as each takes seconds to compile.
  static constexpr Products kProducts = kProducts_;
  static constexpr bool kSplitsByProduct = kDecode && !kPacked && kProducts == Products::kAny;
  static __device__ __forceinline__ bool IsGated(const MoeGemmArgs& args) {
    constexpr bool kAsks = kProducts == Products::kAny || kProducts == Products::kBoth;
    return kAsks ? args.gated : kProducts == Products::kGated;
  }

  // Packed weights times few tokens are multiplied by the warps themselves: wgmma would make four
  // of them wait for each other.
  static constexpr bool kWarpProducts = kPacked && kTokenTile_ <= 32 && !kTokenSums;

  // A consumer warpgroup always owns 128 weight rows: two wgmma M blocks, when gated one of gate
  // rows and one of the matching up rows.
  static constexpr int kWarpgroupRows = 128;
  static constexpr int kWarpgroupTokens = kSplit == Split::kTokens ? kTokenTile / 2 : kTokenTile;
  // Tokens are on wgmma's M and weights on N where a warpgroup promotes sums of two whole blocks of
  // 64 tokens, see promoted.cuh.
  static constexpr bool kTokensOnM = kPromoted && kWarpgroupTokens == 128;

  static constexpr int kConsumers = kSplit == Split::kNone ? 1 : 2;
  static constexpr int kWeightBlocks = kWeightTile / 64;
  static_assert(kWeightTile == (kSplit == Split::kWeights ? 2 : 1) * kWarpgroupRows,
                "the split decides how many weight rows a tile has");

  static constexpr int kStepK = Format::kStepK;
  // Bytes of one row in a pipeline step.
  static constexpr int kWeightStepBytes = kStepK * static_cast<int>(sizeof(Weight));
  static constexpr int kTokenStepBytes = kStepK * static_cast<int>(sizeof(Token));
  static_assert(kWeightStepBytes == 128 && kTokenStepBytes == 128,
                "rows of a step are as wide as the swizzle pattern");
  // Steps of k in a stage of the pipeline. Two save packed tiles half of what a stage costs beside
  // decoding, and a block of both is one copy. Wider tiles have no room for as many stages.
  static constexpr int kStageSteps =
      kPacked && !kTokenSums && (kTokenTile == 32 || kTokenTile == 64) ? 2 : 1;
  // Values of a 64-row weight block in a step; packed, scales follow those of a stage, or each.
  static constexpr int kValueBytes = BlockValueBytes<Format, 64 * kWeightStepBytes>();
  static constexpr int kBlockBytes = kStageSteps * (kValueBytes + BlockStripBytes<Format>());
  static constexpr int kWeightBytes = kWeightBlocks * kBlockBytes;
  // Rows of X in a step, and in a stage.
  static constexpr int kTokenPart = kTokenTile * kTokenStepBytes;
  static constexpr int kTokenBytes = kStageSteps * kTokenPart;
  static constexpr int kStageBytes = kWeightBytes + kTokenBytes;
  // A stage is weights, then tokens; in a flexible ring the weights of all stages come first.
  // Packed blocks are no multiple of the swizzle pattern, to which tokens are aligned: then all
  // tokens do.
  static constexpr int kWeightPitch = kPacked ? kWeightBytes : kStageBytes;
  static constexpr int kTokenPitch = kPacked ? kTokenBytes : kStageBytes;
  static constexpr int kWeightOffset = kPacked ? kStages * kTokenBytes : 0;
  static constexpr int kTokenOffset = kPacked ? 0 : kWeightBytes;

  // Rows of X come in boxes, and wgmma's N is chosen at run time in steps, so that a tile with few
  // rows loads and multiplies little more than those. Plain decode is bound by weights: one box,
  // one N. Promoted sums: one N, as ptxas cannot keep several loops with two sets of accumulators
  // apart (C7511: wgmma serialized). Packed weights are so few bytes that those of X count beside
  // them.
  static constexpr bool kOneN = !kPacked && (kDecode || kPromoted);
  static constexpr int kTokenStep = kOneN           ? kWarpgroupTokens  // of a warpgroup
                                    : kWarpProducts ? 8
                                    : kPacked && kTokenTile > 64 ? 32
                                                                 : 16;
  // Packed weights take as long to decode as products with some 32 tokens take, and each N is a
  // loop to compile: wide tiles begin with 64 tokens less than they have.
  static constexpr int kFirstN = !kPacked || kOneN || kWarpProducts ? kTokenStep
                                 : kTokenTile <= 64                 ? kTokenTile - 32
                                                                    : kTokenTile - 64;
  static constexpr int kBoxRows = kPacked && !kTokenSums ? kTokenStep : kDecode ? kTokenTile : 32;

  // Gathered rows of X come in one-row boxes while a tile has few of them, else by 16-byte
  // asynchronous copies of a warpgroup, or of the warp that else issues boxes: issuing one takes
  // 20-40 clocks whatever its size.
  static constexpr bool kGatherByThreads = !kDecode && Format::kGathersByThreads;
  static constexpr bool kGatherByWarp = kDecode && !kPacked && kTokenTile == 32 && kSplitK == 1;
  static constexpr int kMostBoxes = kGatherByThreads ? 0 : kGatherByWarp ? 16 : kTokenTile;
  static constexpr int kProducers = kGatherByThreads ? 2 : 1;  // warpgroups
  static constexpr int kThreads = 128 * (kProducers + kConsumers);

  // The epilogue goes through shared memory a chunk of tokens at a time.
  template <bool kGated>
  using Staging = StagedChunk<kGated, kWarpgroupTokens, kTokensOnM>;
  // Sums of eight tokens fit as well, as float32: see Epilogue::ApplyAny. So do 16 ranks of what is
  // added to the sums of a warpgroup: see LowRank.
  static constexpr int kSumPitch = kWarpgroupRows * 4 + 16;
  static constexpr bool kAddsLowRank = kAddsLowRank_;
  static constexpr int kLowRank = 16;
  static constexpr int kLowRankBytes = 2 * kLowRank * (kWarpgroupRows + kWarpgroupTokens);
  // And so do the scales and sums of some steps: see TokenSums.
  static constexpr int kTokenSumBytes = kCodedSums * (2 * kWarpgroupRows + 4 * kWarpgroupTokens);
  static constexpr int kStagingAlignment = kAddsLowRank ? 1024 : 128;  // of a swizzle pattern
  static constexpr int kStagingBytes = RoundUp(Largest(Staging<true>::kBytes,
                                                       Staging<false>::kBytes,
                                                       kTokensOnM ? 0 : 8 * kSumPitch,
                                                       kAddsLowRank ? kLowRankBytes
                                                       : kTokenSums ? kTokenSumBytes
                                                                    : 0),
                                               kStagingAlignment);

  // There is one kernel for both products of a layer. Wider tiles of packed weights lose more to
  // instructions that are not there than they win, and their k loops are split for few tiles alone.
  static constexpr bool kHasLayerKernel =
      kProducts == Products::kAny && kDecode &&
      (kPacked ? kTokenTile <= 16 && kSplitK == 1 : kTokenTile <= 32);

  // Kernels that add what adapters add are apart, as they would cost the others up to 8 %: of bf16
  // tokens, weights whose rows share a scale, and tiles that serve all numbers of rows. Packed
  // tiles of 32 tokens have no registers for it; 128 x 192 is seldom asked for.
  static constexpr bool kHasAdaptedKernel =
      !kTokenScaled && std::is_same_v<Token, __nv_bfloat16> && kPacking != Packing::kInt8 &&
      kSplitK == 1 && kSplit != Split::kTokens && (kPacked ? kTokenTile != 32 : kTokenTile >= 32);

  // Layers whose rows are stored in the memory of other GPUs have no adapters, and with packed
  // weights a kernel for each product, as one for both would wait for more instructions.
  static constexpr bool kStoresElsewhere =
      !kAddsLowRank && kProducts != Products::kBoth && kProducts != Products::kFinalized;

  // The tile that a token alone takes, where its k loop is short, has a kernel that finalizes it.
  static constexpr bool kHasFinalizedKernel = kProducts == Products::kAny && kDecode && !kPacked &&
                                              kTokenTile == 8 && kSplitK == 1 && !kFloatOut;
  static constexpr bool kFinalizes = kProducts == Products::kFinalized;

  static constexpr int kRing = 2;  // tiles known ahead, see scheduler.cuh

  // Where no group has more than kNarrowTokens rows, a launch has one stage more of fewer tokens,
  // two weight steps are loaded at once, and a stage is free as soon as it is multiplied: more
  // weights are on their way. Bits are the same.
  static constexpr bool kFlexible =
      !kPacked && !kPromoted && !kAddsLowRank && kCluster == 1 && kSplit == Split::kWeights;
  static constexpr int kNarrowTokens = 64;
  static constexpr int kMostStages = kStages + (kFlexible ? 1 : 0);
  static_assert(!kFlexible || kMostStages * (kWeightBytes + kNarrowTokens * kTokenStepBytes) <=
                                  kStages * kStageBytes,
                "one stage more fits");

  // Of few tiles the scheduler chooses how many rows each has, see EvenTileRows.
  static constexpr bool kEvens =
      !kPacked && !kPromoted && !kAddsLowRank && kTokenTile == 160 && kSplit == Split::kWeights;

  // Bytes of accumulators that the first CTA gets from each other one: [piece of 16 bytes][thread].
  static constexpr int kPartialBytes = kConsumers * 128 * kWarpgroupTokens * 4;

  // Accumulators of 160 tokens leave too few registers for scales that are fetched before the k
  // loop. Promoted sums leave fewer still.
  static constexpr bool kLateScales =
      kTokenSums || kWarpgroupTokens > (kPromoted || kPacked ? 64 : 128);

  // Where scales of tokens would be late, a warp brings all scales of a tile to shared memory
  // while its products run.
  static constexpr bool kBringsScales = kTokenScaled && kLateScales && !kPromoted;
  static_assert(!kBringsScales || (kSplit == Split::kWeights && kSplitK == 1 && !kDecode),
                "both warpgroups have all tokens, of a plan that is made, and their sums");

  // Scales of X: one a token for the epilogue, one a token and step for the promotion.
  static constexpr int kTokenScaleBytes =
      kTokenScaled && !kBringsScales ? kWarpgroupTokens * 4 : 0;  // of one warpgroup
  static constexpr int kTileScaleBytes =
      kBringsScales ? static_cast<int>(sizeof(TileScaleValues<kWeightTile, kTokenTile>)) : 0;
  static constexpr int kBlockScales = (kTokenTile + 15) / 16 * 16;  // see StepScaleAt
  // With tokens on M one for each 64-row block of weights follows.
  static constexpr int kStepScaleBytes = kPromoted ? (kBlockScales + (kTokensOnM ? 4 : 0)) * 4 : 0;
  // Scale and bias of each weight row of a warpgroup, see TokenMajorEpilogue.
  static constexpr int kColumnBytes = kTokensOnM ? kWarpgroupRows * 8 : 0;

  static constexpr int kStagingOffset = RoundUp(kStages * kStageBytes, kStagingAlignment);
  static constexpr int kPartialOffset = kStagingOffset + kConsumers * kStagingBytes;
  // The rows of the token that the first CTA of a cluster adds up: [row][feature of the tile].
  static constexpr int kRowPitch = kWeightTile * 2;
  static constexpr int kFinalizedBytes = kFinalizes ? kTokenTile * kRowPitch : 0;
  static constexpr int kTokenScaleOffset =
      kPartialOffset + (kSplitK - 1) * kPartialBytes + kFinalizedBytes;
  // Tiles with whole groups of 128 features can quantize them. Gated, the two warpgroups have half
  // a group each and exchange the largest magnitude of every token: [warpgroup][token].
  static constexpr bool kQuantizesGroups = kTokensOnM && kSplit == Split::kWeights;
  static constexpr int kGroupMaxBytes = kQuantizesGroups ? kConsumers * kTokenTile * 4 : 0;

  static constexpr int kStepScaleOffset = kTokenScaleOffset + kConsumers * kTokenScaleBytes;
  static constexpr int kColumnOffset = kStepScaleOffset + kStages * kStepScaleBytes;
  static constexpr int kGroupMaxOffset = kColumnOffset + kConsumers * kColumnBytes;
  static constexpr int kTileScaleOffset = kGroupMaxOffset + kGroupMaxBytes;
  static constexpr int kRingOffset = kTileScaleOffset + kTileScaleBytes;
  static constexpr int kBarrierOffset = kRingOffset + kRing * static_cast<int>(sizeof(TileInfo));
  static constexpr int kSharedBytes =
      kBarrierOffset + (2 * kMostStages + 3 * kRing + 3 + (kBringsScales ? 2 : 0)) * 8;
  static_assert(kSharedBytes <= 227 * 1024 / kCtasPerSm - (kCtasPerSm - 1) * 1024,
                "tile does not fit the shared memory of an SM");

  // setmaxnreg budgets: only where the launch bound leaves fewer registers than the accumulators
  // need (65536 at 512 threads: 48 * 256 + 208 * 256; 64512 at 384: 56 * 128 + 224 * 256, or 40 *
  // 128 + 232 * 256; of two CTAs of 256 threads 31744 of 32768: 40 * 128 + 208 * 128; of three
  // 20480 of 21845: 40 * 128 + 120 * 128).
  static constexpr bool kReconfigureRegisters =
      kConsumers == 2 || (kPacked && (kTokenTile >= 32 || kAddsLowRank));
  static constexpr int kProducerRegisters = kConsumers == 1 || kTokenSums ? 40
                                            : kProducers == 2             ? 48
                                                                          : 56;
  static constexpr int kConsumerRegisters = kCtasPerSm == 3                      ? 120
                                            : kCtasPerSm == 2 || kProducers == 2 ? 208
                                            : kTokenSums                         ? 232
                                                                                 : 224;
};

// Views of the dynamic shared memory, which is aligned to the swizzle pattern.
template <class T>
struct SharedStorage {
  using Tile = T;
  uint8_t* base;

  __device__ explicit SharedStorage(uint8_t* raw) : base(raw) {}
  __device__ uint8_t* weights(int stage) const {
    return base + T::kWeightOffset + stage * T::kWeightPitch;
  }
  __device__ uint8_t* tokens(int stage) const {
    return base + T::kTokenOffset + stage * T::kTokenPitch;
  }
  __device__ uint8_t* staging(int consumer) const {
    return base + T::kStagingOffset + consumer * T::kStagingBytes;
  }
  __device__ float* token_scales(int consumer) const {
    return reinterpret_cast<float*>(base + T::kTokenScaleOffset + consumer * T::kTokenScaleBytes);
  }
  __device__ float* step_scales(int stage) const {
    return reinterpret_cast<float*>(base + T::kStepScaleOffset + stage * T::kStepScaleBytes);
  }
  __device__ float2* columns(int consumer) const {
    return reinterpret_cast<float2*>(base + T::kColumnOffset + consumer * T::kColumnBytes);
  }
  __device__ unsigned* group_max(int consumer) const {
    return reinterpret_cast<unsigned*>(base + T::kGroupMaxOffset) + consumer * T::kTokenTile;
  }
  // Accumulators of CTA 1 + part of the cluster.
  __device__ uint8_t* partial(int part) const {
    return base + T::kPartialOffset + part * T::kPartialBytes;
  }
  // Of kernels that finalize.
  __device__ uint8_t* finalized_row(int row) const { return partial(0) + row * T::kRowPitch; }
  __device__ TileInfo* ring() const { return reinterpret_cast<TileInfo*>(base + T::kRingOffset); }
  __device__ uint64_t* barriers() const {
    return reinterpret_cast<uint64_t*>(base + T::kBarrierOffset);
  }
  __device__ uint64_t* full(int stage) const { return barriers() + stage; }
  __device__ uint64_t* empty(int stage) const { return barriers() + T::kMostStages + stage; }
  __device__ uint64_t* ring_full(int slot) const { return barriers() + 2 * T::kMostStages + slot; }
  __device__ uint64_t* ring_empty(int slot) const { return ring_full(slot) + T::kRing; }
  // That consumers have stored the tile of a slot, see products.cuh.
  __device__ uint64_t* stored(int slot) const { return ring_full(2 * T::kRing + slot); }
  __device__ uint64_t* partial_full() const { return stored(T::kRing); }
  __device__ uint64_t* partial_empty() const { return partial_full() + 1; }
  // Whether stages are those of few tokens.
  __device__ int* narrow() const { return reinterpret_cast<int*>(partial_full() + 2); }
  // Of kernels that bring scales.
  __device__ auto& tile_scales() const {
    using Values = TileScaleValues<T::kWeightTile, T::kTokenTile>;
    return *reinterpret_cast<Values*>(base + T::kTileScaleOffset);
  }
  __device__ uint64_t* scales_full() const { return partial_full() + 3; }
  __device__ uint64_t* scales_empty() const { return partial_full() + 4; }
};

// Position in a ring whose size a launch decides, see Tile::kFlexible.
template <class T>
struct FlexibleState {
  int index = 0;
  uint32_t parity = 0;
  int narrow = 0;

  __device__ __forceinline__ void Advance() {
    if (++index == T::kStages + narrow) {
      index = 0;
      parity ^= 1;
    }
  }
};

template <class T>
using StageOf = std::conditional_t<T::kFlexible, FlexibleState<T>, PipelineState<T::kStages>>;

// Learns the size of the ring, at a tile.
template <class T>
__device__ __forceinline__ void ReadShape(const SharedStorage<T>& smem, StageOf<T>& stage) {
  if constexpr (T::kFlexible) stage.narrow = *smem.narrow();
}

template <class T, class State>
__device__ __forceinline__ uint8_t* WeightsAt(const SharedStorage<T>& smem, const State& stage) {
  if constexpr (T::kFlexible) {
    return smem.base + stage.index * T::kWeightBytes;
  } else {
    return smem.weights(stage.index);
  }
}

template <class T, class State>
__device__ __forceinline__ uint8_t* TokensAt(const SharedStorage<T>& smem, const State& stage) {
  if constexpr (T::kFlexible) {
    constexpr int kNarrow = T::kNarrowTokens * T::kTokenStepBytes;
    const int pitch = stage.narrow != 0 ? kNarrow : T::kTokenBytes;
    return smem.base + (T::kStages + stage.narrow) * T::kWeightBytes + stage.index * pitch;
  } else {
    return smem.tokens(stage.index);
  }
}

// K steps that this CTA runs: all of them, or its part of the cluster's.
struct StepRange {
  int first;
  int last;
};

template <class T>
__device__ __forceinline__ StepRange StepsOf(int num_k_steps) {
  if constexpr (T::kSplitK == 1) return {0, num_k_steps};
  const int rank = ptx::ClusterRank();
  return {num_k_steps * rank / T::kSplitK, num_k_steps * (rank + 1) / T::kSplitK};
}

}  // namespace jaxmoe
