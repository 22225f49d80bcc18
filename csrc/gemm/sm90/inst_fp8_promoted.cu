// Kernel instances: FP8, tokens of e4m3, promoted sums.
#include "csrc/gemm/sm90/formats/fp8_block.cuh"
#include "csrc/gemm/sm90/variants.cuh"

namespace jaxmoe {

VariantTable E4M3PromotedVariants() {
  return MakeVariants<Fp8Block<__nv_fp8_e4m3>, WeightLayout::kNK>();
}

VariantTable E5M2PromotedVariants() {
  return MakeVariants<Fp8Block<__nv_fp8_e5m2>, WeightLayout::kNK>();
}

}  // namespace jaxmoe
