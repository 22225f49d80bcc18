// Kernel instances: fp16, weights [E, K, N].
#include "csrc/gemm/sm90/kernel.cuh"

namespace jaxmoe {

VariantTable Fp16KnVariants() {
  return MakeVariants<Operands<__half>, cute::SM90::GMMA::Major::MN>(DType::kFloat16,
                                                                     WeightLayout::kKN);
}

}  // namespace jaxmoe
