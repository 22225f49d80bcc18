// Device code of quantize: float rows to FP8 with the scales of tensors, rows, groups or blocks.
//
// Problem: read C floats of each of R rows once, find the largest finite |x| of what shares a
//   scale, write C bytes and the scales. A piece is 16 bytes of x, 8 (f32: 4) of its values.
// Rows (tokens: kRow, kGroup, and the values of kTensor): a row belongs to `warps` =
//   ceil(pieces / 128) warps of one block, 4 pieces a thread, all loaded before the first is used;
//   short rows share a block, rows beyond 4096 pieces are read in chunks. Group: its 128 floats lie
//   in 16 (f32: 32) neighbouring lanes, whose maximum takes 4 (5) shuffles. Row: warp maximum, one
//   barrier; of chunks only the last is still in registers then, the others come from L2 again.
//   A row's values go to top_k places: lane k holds the k-th, read while x is on its way.
// Blocks (weights: kBlock): 128 x 128 of x in registers of 256 (512) threads, 8 pieces each.
// kTensor: up to 32768 pieces one cluster of at most 8 blocks holds all of x in registers and
//   exchanges maxima through shared memory: one launch. Beyond: one launch leaves the maxima of at
//   most 1024 parts in `partial`, a second one reads x again, last row first, because the end of x
//   is what L2 still has; each block of it reduces the parts by itself, so nothing must be zeroed.
// Every read is from L2: a kernel that began early must not see what an SM has kept in L1. With
//   `early_x` it reads x and computes while the launch before it runs, and waits for that before it
//   asks where rows go.
// Bytes: R C (s + 1) + scales; kTensor R C s more, from L2 where x fits (about 40 MB). At 4.2 TB/s:
//   see docs/notes.md#fp8-arrays. Shared memory: 128 bytes.
// Why these shapes: two loops over a row through L2 cost no HBM but twice the L2 traffic; atomics
//   for the tensor's maximum would need a kernel that zeroes it.
#pragma once

#include <cooperative_groups.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "csrc/common/launch.h"
#include "csrc/common/piece.cuh"
#include "csrc/common/quant_scale.cuh"
#include "csrc/kernels/quantize.h"

namespace jaxmoe {

inline constexpr int kQuantMaxThreads = 1024;
inline constexpr int kQuantPieces = 4;       // pieces a thread holds
inline constexpr int kQuantBlockPieces = 8;  // the same in a 128 x 128 block
inline constexpr int kQuantMaxThreadsOfParts = 512;
inline constexpr int kQuantMaxCluster = 8;
inline constexpr unsigned kQuantNoRow = 0xffffffffu;

// How kernels divide rows among threads: x threads and y rows a block, all rows in the grid, and
// the chunks that a row is read in.
struct QuantRowThreads {
  dim3 grid;
  dim3 block;
  unsigned chunks;
};

inline cudaError_t ThreadsOfRows(int64_t rows, int64_t row_pieces, QuantRowThreads* threads) {
  constexpr int64_t kMaxWarps = kQuantMaxThreads / 32;
  constexpr int64_t kWarpPieces = 32 * kQuantPieces;
  constexpr int64_t kUsualWarps = 4;  // of a block of short rows: small ones end at many times
  int sm_count = 0;
  JAXMOE_RETURN_IF_CUDA_ERROR(GetSmCount(&sm_count));
  const int64_t chunks = std::max<int64_t>(1, CeilDiv(row_pieces, kMaxWarps * kWarpPieces));
  const int64_t warps = std::max<int64_t>(1, CeilDiv(row_pieces, chunks * kWarpPieces));
  // Few rows: each on an SM of its own.
  const int64_t block_rows =
      std::clamp<int64_t>(rows / sm_count, 1, std::max<int64_t>(1, kUsualWarps / warps));
  threads->grid = dim3(static_cast<unsigned>(CeilDiv(rows, block_rows)));
  threads->block = dim3(static_cast<unsigned>(32 * warps), static_cast<unsigned>(block_rows));
  threads->chunks = static_cast<unsigned>(chunks);
  return cudaSuccess;
}

// Elements of a piece, and the lanes that hold 128 neighbours.
template <typename T>
inline constexpr int kPieceSize = 16 / sizeof(T);
template <typename T>
inline constexpr int kGroupLanes = kQuantBlock / kPieceSize<T>;

// The FP8 values of a piece.
template <typename T>
using Fp8Piece = std::conditional_t<sizeof(T) == 2, uint2, uint32_t>;

__device__ __forceinline__ int64_t ValidRows(const QuantizeParams& p) {
  if (p.num_rows == nullptr) return p.rows;
  int64_t count = __ldcg(p.num_rows);
  return count < 0 ? 0 : count < p.rows ? count : p.rows;
}

// Largest finite |x| of each piece. Values that are not finite are rare: only where there are some
// does a thread look at each.
template <typename T, int kCount>
__device__ __forceinline__ void LargestOfEach(const uint4 (&bits)[kCount],
                                              uint32_t (&largest)[kCount]) {
  uint32_t all = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    largest[i] = Magnitude<T>::template OfPiece<false>(bits[i]);
    all = Magnitude<T>::Max(all, largest[i]);
  }
  if (Magnitude<T>::AllFinite(all)) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) largest[i] = Magnitude<T>::template OfPiece<true>(bits[i]);
}

// Largest finite |x| of several pieces, as the bits of a float.
template <typename T, int kCount>
__device__ __forceinline__ unsigned LargestBits(const uint4 (&bits)[kCount]) {
  uint32_t largest[kCount];
  LargestOfEach<T>(bits, largest);
#pragma unroll
  for (int i = 1; i < kCount; ++i) largest[0] = Magnitude<T>::Max(largest[0], largest[i]);
  return max(Magnitude<T>::ToFloat(largest[0], 0), Magnitude<T>::ToFloat(largest[0], 1));
}

__device__ __forceinline__ float DynamicScale(const QuantizeParams& p, unsigned largest) {
  float scale = QuantScale(largest, p.element == ElementType::kE4M3 ? kLargestE4M3 : kLargestE5M2);
  if (p.e8m0) {  // any mantissa bit is carried into the exponent
    scale = __uint_as_float((__float_as_uint(scale) + 0x007fffffu) & 0x7f800000u);
  }
  return scale;
}

__device__ __forceinline__ float StaticScale(float scale) {
  return scale >= kMinQuantScale && scale <= kMaxQuantScale ? scale : __uint_as_float(0x7fc00000u);
}

template <typename T>
__device__ __forceinline__ Fp8Piece<T> ToFp8Piece(uint4 bits, float inverse, ElementType element) {
  float values[kPieceSize<T>];
  Piece<T, kPieceSize<T>>::Unpack(bits, values);
  uint32_t words[kPieceSize<T> / 4];
#pragma unroll
  for (int i = 0; i < kPieceSize<T> / 4; ++i) {
    words[i] = element == ElementType::kE4M3 ? ToFp8<__NV_E4M3>(values + 4 * i, inverse)
                                             : ToFp8<__NV_E5M2>(values + 4 * i, inverse);
  }
  if constexpr (sizeof(T) == 2) {
    return make_uint2(words[0], words[1]);
  } else {
    return words[0];
  }
}

// Maximum over the warps [first, first + count) of a block; all threads of the block call it, once.
__device__ __forceinline__ unsigned MaxOverWarps(unsigned value,
                                                 unsigned first,
                                                 unsigned count,
                                                 unsigned* shared) {
  const unsigned lane = threadIdx.x % 32;
  value = __reduce_max_sync(0xffffffffu, value);
  if (count == 1) return value;
  const unsigned warp = threadIdx.x / 32;  // within [0, count)
  if (lane == 0) shared[first + warp] = value;
  __syncthreads();
  return __reduce_max_sync(0xffffffffu, lane < count ? shared[first + lane] : 0u);
}

// Pieces `first`, first + stride, .. of a row; zeros from `end` on.
__device__ __forceinline__ void LoadPieces(
    uint4 (&bits)[kQuantPieces], const uint4* row, unsigned first, unsigned stride, unsigned end) {
#pragma unroll
  for (int i = 0; i < kQuantPieces; ++i) {
    const unsigned piece = first + i * stride;
    bits[i] = uint4{};
    if (piece < end) bits[i] = __ldcg(row + piece);
  }
}

// 1 / scale of the groups in which a thread's pieces lie; writes their scales. A group is in kLanes
// lanes: each of the first of them divides for one piece, and the others get its result.
template <typename T>
__device__ __forceinline__ void InversesOfGroups(const QuantizeParams& p,
                                                 const uint4 (&bits)[kQuantPieces],
                                                 unsigned first,
                                                 unsigned row,
                                                 unsigned row_pieces,
                                                 unsigned end,
                                                 float (&inverses)[kQuantPieces]) {
  constexpr unsigned kLanes = kGroupLanes<T>;
  constexpr unsigned kAll = 0xffffffffu;
  const unsigned lane = threadIdx.x % kLanes;
  const unsigned mine = lane % kQuantPieces;
  const unsigned piece = first - lane + mine * blockDim.x;  // first of the group
  const int64_t group =
      static_cast<int64_t>(row) * ((row_pieces + kLanes - 1) / kLanes) + piece / kLanes;
  float scale = 0.0f;
  if (p.static_scales != nullptr) {
    if (piece < end) scale = StaticScale(__ldcg(p.static_scales + group));
  } else {
    constexpr int kPerWord = 4 / sizeof(T);
    uint32_t each[kQuantPieces];
    uint32_t largest[kQuantPieces / kPerWord];
    LargestOfEach<T>(bits, each);
#pragma unroll
    for (int i = 0; i < kQuantPieces; i += kPerWord) {
      if constexpr (kPerWord == 1) {
        largest[i] = each[i];
      } else {  // one of each pair; its larger half
        largest[i / 2] = __vmaxu2(__byte_perm(each[i], each[i + 1], 0x5410),
                                  __byte_perm(each[i], each[i + 1], 0x7632));
      }
    }
#pragma unroll
    for (unsigned offset = kLanes / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (uint32_t& word : largest) {
        word = Magnitude<T>::Max(word, __shfl_xor_sync(kAll, word, offset));
      }
    }
    uint32_t word = largest[0];
#pragma unroll
    for (int i = kPerWord; i < kQuantPieces; i += kPerWord) {
      if (mine >= i) word = largest[i / kPerWord];
    }
    scale = DynamicScale(p, Magnitude<T>::ToFloat(word, mine % kPerWord));
  }
  if (lane < kQuantPieces && piece < end) p.scales[group] = scale;
  const float inverse = __frcp_rn(scale);
#pragma unroll
  for (int i = 0; i < kQuantPieces; ++i) {
    inverses[i] = __shfl_sync(kAll, inverse, i, kLanes);
  }
}

// Threads: x a multiple of 32, those of a row; y rows of the block. Grid: all rows of all entries.
// num_partials: maxima of each entry in p.partial (kTensor).
template <typename T, Shared kShared>
__global__ void __launch_bounds__(kQuantMaxThreads) QuantizeRowsKernel(QuantizeParams p,
                                                                       unsigned row_pieces,
                                                                       unsigned chunks,
                                                                       unsigned num_partials) {
  static_assert(kShared != Shared::kBlock, "see QuantizeBlocksKernel");
  __shared__ unsigned shared[kQuantMaxThreads / 32];
  GridDependency dependency(p.early_x, p.lets_start);
  const unsigned total = static_cast<unsigned>(p.batch * p.rows);
  const unsigned entry_rows = static_cast<unsigned>(p.rows);
  const unsigned index = blockIdx.x * blockDim.y + threadIdx.y;
  const bool exists = index < total;
  const unsigned row = kShared == Shared::kTensor && exists ? total - 1 - index : index;
  const unsigned entry = exists ? row / entry_rows : 0u;
  const bool valid = exists && row - entry * entry_rows < ValidRows(p);
  const unsigned lane = threadIdx.x % 32;
  const unsigned top_k = static_cast<unsigned>(p.top_k);
  const bool scatters = p.slot_to_row != nullptr;
  const int* slots = p.slot_to_row + static_cast<int64_t>(row) * top_k;
  // In lane k: where the values go the k-th time.
  const auto find_target = [&]() -> unsigned {
    if (!valid || (scatters && lane >= top_k)) return kQuantNoRow;
    return scatters ? static_cast<unsigned>(__ldcg(slots + lane)) : row;
  };
  unsigned target = p.early_x && scatters ? kQuantNoRow : find_target();

  const uint4* x = static_cast<const uint4*>(p.x) + static_cast<int64_t>(row) * row_pieces;
  const bool is_static = p.static_scales != nullptr;
  const unsigned end = valid ? row_pieces : 0u;
  const unsigned chunk_pieces = kQuantPieces * blockDim.x;
  unsigned first = (chunks - 1) * chunk_pieces + threadIdx.x;
  uint4 bits[kQuantPieces];
  unsigned largest = 0;
  if (kShared == Shared::kRow && !is_static) {
    for (unsigned at = threadIdx.x; at < first; at += chunk_pieces) {
      LoadPieces(bits, x, at, blockDim.x, end);
      largest = max(largest, LargestBits<T>(bits));
    }
  }
  LoadPieces(bits, x, first, blockDim.x, end);

  float inverse = 0.0f;
  if constexpr (kShared != Shared::kGroup) {
    const unsigned index_of_scale = kShared == Shared::kTensor ? entry : row;
    float scale = 0.0f;
    if (is_static) {
      if (exists) scale = StaticScale(__ldcg(p.static_scales + index_of_scale));
    } else {
      if constexpr (kShared == Shared::kRow) {
        largest = max(largest, LargestBits<T>(bits));
      } else {
        if (dependency.Meet()) target = find_target();
        const float* partial = p.partial + static_cast<int64_t>(entry) * num_partials;
        for (unsigned i = threadIdx.x; i < num_partials; i += blockDim.x) {
          largest = max(largest, __float_as_uint(__ldcg(partial + i)));
        }
      }
      const unsigned warps = blockDim.x / 32;
      largest = MaxOverWarps(largest, threadIdx.y * warps, warps, shared);
      scale = DynamicScale(p, largest);
    }
    inverse = __frcp_rn(scale);
    // A tensor has a scale even if no row of it is valid.
    const bool owner = kShared == Shared::kTensor ? exists && row == entry * entry_rows : valid;
    if (owner && threadIdx.x == 0) p.scales[index_of_scale] = scale;
  }

  const unsigned num_out_rows = static_cast<unsigned>(p.num_out_rows);
  Fp8Piece<T>* values = static_cast<Fp8Piece<T>*>(p.values);
  while (true) {
    float inverses[kQuantPieces];
    if constexpr (kShared == Shared::kGroup) {
      InversesOfGroups<T>(p, bits, first, row, row_pieces, end, inverses);
    }
    Fp8Piece<T> out[kQuantPieces];
#pragma unroll
    for (int i = 0; i < kQuantPieces; ++i) {
      if constexpr (kShared == Shared::kGroup) inverse = inverses[i];
      out[i] = ToFp8Piece<T>(bits[i], inverse, p.element);
    }
    if (scatters && dependency.Meet()) target = find_target();
    for (unsigned k = 0; k < top_k; ++k) {
      unsigned to = target;
      if (k >= 32 && valid) to = static_cast<unsigned>(__ldcg(slots + k));
      to = __shfl_sync(0xffffffffu, to, k % 32);
      if (to >= num_out_rows) continue;
      Fp8Piece<T>* out_row = values + static_cast<int64_t>(to) * row_pieces;
#pragma unroll
      for (int i = 0; i < kQuantPieces; ++i) {
        const unsigned piece = first + i * blockDim.x;
        if (piece < end) out_row[piece] = out[i];
      }
    }
    if (first < chunk_pieces) break;
    first -= chunk_pieces;
    LoadPieces(bits, x, first, blockDim.x, end);
  }
  dependency.Meet();
}

// Block: 128 x 128 elements, 16 rows of threads. Grid: blocks, those of a row of blocks together.
template <typename T>
__global__ void __launch_bounds__(16 * kGroupLanes<T>)
    QuantizeBlocksKernel(QuantizeParams p, unsigned row_pieces, unsigned row_blocks) {
  constexpr unsigned kLanes = kGroupLanes<T>;
  __shared__ unsigned shared[16 * kLanes / 32];
  GridDependencyWait();
  GridDependencyLaunch();

  const unsigned col_blocks = (row_pieces + kLanes - 1) / kLanes;
  const unsigned piece = blockIdx.x % col_blocks * kLanes + threadIdx.x % kLanes;
  const unsigned block_row = blockIdx.x / col_blocks;  // entry * row_blocks + row block
  const unsigned entry = block_row / row_blocks;
  const int64_t first = static_cast<int64_t>(block_row % row_blocks) * kQuantBlock;  // row of it
  const int64_t end = piece < row_pieces ? ValidRows(p) : 0;
  const int64_t offset = static_cast<int64_t>(entry) * p.rows * row_pieces + piece;
  const uint4* x = static_cast<const uint4*>(p.x) + offset;
  uint4 bits[kQuantBlockPieces];
#pragma unroll
  for (int i = 0; i < kQuantBlockPieces; ++i) {
    const int64_t row = first + i * 16 + threadIdx.x / kLanes;
    bits[i] = uint4{};
    if (row < end) bits[i] = __ldcg(x + row * row_pieces);
  }
  float scale;
  if (p.static_scales != nullptr) {
    scale = StaticScale(__ldcg(p.static_scales + blockIdx.x));
  } else {
    scale = DynamicScale(p, MaxOverWarps(LargestBits<T>(bits), 0, blockDim.x / 32, shared));
  }
  const float inverse = __frcp_rn(scale);
  if (threadIdx.x == 0) p.scales[blockIdx.x] = scale;
  Fp8Piece<T>* values = static_cast<Fp8Piece<T>*>(p.values) + offset;
#pragma unroll
  for (int i = 0; i < kQuantBlockPieces; ++i) {
    const int64_t row = first + i * 16 + threadIdx.x / kLanes;
    if (row < end) values[row * row_pieces] = ToFp8Piece<T>(bits[i], inverse, p.element);
  }
}

// A cluster an entry, whose pieces all lie in its registers. Rows stay where they are.
template <typename T>
__global__ void __launch_bounds__(kQuantMaxThreads)
    QuantizeTensorKernel(QuantizeParams p, unsigned row_pieces) {
  __shared__ unsigned shared[kQuantMaxThreads / 32];
  __shared__ unsigned largest_of_block;
  auto cluster = cooperative_groups::this_cluster();
  GridDependency dependency(p.early_x, p.lets_start);
  const unsigned num_blocks = cluster.num_blocks();
  const unsigned rank = cluster.block_rank();
  const unsigned entry = blockIdx.x / num_blocks;
  const unsigned end = static_cast<unsigned>(ValidRows(p)) * row_pieces;
  const unsigned stride = num_blocks * blockDim.x;
  const unsigned first = rank * blockDim.x + threadIdx.x;
  const int64_t offset = static_cast<int64_t>(entry) * p.rows * row_pieces;
  uint4 bits[kQuantPieces];
  LoadPieces(bits, static_cast<const uint4*>(p.x) + offset, first, stride, end);
  float scale;
  if (p.static_scales != nullptr) {
    scale = StaticScale(__ldcg(p.static_scales + entry));
  } else {
    unsigned largest = MaxOverWarps(LargestBits<T>(bits), 0, blockDim.x / 32, shared);
    if (num_blocks > 1) {
      if (threadIdx.x == 0) largest_of_block = largest;
      cluster.sync();
      const unsigned lane = threadIdx.x % 32;
      largest = lane < num_blocks ? *cluster.map_shared_rank(&largest_of_block, lane) : 0u;
      largest = __reduce_max_sync(0xffffffffu, largest);
      cluster.sync();  // no block leaves while another reads its shared memory
    }
    scale = DynamicScale(p, largest);
  }
  const float inverse = __frcp_rn(scale);
  if (first == 0) p.scales[entry] = scale;
  Fp8Piece<T>* values = static_cast<Fp8Piece<T>*>(p.values) + offset;
#pragma unroll
  for (int i = 0; i < kQuantPieces; ++i) {
    const unsigned piece = first + i * stride;
    if (piece < end) values[piece] = ToFp8Piece<T>(bits[i], inverse, p.element);
  }
  dependency.Meet();
}

// partial[entry, part] = largest finite |x| of every num_partials-th stretch of an entry. Block: a
// part. Grid: entries * num_partials.
template <typename T>
__global__ void __launch_bounds__(kQuantMaxThreadsOfParts, 2)
    QuantizeMaxKernel(QuantizeParams p, unsigned row_pieces, unsigned num_partials) {
  __shared__ unsigned shared[kQuantMaxThreadsOfParts / 32];
  GridDependency dependency(p.early_x, p.lets_start);
  const unsigned entry = blockIdx.x / num_partials;
  const unsigned part = blockIdx.x - entry * num_partials;
  const uint4* x = static_cast<const uint4*>(p.x) + entry * p.rows * row_pieces;
  const int64_t end = ValidRows(p) * row_pieces;
  const int64_t block_pieces = kQuantPieces * blockDim.x;
  unsigned largest = 0;
  for (int64_t at = part * block_pieces; at < end; at += num_partials * block_pieces) {
    uint4 bits[kQuantPieces];
    const int64_t left = end - at;
    LoadPieces(bits,
               x + at,
               threadIdx.x,
               blockDim.x,
               static_cast<unsigned>(left < block_pieces ? left : block_pieces));
    largest = max(largest, LargestBits<T>(bits));
  }
  largest = MaxOverWarps(largest, 0, blockDim.x / 32, shared);
  if (threadIdx.x == 0) p.partial[blockIdx.x] = __uint_as_float(largest);
  dependency.Meet();
}

}  // namespace jaxmoe
