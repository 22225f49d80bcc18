// Kernel instances: FP8, tokens of e4m3.
#include "csrc/gemm/sm90/formats/fp8.cuh"
#include "csrc/gemm/sm90/variants.cuh"

namespace jaxmoe {

VariantTable E4M3Variants() { return MakeVariants<Fp8<__nv_fp8_e4m3>, WeightLayout::kNK>(); }
VariantTable E5M2Variants() { return MakeVariants<Fp8<__nv_fp8_e5m2>, WeightLayout::kNK>(); }

}  // namespace jaxmoe
