// Device forms of the activations defined in jaxmoe/activation.py; float32 in, float32 out.
#pragma once

#include "csrc/moe_gemm/moe_gemm.h"

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

// y = act(gate, up) and its derivatives.
struct Slopes {
  float y;
  float gate;
  float up;
};

// How much of a clamped value's cotangent passes: all inside, half on the bound, as JAX has it.
__device__ __forceinline__ float Passes(float inside) {
  return inside > 0.0f ? 1.0f : inside == 0.0f ? 0.5f : 0.0f;
}

// Each form maps (gate, up) to the output, or to it and its derivatives; ungated callers pass
// up = 1, for which the sigmoid form needs beta = 0 and a limit of infinity.

// 1 / x for x >= 1, infinity included. Plain division would scale x first, four instructions more.
__device__ __forceinline__ float Reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

__device__ __forceinline__ float SigmoidTimes(const ActivationParams& p,
                                              float gate,
                                              float slope,
                                              float up) {
  const float g = MinPropagateNan(gate, p.limit);
  const float u = MaxPropagateNan(MinPropagateNan(up, p.limit), -p.limit);
  // exp(-z) overflows to infinity for very negative z, where the quotient is 0 as it should be.
  return g * Reciprocal(1.0f + __expf(-g * slope)) * (u + p.beta);
}

// The same with derivatives; `rise` is the derivative of gate * slope.
__device__ __forceinline__ Slopes
SigmoidSlopes(const ActivationParams& p, float gate, float slope, float rise, float up) {
  const float g = MinPropagateNan(gate, p.limit);
  const float u = MaxPropagateNan(MinPropagateNan(up, p.limit), -p.limit) + p.beta;
  const float sigmoid = Reciprocal(1.0f + __expf(-g * slope));
  const float f = g * sigmoid;
  Slopes s{f * u, fmaf(f * rise, 1.0f - sigmoid, sigmoid) * u, f};
  if (p.limit < __int_as_float(0x7f800000)) {
    s.gate *= Passes(p.limit - gate);
    s.up *= Passes(p.limit - fabsf(up));
  }
  return s;
}

// g * sigmoid(c1 g) * (u + beta) after clamping: silu and (clamped) swiglu.
struct SiluForm {
  static __device__ __forceinline__ float Apply(const ActivationParams& p, float gate, float up) {
    return SigmoidTimes(p, gate, p.c1, up);
  }
};

// The same without clamps and offset, which are a third of the work.
struct PlainSiluForm {
  static __device__ __forceinline__ Slopes Differentiate(const ActivationParams& p,
                                                         float gate,
                                                         float up) {
    const float sigmoid = Reciprocal(1.0f + __expf(-gate * p.c1));
    const float f = gate * sigmoid;
    const float rise = f * p.c1;
    return {f * up, (fmaf(-rise, sigmoid, rise) + sigmoid) * up, f};
  }
};

struct OtherForm {
  static __device__ __forceinline__ float Apply(const ActivationParams& p, float gate, float up) {
    switch (p.kind) {
      case ActivationParams::kSigmoid:
        // c3 = 0 must not meet an infinite gate.
        return SigmoidTimes(p, gate, p.c3 == 0.0f ? p.c1 : fmaf(p.c3 * gate, gate, p.c1), up);
      case ActivationParams::kErf:
        // 1 + erf would cancel for negative gates.
        return 0.5f * gate * erfcf(gate * -0.70710678118654752f) * up;
      case ActivationParams::kRelu:
        return MaxPropagateNan(gate, 0.0f) * up;
      case ActivationParams::kRelu2: {
        const float r = MaxPropagateNan(gate, 0.0f);
        return r * r * up;
      }
      default:
        return gate * up;
    }
  }

  static __device__ __forceinline__ Slopes Differentiate(const ActivationParams& p,
                                                         float gate,
                                                         float up) {
    const float r = MaxPropagateNan(gate, 0.0f);
    switch (p.kind) {
      case ActivationParams::kSigmoid: {
        if (p.c3 == 0.0f) return SigmoidSlopes(p, gate, p.c1, p.c1, up);
        const float square = p.c3 * gate * gate;
        return SigmoidSlopes(p, gate, square + p.c1, 3.0f * square + p.c1, up);
      }
      case ActivationParams::kErf: {
        const float phi = 0.5f * erfcf(gate * -0.70710678118654752f);
        const float density = 0.39894228040143268f * __expf(-0.5f * gate * gate);
        return {gate * phi * up, fmaf(gate, density, phi) * up, gate * phi};
      }
      case ActivationParams::kRelu:
        return {r * up, gate > 0.0f ? up : 0.0f, r};
      case ActivationParams::kRelu2:
        return {r * r * up, 2.0f * r * up, r * r};
      default:
        return {gate * up, up, gate};
    }
  }
};

struct IdentityForm {
  static __device__ __forceinline__ float Apply(const ActivationParams&, float gate, float) {
    return gate;
  }
};

}  // namespace jaxmoe
