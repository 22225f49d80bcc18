// Device code of round_tokens: rows to the numbers that a token format has for them.
//
// Problem: read C 16-bit floats of each of R rows once, find the largest finite |x| of what shares
//   a factor (a row, 32 or 16 neighbours), write C numbers of 16 bits, once or top_k times, and a
//   scale for each row. A piece is 16 bytes of x, 8 elements, and as many of its numbers.
// Threads: a row belongs to `warps` = ceil(pieces / 128) warps of one block, 4 pieces a thread, all
//   loaded before the first is used; short rows share a block, rows beyond 4096 pieces are read in
//   chunks. The 32 (16) floats of a group lie in 4 (2) neighbouring lanes; maxima of two pieces
//   share a word, so that 4 pieces take 4 (2) shuffles. A row: warp maximum, one barrier; of chunks
//   only the last is still in registers then, the others come from L2 again.
// In place: a thread reads a piece, for the last time, before it writes it, and no other thread
//   reads it later.
// Every read is from L2: a kernel that began early must not see what an SM has kept in L1.
// Bytes: 2 R C read and 2 R C written (k R C if rows go to k places), from and to L2 where they
//   fit: in place the intermediate has just been written, and the next kernel reads the numbers.
//   A row of one token takes a launch's time, of which the next kernel's weights hide a part.
//   Arithmetic: 5 instructions an element for e4m3, 7 and 10 with powers of two. Shared memory: 128
//   bytes.
#pragma once

#include "csrc/kernels/quantize.cuh"
#include "csrc/kernels/round_tokens.h"
#include "csrc/kernels/slot_plan.cuh"

namespace jaxmoe {

// What a piece is multiplied by, or kNvfp4 divided by, before it is rounded, and afterwards.
struct RoundFactors {
  float before;
  float after;
};

// Rounds to e4m3; saturates, NaN stays NaN.
__device__ __forceinline__ float2 RoundE4M3(float2 v) {
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(
      __nv_cvt_float2_to_fp8x2(v, __NV_SATFINITE, __NV_E4M3), __NV_E4M3)));
}

// Rounds to e2m1: to multiples of 0.5 below 2, of 1 below 4, of 2 up to 6, which is the largest.
// What is added has such a multiple as its last place.
__device__ __forceinline__ float RoundE2M1(float v) {
  constexpr unsigned kExponent = 0x7f800000u;
  const float magnitude = fminf(fabsf(v), 6.0f);
  const unsigned octave = max(__float_as_uint(magnitude) & kExponent, __float_as_uint(1.0f));
  const float big = __uint_as_float(octave + (22u << 23 | 1u << 22));  // 1.5 * 2^22 of it
  return copysignf(__fsub_rn(__fadd_rn(magnitude, big), big), v);
}

// The numbers of a piece.
template <typename T, TokenRule kRule>
__device__ __forceinline__ uint4 RoundPiece(uint4 bits, RoundFactors factors) {
  static_assert(kPieceSize<T> == 8);
  if constexpr (kRule == TokenRule::kNone) return bits;
  float v[8];
  Piece<T, 8>::Unpack(bits, v);
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    if constexpr (kRule == TokenRule::kE4M3 || kRule == TokenRule::kMxfp8) {
      const float2 y = RoundE4M3(make_float2(v[i] * factors.before, v[i + 1] * factors.before));
      v[i] = y.x;
      v[i + 1] = y.y;
    } else if constexpr (kRule == TokenRule::kMxfp4) {
      v[i] = RoundE2M1(v[i] * factors.before);
      v[i + 1] = RoundE2M1(v[i + 1] * factors.before);
    } else {
      v[i] = RoundE2M1(__fdiv_rn(v[i], factors.before));
      v[i + 1] = RoundE2M1(__fdiv_rn(v[i + 1], factors.before));
    }
    if constexpr (kRule != TokenRule::kE4M3) {
      v[i] *= factors.after;
      v[i + 1] *= factors.after;
    }
  }
  return Piece<T, 8>::Pack(v);
}

// The e4m3 bytes of a piece that is multiplied by `factor`, and the sum of their numbers.
template <typename T>
__device__ __forceinline__ uint2 RoundBytes(uint4 bits, float factor, float* sum) {
  float v[8];
  Piece<T, 8>::Unpack(bits, v);
  uint32_t pairs[4];
  float sums[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] = __nv_cvt_float2_to_fp8x2(
        make_float2(v[2 * i] * factor, v[2 * i + 1] * factor), __NV_SATFINITE, __NV_E4M3);
    const float2 y = __half22float2(__half2(
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pairs[i]), __NV_E4M3)));
    sums[i] = y.x + y.y;
  }
  *sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// Puts the 16 bytes of a lane with an even number and the next in the order of RoundTokensParams::
// codes: the lane's half of them. The whole warp calls it.
__device__ __forceinline__ uint2 InOrderOfCodes(uint2 bytes) {
  const bool odd = threadIdx.x % 2 != 0;
  const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? bytes.x : bytes.y, 1);
  const uint32_t first = odd ? other : bytes.x;   // of k 0 to 7 of the 16
  const uint32_t second = odd ? bytes.y : other;  // of k 8 to 15
  return make_uint2(__byte_perm(first, second, 0x5140), __byte_perm(first, second, 0x7362));
}

// Sums over 16 lanes of each of a thread's numbers: of number i in lanes 4 i to 4 i + 3. The whole
// warp calls it.
__device__ __forceinline__ float SumsOfSixteen(const float (&v)[kQuantPieces]) {
  static_assert(kQuantPieces == 4);
  const auto halved = [](float low, float high, unsigned offset) {
    const bool upper = (threadIdx.x & offset) != 0;
    return (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, offset);
  };
  float sum = halved(halved(v[0], v[2], 8), halved(v[1], v[3], 8), 4);
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  return sum + __shfl_xor_sync(0xffffffffu, sum, 1);
}

// Writes pieces of a row as bytes, and the sums, as SumsOfSixteen has them, behind them: see
// RoundTokensParams::codes.
__device__ __forceinline__ void StoreBytes(uint4* row,
                                           unsigned row_pieces,
                                           const uint2 (&bytes)[kQuantPieces],
                                           float sum,
                                           unsigned first,
                                           unsigned end) {
  uint2* const out = reinterpret_cast<uint2*>(row);
  auto* const behind = reinterpret_cast<__nv_bfloat16*>(out + row_pieces);
#pragma unroll
  for (int i = 0; i < kQuantPieces; ++i) {
    const unsigned piece = first + i * blockDim.x;
    if (piece < end) out[piece] = bytes[i];
  }
  const unsigned lane = threadIdx.x % 16;
  const unsigned piece = first - lane + lane / 4 * blockDim.x;
  if (lane % 4 != 0 || piece >= end) return;
  const unsigned step = piece / 16;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const __nv_bfloat16 rounded = __float2bfloat16(sum);
    behind[(step / kCodedSums * 2 + part) * kCodedSums + step % kCodedSums] = rounded;
    sum -= __bfloat162float(rounded);
  }
}

// Largest |x| of pairs of pieces, the first of a pair in the lower half of its word.
template <typename T, bool kOnlyFinite>
__device__ __forceinline__ void LargestOfPairs(const uint4 (&bits)[kQuantPieces],
                                               uint32_t (&words)[kQuantPieces / 2]) {
#pragma unroll
  for (int i = 0; i < kQuantPieces / 2; ++i) {
    const uint32_t a = Magnitude<T>::template OfPiece<kOnlyFinite>(bits[2 * i]);
    const uint32_t b = Magnitude<T>::template OfPiece<kOnlyFinite>(bits[2 * i + 1]);
    words[i] = __vmaxu2(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
  }
}

template <typename T, unsigned kLanes>
__device__ __forceinline__ void LargestOfLanes(uint32_t (&words)[kQuantPieces / 2]) {
#pragma unroll
  for (unsigned offset = kLanes / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (uint32_t& word : words) {
      word = Magnitude<T>::Max(word, __shfl_xor_sync(0xffffffffu, word, offset));
    }
  }
}

inline constexpr uint32_t kGroupIsNan = 0xffffu;

// Largest finite |x| of the group that each piece is in, as 16 bits; kGroupIsNan if NaN is there.
// A group is in kLanes lanes. The whole warp calls it.
template <typename T, unsigned kLanes>
__device__ __forceinline__ void LargestOfGroups(const uint4 (&bits)[kQuantPieces],
                                                uint32_t (&largest)[kQuantPieces]) {
  uint32_t words[kQuantPieces / 2];
  LargestOfPairs<T, false>(bits, words);
  LargestOfLanes<T, kLanes>(words);
  const bool finite = Magnitude<T>::AllFinite(words[0]) && Magnitude<T>::AllFinite(words[1]);
  if (__any_sync(0xffffffffu, !finite)) {  // rare
    uint32_t nan[kQuantPieces / 2];
#pragma unroll
    for (int i = 0; i < kQuantPieces / 2; ++i) {
      nan[i] = __vcmpgtu2(words[i], Magnitude<T>::kInfinity);
    }
    LargestOfPairs<T, true>(bits, words);
    LargestOfLanes<T, kLanes>(words);
#pragma unroll
    for (int i = 0; i < kQuantPieces / 2; ++i) words[i] |= nan[i];
  }
#pragma unroll
  for (int i = 0; i < kQuantPieces; ++i) largest[i] = words[i / 2] >> 16 * (i % 2) & 0xffffu;
}

// Factors of a group of bf16 whose elements have kTop as their largest exponent. That of the group
// is at most 127, so all powers but the smallest are normal numbers.
template <int kTop>
__device__ __forceinline__ RoundFactors PowersOfGroup(uint32_t largest) {
  const int exponent = max(static_cast<int>(largest >> 7) - kTop, 0);
  RoundFactors factors;
  factors.before = __int_as_float((254 - exponent) << 23);
  factors.after = __int_as_float(exponent == 0 ? 1 << 22 : exponent << 23);
  if (largest == kGroupIsNan) factors = {1.0f, __int_as_float(0x7fc00000)};
  return factors;
}

// Factors of a group whose row has this scale.
template <typename T>
__device__ __forceinline__ RoundFactors ScalesOfGroup(uint32_t largest, float scale) {
  const float most = __uint_as_float(Magnitude<T>::ToFloat(largest, 0));
  const float over = __fdiv_rn(__fdiv_rn(most, 6.0f), scale > 0.0f ? scale : 1.0f);
  RoundFactors factors;
  factors.after = RoundE4M3(make_float2(over, 0.0f)).x;
  if (largest == kGroupIsNan) factors.after = __int_as_float(0x7fc00000);
  const float step = factors.after * scale;
  factors.before = step == 0.0f ? 1.0f : step;
  return factors;
}

// Factors of each piece of a thread. `scale` is that of the row, if rows have one.
template <typename T, TokenRule kRule>
__device__ __forceinline__ void FactorsOfPieces(const uint4 (&bits)[kQuantPieces],
                                                float scale,
                                                RoundFactors (&factors)[kQuantPieces]) {
  if constexpr (kRule == TokenRule::kE4M3) {
#pragma unroll
    for (RoundFactors& f : factors) f = {__frcp_rn(scale), 1.0f};
  } else if constexpr (kRule != TokenRule::kNone) {
    uint32_t largest[kQuantPieces];
    LargestOfGroups<T, RoundedTogether(kRule) / 8>(bits, largest);
#pragma unroll
    for (int i = 0; i < kQuantPieces; ++i) {
      if constexpr (kRule == TokenRule::kMxfp4) factors[i] = PowersOfGroup<2>(largest[i]);
      if constexpr (kRule == TokenRule::kMxfp8) factors[i] = PowersOfGroup<8>(largest[i]);
      if constexpr (kRule == TokenRule::kNvfp4) factors[i] = ScalesOfGroup<T>(largest[i], scale);
    }
  }
}

// Rows that there are.
__device__ __forceinline__ int64_t NumRows(const RoundTokensParams& p) {
  if (p.group_offsets == nullptr) return p.rows;
  const int64_t count = __ldcg(p.group_offsets + p.num_groups);
  return count < 0 ? 0 : count < p.rows ? count : p.rows;
}

// The static scale of a row. Of its group: the number of those that end before it. The whole warp
// calls it for one row.
__device__ __forceinline__ float StaticScaleOf(const RoundTokensParams& p, unsigned row) {
  int group = 0;
  if (p.num_static > 1) {
    for (int g = threadIdx.x % 32; g < p.num_static - 1; g += 32) {
      group += __ldcg(p.group_offsets + g + 1) <= static_cast<int>(row);
    }
    group = __reduce_add_sync(0xffffffffu, group);
  }
  return StaticScale(__ldcg(p.static_scales + group));
}

// Lane k: the k-th place of a row, kQuantNoRow if it has none. The whole warp calls it.
__device__ __forceinline__ unsigned PlaceOf(const RoundTokensParams& p, unsigned row, bool valid) {
  const unsigned lane = threadIdx.x % 32;
  const unsigned top_k = static_cast<unsigned>(p.top_k);
  if (p.plans) {  // no place is past the last: -1 is the largest unsigned number
    const int place = SlotPlan(p.plan, static_cast<int>(lane)).row();
    const int mine = __shfl_sync(0xffffffffu, place, static_cast<int>(row * top_k + lane));
    return valid && lane < top_k ? static_cast<unsigned>(mine) : kQuantNoRow;
  }
  if (!valid || lane >= top_k) return kQuantNoRow;
  if (p.slot_to_row == nullptr) return row;
  return static_cast<unsigned>(__ldcg(p.slot_to_row + static_cast<int64_t>(row) * top_k + lane));
}

// Threads: x a multiple of 32, those of a row; y rows of the block. Grid: all rows.
template <typename T, TokenRule kRule, bool kCodes>
__global__ void __launch_bounds__(kQuantMaxThreads)
    RoundTokensKernel(const __grid_constant__ RoundTokensParams p,
                      unsigned row_pieces,
                      unsigned chunks) {
  __shared__ unsigned shared[kQuantMaxThreads / 32];
  constexpr bool kGiven = kRule == TokenRule::kNone;
  GridDependency dependency(p.early_x, p.lets_start);
  const unsigned row = blockIdx.x * blockDim.y + threadIdx.y;
  const bool valid = row < NumRows(p);
  const unsigned top_k = static_cast<unsigned>(p.top_k);
  const uint4* x = static_cast<const uint4*>(p.x) + static_cast<int64_t>(row) * row_pieces;
  const unsigned end = valid && p.numbers != nullptr ? row_pieces : 0u;
  const unsigned chunk_pieces = kQuantPieces * blockDim.x;
  unsigned first = (chunks - 1) * chunk_pieces + threadIdx.x;
  uint4 bits[kQuantPieces];
  unsigned largest = 0;
  const bool dynamic = kRule == TokenRule::kE4M3 && p.static_scales == nullptr;
  if (dynamic) {
    for (unsigned at = threadIdx.x; at < first; at += chunk_pieces) {
      LoadPieces(bits, x, at, blockDim.x, end);
      largest = max(largest, LargestBits<T>(bits));
    }
  }
  LoadPieces(bits, x, first, blockDim.x, end);
  dependency.Meet();
  unsigned place = kQuantNoRow;
  if (p.scatters || HasRowScales(kRule) || kGiven) place = PlaceOf(p, row, valid);
  const int32_t* slots = p.slot_to_row + static_cast<int64_t>(row) * top_k;
  const unsigned num_places = static_cast<unsigned>(p.num_out_rows);

  float scale = 1.0f;
  if constexpr (HasRowScales(kRule) || kGiven) {
    if constexpr (kGiven) {
      if (valid) scale = __ldcg(p.given_scales + (p.num_given == 1 ? 0 : row));
    } else if (dynamic) {
      const unsigned warps = blockDim.x / 32;
      largest = max(largest, LargestBits<T>(bits));
      largest = MaxOverWarps(largest, threadIdx.y * warps, warps, shared);
      scale = QuantScale(largest, kLargestE4M3);
    } else if (valid) {
      scale = StaticScaleOf(p, row);
    }
    if (valid) {
      for (unsigned k = threadIdx.x; k < top_k; k += blockDim.x) {
        const unsigned to = k < 32 ? place : static_cast<unsigned>(__ldcg(slots + k));
        if (to < num_places) p.scales[to] = scale;
      }
    }
  }

  // Calls write(the first piece of a row) for each place of this thread's row.
  const auto for_each_place = [&](const auto& write) {
    for (unsigned k = 0; k < (p.scatters ? top_k : 1u); ++k) {
      unsigned to = row;
      if (p.scatters) {
        to = place;
        if (k >= 32 && valid) to = static_cast<unsigned>(__ldcg(slots + k));
        to = __shfl_sync(0xffffffffu, to, k % 32);
        if (to >= num_places) continue;
      }
      write(static_cast<uint4*>(p.numbers) + static_cast<int64_t>(to) * row_pieces);
    }
  };
  if constexpr (kCodes) {  // there is one chunk
    const float too_much = threadIdx.x % 2 == 0 ? -8.0f * 0x1p-9f : 7.0f * 0x1p-9f;
    uint2 bytes[kQuantPieces];
    float sums[kQuantPieces];
    const float factor = __frcp_rn(scale);
#pragma unroll
    for (int i = 0; i < kQuantPieces; ++i) {
      bytes[i] = InOrderOfCodes(RoundBytes<T>(bits[i], factor, &sums[i]));
      sums[i] *= too_much;
    }
    const float sum = SumsOfSixteen(sums);
    __syncthreads();  // all of the row has been read, of which bytes take the place
    for_each_place([&](uint4* to) { StoreBytes(to, row_pieces, bytes, sum, first, end); });
  } else if (p.numbers != nullptr) {
    while (true) {
      RoundFactors factors[kQuantPieces];
      FactorsOfPieces<T, kRule>(bits, scale, factors);
#pragma unroll
      for (int i = 0; i < kQuantPieces; ++i) bits[i] = RoundPiece<T, kRule>(bits[i], factors[i]);
      for_each_place([&](uint4* to) {
#pragma unroll
        for (int i = 0; i < kQuantPieces; ++i) {
          const unsigned piece = first + i * blockDim.x;
          if (piece < end) to[piece] = bits[i];
        }
      });
      if (first < chunk_pieces) return;
      first -= chunk_pieces;
      LoadPieces(bits, x, first, blockDim.x, end);
    }
  }
}

}  // namespace jaxmoe
