// Kernel instances: nvfp4.
#include "csrc/gemm/sm90/formats/nvfp4.cuh"
#include "csrc/gemm/sm90/variants.cuh"

namespace jaxmoe {

VariantTable Nvfp4Bf16Variants() { return MakeVariants<Nvfp4<__nv_bfloat16>, WeightLayout::kNK>(); }
VariantTable Nvfp4Fp16Variants() { return MakeVariants<Nvfp4<__half>, WeightLayout::kNK>(); }

}  // namespace jaxmoe
