// Kernel instances: nvfp4, tokens of fp16.
#include "csrc/gemm/sm90/formats/nvfp4.cuh"
#include "csrc/gemm/sm90/variants.cuh"

namespace jaxmoe {

VariantTable Nvfp4Fp16Variants() { return MakeVariants<Nvfp4<__half>, WeightLayout::kNK>(); }

}  // namespace jaxmoe
