// Kernel instances: fp16, weights [E, K, N].
#include "csrc/gemm/sm90/formats/plain.cuh"
#include "csrc/gemm/sm90/variants.cuh"

namespace jaxmoe {

VariantTable Fp16KnVariants() { return MakeVariants<Plain<__half>, WeightLayout::kKN>(); }

}  // namespace jaxmoe
