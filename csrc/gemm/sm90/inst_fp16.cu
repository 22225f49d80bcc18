// Kernel instances: fp16.
#include "csrc/gemm/sm90/formats/plain.cuh"
#include "csrc/gemm/sm90/variants.cuh"

namespace jaxmoe {

VariantTable Fp16KnVariants() { return MakeVariants<Plain<__half>, WeightLayout::kKN>(); }
VariantTable Fp16NkVariants() { return MakeVariants<Plain<__half>, WeightLayout::kNK>(); }

}  // namespace jaxmoe
