"""Sizes of the scratch that calls of the products take."""

from jaxmoe.plan import plan_scratch_size


def gmm_scratch_size() -> int:
    """int32 elements of scratch of one grouped GEMM: its tile counter, padded to 16 bytes."""
    return 4


def mlp_index_size(num_rows: int, num_local_experts: int, one_kernel: bool) -> int:
    """int32 elements of the fused layer's index scratch; MlpIndex in csrc/gemm/moe_mlp.h."""

    def pad(count: int) -> int:
        return -(-count // 4) * 4

    plan_scratch = plan_scratch_size(1, num_rows, num_local_experts)
    of_rows = 3 if one_kernel else 2
    return 4 + pad(num_local_experts + 1) + of_rows * pad(num_rows) + plan_scratch
