// Kernel instances: nvfp4, tokens of bf16.
#include "csrc/gemm/sm90/formats/nvfp4.cuh"
#include "csrc/gemm/sm90/variants.cuh"

namespace jaxmoe {

VariantTable Nvfp4Bf16Variants() { return MakeVariants<Nvfp4<__nv_bfloat16>, WeightLayout::kNK>(); }

}  // namespace jaxmoe
