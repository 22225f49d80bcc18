// Kernel instances: bf16, weights [E, N, K].
#include "csrc/gemm/sm90/kernel.cuh"

namespace jaxmoe {

VariantTable Bf16NkVariants() {
  return MakeVariants<Operands<__nv_bfloat16>, cute::SM90::GMMA::Major::K>(DType::kBFloat16,
                                                                           WeightLayout::kNK);
}

}  // namespace jaxmoe
