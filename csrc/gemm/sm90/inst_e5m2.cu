// Kernel instances: e5m2 weights, e4m3 tokens.
#include "csrc/gemm/sm90/formats/fp8.cuh"
#include "csrc/gemm/sm90/variants.cuh"

namespace jaxmoe {

VariantTable E5M2Variants() { return MakeVariants<Fp8<__nv_fp8_e5m2>, WeightLayout::kNK>(); }

}  // namespace jaxmoe
