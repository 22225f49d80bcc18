// The backward pass of the activation, 8 features of a token at a time; the epilogue of the down
// product's cotangent runs it.
#pragma once

#include "csrc/moe_gemm/activation.cuh"
#include "csrc/moe_gemm/args.h"

namespace jaxmoe {

// 8 features of a token: of z, then of its cotangent.
struct GateUpColumns {
  float weight;  // of the token
  uint4 gate;
  uint4 up;
};

__device__ __forceinline__ void Transpose2x2(float2& a, float2& b) {
  const float t = a.y;
  a.y = b.x;
  b.x = t;
}

// Of features 2 i and 2 i + 1: their gates and ups, or (interleaved) both of the one and of the
// other, become the cotangents of the same. Returns h; adds dh * h to `sum`.
template <class Form>
__device__ __forceinline__ float2 BackwardOfTwo(
    const MoeGemmArgs& args, float2 dh, float weight, float2& gate, float2& up, float& sum) {
  if (args.gradient.interleaved) Transpose2x2(gate, up);
  if (!args.gradient.gated) up = make_float2(1.0f, 1.0f);
  const Slopes a = Form::Differentiate(args.activation, gate.x, up.x);
  const Slopes b = Form::Differentiate(args.activation, gate.y, up.y);
  sum = fmaf(dh.x, a.y, fmaf(dh.y, b.y, sum));
  const float x = weight * dh.x;
  const float y = weight * dh.y;
  gate = make_float2(x * a.gate, y * b.gate);
  up = make_float2(x * a.up, y * b.up);
  if (args.gradient.interleaved) Transpose2x2(gate, up);
  return make_float2(a.y, b.y);
}

// z becomes dz, `weighted` z.weight * act(z); see ActivationGradient. Returns the sum of dh *
// act(z).
template <class Form, class Out>
__device__ __forceinline__ float Backward(
    const MoeGemmArgs& args, const Out& out, const uint4& dh, GateUpColumns& z, uint4& weighted) {
  float sum = 0.0f;
  // Interleaved, features 0 to 3 lie in z.gate and 4 to 7 in z.up.
  const bool interleaved = args.gradient.interleaved;
  const auto two = [&](uint32_t d, uint32_t& first, uint32_t& second) {
    float2 gate = out.Unpack2(first);
    float2 up = out.Unpack2(second);
    const float2 h = BackwardOfTwo<Form>(args, out.Unpack2(d), z.weight, gate, up, sum);
    first = out.Pack2(gate.x, gate.y);
    second = out.Pack2(up.x, up.y);
    return out.Pack2(z.weight * h.x, z.weight * h.y);
  };
  if (interleaved) {
    weighted.x = two(dh.x, z.gate.x, z.gate.y);
    weighted.y = two(dh.y, z.gate.z, z.gate.w);
    weighted.z = two(dh.z, z.up.x, z.up.y);
    weighted.w = two(dh.w, z.up.z, z.up.w);
  } else {
    weighted.x = two(dh.x, z.gate.x, z.up.x);
    weighted.y = two(dh.y, z.gate.y, z.up.y);
    weighted.z = two(dh.z, z.gate.z, z.up.z);
    weighted.w = two(dh.w, z.gate.w, z.up.w);
  }
  return sum;
}

}  // namespace jaxmoe
