// Kernel instances: fp16, weights [E, N, K].
#include "csrc/gemm/sm90/kernel.cuh"

namespace jaxmoe {

VariantTable Fp16NkVariants() {
  return MakeVariants<Operands<__half>, cute::SM90::GMMA::Major::K>(DType::kFloat16,
                                                                    WeightLayout::kNK);
}

}  // namespace jaxmoe
