// Kernel instances: fp16, weights [E, N, K].
#include "csrc/gemm/sm90/formats/plain.cuh"
#include "csrc/gemm/sm90/variants.cuh"

namespace jaxmoe {

VariantTable Fp16NkVariants() { return MakeVariants<Plain<__half>, WeightLayout::kNK>(); }

}  // namespace jaxmoe
