// Kernel instances: bf16, weights [E, K, N].
#include "csrc/gemm/sm90/kernel.cuh"

namespace jaxmoe {

VariantTable Bf16KnVariants() {
  return MakeVariants<Operands<__nv_bfloat16>, cute::SM90::GMMA::Major::MN>(DType::kBFloat16,
                                                                            WeightLayout::kKN);
}

}  // namespace jaxmoe
