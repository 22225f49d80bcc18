// Decodes packed weights to bf16, with the decoders of the products: bound by the bytes written.
#include "csrc/common/launch.h"
#include "csrc/common/ptx.cuh"
#include "csrc/gemm/dequantize.h"
#include "csrc/gemm/sm90/formats/int4.cuh"
#include "csrc/gemm/sm90/formats/int8.cuh"
#include "csrc/gemm/sm90/formats/mxfp4.cuh"
#include "csrc/gemm/sm90/formats/mxfp8.cuh"
#include "csrc/gemm/sm90/formats/nvfp4.cuh"

namespace jaxmoe {
namespace {

constexpr int kThreads = 128;  // decode 64 rows, as a warpgroup of the products does
constexpr int kRows = 64;
constexpr int kStepK = 64;

// What a block decodes: 64 rows of a weight, and of their superblocks those that are its turn.
struct DequantizeArgs {
  DequantizeParams params;
  PackedArgs packed;
  bool scales_rows;
  int value_bytes;
};

// A step of 64 of k, from `values` and the strip of its superblock to rows of `out`. Warps have 16
// rows each; a lane's pairs of neighbours along k go through shared memory to whole rows.
template <class Decoder>
__device__ __forceinline__ void DequantizeStep(const uint8_t* values,
                                               const uint8_t* strip,
                                               const typename Decoder::Site& site,
                                               const float (&scale)[2],
                                               uint8_t* staging,
                                               __nv_bfloat16* out,
                                               int64_t k) {
  constexpr int kWords = Decoder::kValueBytes / 2048;
  constexpr int kPitch = 2 * kStepK + 16;
  using Words = std::conditional_t<kWords == 1, uint2, uint4>;
  const int lane = threadIdx.x % 32;
  uint8_t* const row = staging + lane % 16 * kPitch + lane / 16 * 16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Words both =
        __ldcs(reinterpret_cast<const Words*>(values) + half * kThreads + threadIdx.x);
    const typename Decoder::Scales scales = Decoder::LoadScales(strip, site, half);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint32_t a[4];
      if constexpr (kWords == 1) {
        const uint32_t mine[] = {both.x, both.y};
        Decoder::Decode(mine, scales, site, half, part, a);
      } else {
        const uint32_t mine[] = {part == 0 ? both.x : both.z, part == 0 ? both.y : both.w};
        Decoder::Decode(mine, scales, site, half, part, a);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 v = __bfloat1622float2(reinterpret_cast<__nv_bfloat162&>(a[j]));
        a[j] = ptx::Pack2<__nv_bfloat16>(v.x * scale[j % 2], v.y * scale[j % 2]);
      }
      ptx::StoreMatrix4(row + 32 * (2 * half + part), a[0], a[1], a[2], a[3]);
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = 4 * i + lane / 8;
    const uint4 piece = *reinterpret_cast<const uint4*>(staging + r * kPitch + lane % 8 * 16);
    *reinterpret_cast<uint4*>(out + r * k + lane % 8 * 8) = piece;
  }
  __syncwarp();  // the staging buffer is free
}

template <class Decoder>
__global__ void __launch_bounds__(kThreads) DequantizeKernel(const DequantizeArgs args) {
  __shared__ __align__(16) uint8_t staging[kThreads / 32][16 * (2 * kStepK + 16)];
  const DequantizeParams& p = args.params;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int64_t block = blockIdx.x;  // of 64 rows, of all weights
  const int64_t weight = block / (p.n / kRows);
  const int64_t row = block * kRows + 16 * warp;
  const typename Decoder::Site site(args.packed, threadIdx.x);
  float scale[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t of_row = row + lane / 4 + 8 * i;
    scale[i] = p.scales[args.scales_rows ? of_row : weight] * Decoder::kFactor;
  }
  const auto* const of_rows =
      static_cast<const uint8_t*>(p.values) + block * args.packed.block_bytes;
  auto* const out = static_cast<__nv_bfloat16*>(p.out) + row * p.k;
  const int steps = args.packed.superblock_steps;
  const int64_t superblocks = p.k / (int64_t{kStepK} * steps);
  for (int64_t s = blockIdx.y; s < superblocks; s += gridDim.y) {
    const uint8_t* const superblock = of_rows + s * args.packed.superblock_bytes;
    const uint8_t* const strip = superblock + steps * args.value_bytes;
    for (int step = 0; step < steps; ++step) {
      DequantizeStep<Decoder>(superblock + step * args.value_bytes,
                              strip,
                              site,
                              scale,
                              staging[warp],
                              out + (s * steps + step) * kStepK,
                              p.k);
    }
  }
}

template <class Decoder>
cudaError_t LaunchDecoder(const DequantizeArgs& args, cudaStream_t stream) {
  constexpr int64_t kMaxGridY = 8;
  const DequantizeParams& p = args.params;
  const int64_t superblocks = p.k / (int64_t{kStepK} * args.packed.superblock_steps);
  const dim3 grid(static_cast<unsigned>(p.num_weights * p.n / kRows),
                  static_cast<unsigned>(superblocks < kMaxGridY ? superblocks : kMaxGridY));
  return LaunchKernel(DequantizeKernel<Decoder>, grid, dim3(kThreads), 0, stream, false, args);
}

}  // namespace

cudaError_t LaunchDequantize(const DequantizeParams& p, cudaStream_t stream) {
  const FormatRow& format = RowOf(p.format);
  const PackedLayout& layout = format.packed;
  if (p.num_weights == 0 || p.n == 0 || p.k == 0) return cudaSuccess;
  if (!format.is_packed() || p.n % kRows != 0 || p.k % kStepK != 0 ||
      p.k % layout.superblock_k(p.k) != 0 || p.num_weights * (p.n / kRows) > kMaxInt) {
    return cudaErrorInvalidValue;
  }
  DequantizeArgs args{};
  args.params = p;
  args.packed = PackedArgsOf(layout, p.k);
  args.scales_rows = format.weights == Shared::kRow;
  args.value_bytes = layout.value_bytes();
  switch (layout.packing) {
    case Packing::kMxfp4:
      return LaunchDecoder<Mxfp4<__nv_bfloat16>>(args, stream);
    case Packing::kNvfp4:
      return LaunchDecoder<Nvfp4<__nv_bfloat16>>(args, stream);
    case Packing::kInt4:
      return LaunchDecoder<Int4<__nv_bfloat16>>(args, stream);
    case Packing::kInt8:
      return LaunchDecoder<Int8<__nv_bfloat16>>(args, stream);
    case Packing::kMxfp8:
      return LaunchDecoder<Mxfp8<__nv_bfloat16>>(args, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace jaxmoe
