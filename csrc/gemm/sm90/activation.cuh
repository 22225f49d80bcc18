// Device forms of the activations defined in jaxmoe/activation.py; float32 in, float32 out.
#pragma once

#include "csrc/gemm/moe_gemm.h"

namespace jaxmoe {

// min.NaN / max.NaN: a NaN must stay visible, fminf would hide it.
__device__ __forceinline__ float MinPropagateNan(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

__device__ __forceinline__ float MaxPropagateNan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// Each form maps (gate, up) to the output; ungated callers pass up = 1, for which the sigmoid form
// needs beta = 0 and a limit of infinity.

// 1 / x, of an x that is no denormal; infinity included. Plain division would scale x first, four
// instructions more.
__device__ __forceinline__ float Reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// 2 to the x. Without ftz results below 2^-126 would take three instructions more, and all of them
// are added to 1.
__device__ __forceinline__ float Exp2(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

__device__ __forceinline__ float SigmoidTimes(const ActivationParams& p,
                                              float gate,
                                              float slope,
                                              float up) {
  const float g = MinPropagateNan(gate, p.limit);
  const float u = MaxPropagateNan(MinPropagateNan(up, p.limit), -p.limit);
  constexpr float kLog2E = 1.4426950408889634f;
  // exp(-z) overflows to infinity for very negative z, where the quotient is 0 as it should be.
  return g * Reciprocal(1.0f + Exp2(g * (slope * -kLog2E))) * (u + p.beta);
}

// 1 / (1 + exp(-g)). exp overflows to infinity for very negative g, where that is 0 as it should
// be.
__device__ __forceinline__ float Sigmoid(float g) {
  return Reciprocal(1.0f + Exp2(g * -1.4426950408889634f));
}

// cap * tanh(x / cap), with a relative error below 1e-6. For small arguments its series: 1 - exp
// would cancel.
__device__ __forceinline__ float Softcap(float x, float cap) {
  const float z = x * Reciprocal(cap);
  const float s = z * z;
  if (s < 0.0625f) {
    float p = fmaf(s, 0.021869489f, -0.053968254f);
    p = fmaf(p, s, 0.13333334f);
    p = fmaf(p, s, -0.33333334f);
    return fmaf(p * s, x, x);
  }
  const float t = Exp2(fabsf(z) * -2.8853900817779268f);
  return copysignf(cap * (1.0f - t), x) * Reciprocal(1.0f + t);
}

// 1 - erf(x), with a relative error below 1e-5 in all of float32's range: a fit of Numerical
// Recipes (erfcc, section 6.2), in a third of erfcf's instructions.
__device__ __forceinline__ float Erfc(float x) {
  const float z = fabsf(x);
  const float t = Reciprocal(fmaf(0.5f, z, 1.0f));
  float p = 0.17087277f;
  p = fmaf(p, t, -0.82215223f);
  p = fmaf(p, t, 1.48851587f);
  p = fmaf(p, t, -1.13520398f);
  p = fmaf(p, t, 0.27886807f);
  p = fmaf(p, t, -0.18628806f);
  p = fmaf(p, t, 0.09678418f);
  p = fmaf(p, t, 0.37409196f);
  p = fmaf(p, t, 1.00002368f);
  p = fmaf(p, t, -1.26551223f);
  const float tail = t * __expf(fmaf(-z, z, p));
  return x >= 0.0f ? tail : 2.0f - tail;
}

__device__ __forceinline__ bool IsSilu(const ActivationParams& p) {
  return p.kind == ActivationParams::kSigmoid && p.c3 == 0.0f;
}

// g * sigmoid(c1 g) * (u + beta) after clamping: silu and (clamped) swiglu.
struct SiluForm {
  static __device__ __forceinline__ float Apply(const ActivationParams& p, float gate, float up) {
    return SigmoidTimes(p, gate, p.c1, up);
  }
};

struct Relu2Form {
  static __device__ __forceinline__ float Apply(const ActivationParams&, float gate, float) {
    const float r = MaxPropagateNan(gate, 0.0f);
    return r * r;
  }
};

// All of them, of several gates, which become the outputs, and their ups: a chain of dependent
// instructions each, so two take little longer than one.
struct OtherForm {
  template <int kCount>
  static __device__ __forceinline__ void Apply(const ActivationParams& p,
                                               float (&gate)[kCount],
                                               const float (&up)[kCount]) {
    const auto each = [&](const auto& form) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) gate[i] = form(gate[i], up[i]);
    };
    switch (p.kind) {
      case ActivationParams::kStep:
        return each([&](float g, float u) {
          return MinPropagateNan(g * Sigmoid(g), p.limit) *
                 MaxPropagateNan(MinPropagateNan(u, p.limit), -p.limit);
        });
      case ActivationParams::kSoftcap:
        return each(
            [&](float g, float u) { return Softcap(g, p.c1) * Sigmoid(g) * Softcap(u, p.c3); });
      case ActivationParams::kSigmoid:
        // c3 = 0 must not meet an infinite gate.
        return each([&](float g, float u) {
          return SigmoidTimes(p, g, p.c3 == 0.0f ? p.c1 : fmaf(p.c3 * g, g, p.c1), u);
        });
      case ActivationParams::kErf:
        // 1 + erf would cancel for negative gates.
        return each(
            [](float g, float u) { return 0.5f * g * Erfc(g * -0.70710678118654752f) * u; });
      case ActivationParams::kRelu:
        return each([](float g, float u) { return MaxPropagateNan(g, 0.0f) * u; });
      case ActivationParams::kRelu2:
        return each([&](float g, float u) { return Relu2Form::Apply(p, g, u) * u; });
      default:
        return each([](float g, float u) { return g * u; });
    }
  }
};

struct IdentityForm {
  static __device__ __forceinline__ float Apply(const ActivationParams&, float gate, float) {
    return gate;
  }
};

}  // namespace jaxmoe
