// A layer of one token and packed weights, by slices of its intermediate.
//
// A CTA computes 64 features of an expert's intermediate, which are a pair of 64-row blocks of the
// gate-up weight, and multiplies them by the 64 columns of the down weight that they meet: what
// lies between the products never leaves its SM, and nothing waits for another CTA until a second
// launch adds up the slices' parts of each row. An expert is computed once, however often the token
// chose it.
// Loads: each warp copies what its own rows of a step need to a ring of its own, kStages ahead, so
//   no barrier stands between them. Warps of a group share a step of k (gate-up) or 128 rows
//   (down).
// Bytes and time: the layer's weights once; sums are float32, slices x experts x H, written and
//   read in L2. Decoding binds: some 280 clocks a step and warp where 4 warps share a scheduler.
// Why this shape, and why of one token alone: docs/notes.md#one-token-by-slices.
#pragma once

#include <algorithm>

#include "csrc/common/copy_async.cuh"
#include "csrc/gemm/sm90/activation.cuh"
#include "csrc/gemm/sm90/packed.cuh"
#include "csrc/gemm/sm90/slice_sums.cuh"

namespace jaxmoe {

// Shape of the kernel for one format. A stage is a step of one warp: 16 rows of two blocks.
template <class Format>
struct SliceTile {
  using Weight = typename Format::Weight;
  using Decoder = Format;
  static constexpr bool kPacked = true;
  static constexpr int kStageSteps = 1;
  static constexpr int kGroups = 4;  // of four warps, which have 16 rows of each block
  static constexpr int kWarps = 4 * kGroups;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kValueBytes = Format::kValueBytes;
  // What a warp copies of a block in a step: values of its rows, and the scales of all.
  static constexpr int kWarpBytes = kValueBytes / 4;
  static_assert(kWarpBytes == 512 || kWarpBytes == 1024, "lanes copy 16 bytes of a block, or 32");
  static_assert(Format::kStripBytes <= 512, "lanes copy 16 bytes of a strip at most");
  static constexpr int kBlockBytes = kWarpBytes + Format::kStripBytes;
  static constexpr int kStages = 4;
  static constexpr int kStageBytes = 2 * kBlockBytes;
  static constexpr int kSumOffset = kWarps * kStages * kStageBytes;
  static constexpr int kSumPitch = 2 * 128 * 8;  // of a group: [block][thread], 8 bytes
  static constexpr int kActOffset = kSumOffset + (kGroups - 1) * kSumPitch;
  static constexpr int kTokenOffset = kActOffset + 128;  // and 2 H bytes
  static_assert(kTokenOffset + 2 * kMaxSlicedHidden <= 227 * 1024, "x fits in shared memory");
};

// A slice of an expert's intermediate.
struct SliceUnit {
  int expert;
  int choice;
  int slice;

  __device__ __forceinline__ SliceUnit(const TokenExperts& experts, int unit, int slices)
      : choice(experts.Choice(unit / slices)), slice(unit % slices) {
    expert = experts.Expert(choice);
  }
};

// Weight row of the first of block b of a slice of the gate-up weight.
__device__ __forceinline__ int SliceRow(const MoeGemmArgs& up, int slice, int b) {
  return slice * up.pair_rows + up.block_base[b];
}

// Copies the steps of a warp to its ring, one after the other: steps of k of the gate-up product,
// then tiles of 128 rows of the down product, then those of the CTA's next unit. Every
// group has some of both, see kMinSlicedHidden.
template <class T>
class SliceCopies {
 public:
  __device__ __forceinline__
  SliceCopies(const SliceArgs& args, const TokenExperts& experts, uint32_t ring, int warp)
      : args_(args),
        experts_(experts),
        ring_(ring),
        group_(warp / 4),
        lane_(threadIdx.x % 32),
        unit_(blockIdx.x),
        count_(experts.count() * args.slices),
        has_strip_(16 * lane_ < args.products[0].packed.strip_bytes),
        policy_(ptx::CreatePolicy<ptx::CachePolicy::kEvictFirst>()) {
    constexpr int kHalf = T::kWarpBytes / 2;  // of half a step
    value_ = warp % 4 * kHalf + 16 * lane_ % kHalf + 16 * lane_ / kHalf * (T::kValueBytes / 2);
    EnterGateUp();
  }

  // Asks for the next step, as a group of copies; of none if there is none.
  __device__ __forceinline__ void Next(int stage) {
    if (left_ > 0) {
      const uint32_t to = ring_ + stage * T::kStageBytes + 16 * lane_;
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        if (b == 1 && left_ == odd_) continue;
        const uint32_t at = to + b * T::kBlockBytes;
        ptx::CopyAsync16(at, values_[b], policy_);
        if constexpr (T::kWarpBytes == 1024) {
          ptx::CopyAsync16(at + 512, values_[b] + T::kValueBytes / 2, policy_);
        }
        if (has_strip_) ptx::CopyAsync16(at + T::kWarpBytes, strips_[b], policy_);
        values_[b] += advance_;
        strips_[b] += strip_advance_;
      }
      if (--left_ == 0) in_down_ ? EnterNextUnit() : EnterDown();
    }
    ptx::CopyAsyncCommit();
  }

 private:
  __device__ __forceinline__ void Point(const PackedArgs& packed, int b, int row, int step) {
    const bool apart = !in_down_ && b == 1 && args_.products[0].up_origin != 0;
    const uint8_t* w = apart ? packed.w_up : packed.w;
    const int in_array = apart ? row - args_.products[0].up_origin : row;
    const int per = packed.superblock_steps;
    const uint8_t* at = w + weight_ * packed.weight_bytes + in_array / 64 * packed.block_bytes +
                        step / per * packed.superblock_bytes;
    values_[b] = at + step % per * T::kValueBytes + value_;
    strips_[b] = at + per * T::kValueBytes + 16 * lane_;
  }

  __device__ __forceinline__ void EnterGateUp() {
    const MoeGemmArgs& up = args_.products[0];
    const PackedArgs& packed = up.packed;
    in_down_ = false;
    odd_ = left_ = 0;
    if (unit_ >= count_) return;
    const SliceUnit unit(experts_, unit_, args_.slices);
    expert_ = unit.expert;
    slice_ = unit.slice;
    weight_ = expert_ % up.num_weights;
#pragma unroll
    for (int b = 0; b < 2; ++b) Point(packed, b, SliceRow(up, slice_, b), group_);
    left_ = (up.num_k_steps - group_ + T::kGroups - 1) / T::kGroups;
    // Superblocks of one step, of two, or one with the whole of k.
    static_assert(T::kGroups % 2 == 0, "a group has the same part of each of its superblocks");
    const int per = packed.superblock_steps;
    const bool whole = per > 2;
    advance_ = whole ? T::kGroups * T::kValueBytes : T::kGroups / per * packed.superblock_bytes;
    strip_advance_ = whole ? 0 : advance_;
  }

  __device__ __forceinline__ void EnterDown() {
    const MoeGemmArgs& down = args_.products[1];
    in_down_ = true;
    weight_ = expert_ % down.num_weights;
#pragma unroll
    for (int b = 0; b < 2; ++b) Point(down.packed, b, group_ * 128 + b * 64, slice_);
    left_ = (down.num_w_tiles - group_ + T::kGroups - 1) / T::kGroups;
    advance_ = strip_advance_ = 2 * T::kGroups * down.packed.block_bytes;
    const bool has_last = (down.num_w_tiles - 1) % T::kGroups == group_;
    odd_ = has_last && down.n % 128 != 0 ? 1 : 0;  // that one has no second block
  }

  __device__ __forceinline__ void EnterNextUnit() {
    unit_ += gridDim.x;
    EnterGateUp();
  }

  const SliceArgs& args_;
  const TokenExperts experts_;
  const uint32_t ring_;
  const int group_;
  const int lane_;
  int unit_;
  const int count_;
  const bool has_strip_;
  const uint64_t policy_;
  int value_;  // bytes from a step's values to those that this lane copies
  bool in_down_;
  int left_;  // steps of this product
  int odd_;   // at which of them there is no second block, counted down; 0: there always is
  int expert_;
  int slice_;
  int weight_;
  const uint8_t* values_[2];
  const uint8_t* strips_[2];
  int64_t advance_;
  int64_t strip_advance_;
};

// Sums of a group of warps: acc[b][2 r] are those of rows lane / 4 + 8 r of a warp's 16 in block b;
// all eight columns of the tokens' operand are the one token.
using SliceSum = float[2][4];

template <class T, class Decoder>
class SliceConsumer {
 public:
  __device__ __forceinline__ SliceConsumer(const SliceArgs& args, uint8_t* smem)
      : args_(args),
        smem_(smem),
        thread_(threadIdx.x % 128),
        lane_(threadIdx.x % 32),
        group_(threadIdx.x / 128),
        ring_(smem + threadIdx.x / 32 * T::kStages * T::kStageBytes),
        experts_(args.products[0].plan, lane_),
        copies_(args, experts_, ptx::SmemAddress(ring_), threadIdx.x / 32),
        site_(args.products[0].packed, thread_) {}

  __device__ __forceinline__ void Run() {
    const MoeGemmArgs& up = args_.products[0];
    const int count = experts_.count() * args_.slices;
    if (static_cast<int>(blockIdx.x) >= count) return;
    const auto* x = static_cast<const uint4*>(up.x);
    const uint32_t tokens = ptx::SmemAddress(smem_ + T::kTokenOffset);
    for (int i = threadIdx.x; i < up.k / 8; i += T::kThreads) {
      ptx::CopyAsync16(tokens + 16 * i, x + i, true);
    }
    ptx::CopyAsyncCommit();
#pragma unroll 1
    for (int s = 0; s < T::kStages; ++s) copies_.Next(s);
    ptx::CopyAsyncWaitGroups<T::kStages>();
    __syncthreads();
    // A lane of ldmatrix names 16 bytes of the row, the lane / 8-th of half a step.
    const uint32_t x_row = tokens + lane_ / 8 * 16;
    const uint32_t act_row = ptx::SmemAddress(smem_ + T::kActOffset) + lane_ / 8 * 16;
    for (int u = blockIdx.x; u < count; u += gridDim.x) {
      const SliceUnit unit(experts_, u, args_.slices);
      SliceSum acc = {};
      for (int step = group_; step < up.num_k_steps; step += T::kGroups) {
        Multiply(x_row + step * 128, acc);
      }
      AddGroups(acc);
      if (group_ == 0) Activate(unit, acc);
      __syncthreads();
      MultiplyDown(unit, act_row);
      __syncthreads();  // before the activations and sums of the next unit take their places
    }
  }

 private:
  // Multiplies the ring's next step by the tokens at `at`, and asks for another in its place.
  __device__ __forceinline__ void Multiply(uint32_t at, SliceSum& acc) {
    using Half = PackedHalf<T, Decoder>;
    ptx::CopyAsyncWaitGroups<T::kStages - 1>();
    __syncwarp();  // each lane waits for its own copies
    Half halves[2];
    uint32_t tokens[2][4];
    const uint8_t* const stage = ring_ + stage_ * T::kStageBytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const uint8_t* const block = stage + b * T::kBlockBytes;
        const auto* words = reinterpret_cast<const typename Half::Words*>(block);
        halves[half].words[b] = words[half * 32 + lane_];
        halves[half].scales[b] = Decoder::LoadScales(block + T::kWarpBytes, site_, half);
      }
      ptx::LoadMatrix4(at + 64 * half, tokens[half]);
    }
    __syncwarp();  // all lanes have read
    copies_.Next(stage_);
    if (++stage_ == T::kStages) stage_ = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int second = 0; second < 2; ++second) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          uint32_t a[4];
          halves[half].Decode(site_, b, half, second, a);
          ptx::MmaWarp<typename T::Weight>(
              a, tokens[half][2 * second], tokens[half][2 * second + 1], acc[b]);
        }
      }
    }
  }

  // Adds the sums of the other groups to those of the first, in their order.
  __device__ __forceinline__ void AddGroups(SliceSum& acc) const {
    float2* const sums = reinterpret_cast<float2*>(smem_ + T::kSumOffset) + thread_;
    if (group_ > 0) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        sums[((group_ - 1) * 2 + b) * 128] = make_float2(acc[b][0], acc[b][2]);
      }
    }
    __syncthreads();
    if (group_ > 0) return;
#pragma unroll
    for (int i = 0; i < 2 * (T::kGroups - 1); ++i) {
      const float2 v = sums[i * 128];
      acc[i % 2][0] += v.x;
      acc[i % 2][2] += v.y;
    }
  }

  // The slice's intermediate, rounded as it would be stored, to shared memory.
  __device__ __forceinline__ void Activate(const SliceUnit& unit, const SliceSum& acc) const {
    const MoeGemmArgs& up = args_.products[0];
    const int weight = unit.expert % up.num_weights;
    float z[2][2];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = SliceRow(up, unit.slice, b) + Feature(r);
        const float scale = WeightScale<T>(up, weight, row, b);
        z[b][r] = fmaf(acc[b][2 * r], scale, SliceBias<T>(up, weight, row));
      }
    }
    auto* const act = reinterpret_cast<typename T::Weight*>(smem_ + T::kActOffset);
    if (!up.interleaved) {
      Apply(z[0], z[1]);
      if (lane_ % 4 == 0) {
#pragma unroll
        for (int r = 0; r < 2; ++r) act[Feature(r)] = typename T::Weight(z[0][r]);
      }
      return;
    }
    // Gate rows are even: a lane of one has its up row four lanes on.
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      float other[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) other[r] = __shfl_down_sync(0xffffffffu, z[b][r], 4);
      Apply(z[b], other);
      if (lane_ % 8 == 0) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          act[b * 32 + Feature(r) / 2] = typename T::Weight(z[b][r]);
        }
      }
    }
  }

  __device__ __forceinline__ void Apply(float (&gate)[2], const float (&up)[2]) const {
    const ActivationParams& p = args_.products[0].activation;
    if (IsSilu(p)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) gate[r] = SiluForm::Apply(p, gate[r], up[r]);
    } else {
      OtherForm::Apply(p, gate, up);
    }
  }

  // The part of the expert's row that follows from the slice, without the weight's scale.
  __device__ __forceinline__ void MultiplyDown(const SliceUnit& unit, uint32_t act_row) {
    const MoeGemmArgs& down = args_.products[1];
    float* const out =
        args_.sums + (static_cast<int64_t>(unit.slice) * down.plan.top_k + unit.choice) * down.n;
    for (int t = group_; t < down.num_w_tiles; t += T::kGroups) {
      SliceSum acc = {};
      Multiply(act_row, acc);
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int row = t * 128 + b * 64;
        if (lane_ % 4 != 0 || row >= down.n) continue;
#pragma unroll
        for (int r = 0; r < 2; ++r) __stcg(out + row + Feature(r), acc[b][2 * r]);
      }
    }
  }

  // Row of this thread among the 64 of a block.
  __device__ __forceinline__ int Feature(int r) const {
    return thread_ / 32 * 16 + r * 8 + lane_ / 4;
  }

  const SliceArgs& args_;
  uint8_t* const smem_;
  const int thread_;
  const int lane_;
  const int group_;
  uint8_t* const ring_;
  const TokenExperts experts_;
  SliceCopies<T> copies_;
  const typename Decoder::Site site_;
  int stage_ = 0;
};

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
    SliceKernel(const __grid_constant__ SliceArgs args) {
  extern __shared__ __align__(128) uint8_t slice_smem[];
  GridDependencyWait();
  GridDependencyLaunch();
  using Symmetric = typename T::Decoder::Symmetric;
  if constexpr (!std::is_void_v<Symmetric>) {
    if (!args.products[0].packed.has_zeros) {
      return SliceConsumer<T, Symmetric>(args, slice_smem).Run();
    }
  }
  SliceConsumer<T, typename T::Decoder>(args, slice_smem).Run();
}

// Launches both, as the first launches of a handler.
template <class Format>
cudaError_t LaunchSlices(const SliceArgs& args, cudaStream_t stream) {
  using T = SliceTile<Format>;
  const MoeGemmArgs& down = args.products[1];
  int sm_count = 0;
  JAXMOE_RETURN_IF_CUDA_ERROR(GetSmCount(&sm_count));
  const int64_t units = down.plan.top_k * args.slices;
  JAXMOE_RETURN_IF_CUDA_ERROR(
      LaunchKernel(SliceKernel<T>,
                   dim3(static_cast<unsigned>(std::min<int64_t>(units, sm_count))),
                   dim3(T::kThreads),
                   T::kTokenOffset + 2 * static_cast<size_t>(args.products[0].k),
                   stream,
                   false,
                   args));
  const auto blocks = static_cast<unsigned>(CeilDiv(down.n, 4 * kSlicePieces));
  return LaunchKernel(SliceFinalizeKernel<T>,
                      dim3(blocks),
                      dim3(kSlicePieces * kSliceTerms),
                      0,
                      stream,
                      true,
                      args);
}

}  // namespace jaxmoe
