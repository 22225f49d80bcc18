"""Floors: the least time a device could need for the bytes and operations of a call."""

import dataclasses

from benchmarks.models import BYTES, Layer, expert_bytes, experts_used, layer_bytes


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """Rates that a device has reached: bytes per second, and FLOP per second by scheme."""

    bytes_per_s: float
    flops: dict[str, float]

    def flops_per_s(self, scheme: str) -> float:
        """The rate of a scheme; packed weights are multiplied as bf16."""
        return self.flops.get(scheme, self.flops["bf16"])


# Read on the card itself with large copies and cuBLAS products of random data, not a datasheet;
# fp8 under load, as both reach 1580 TFLOP/s for some milliseconds.
CEILINGS: dict[str, Ceiling] = {
    "NVIDIA H200": Ceiling(4.3e12, {"bf16": 780e12, "f16": 780e12, "fp8": 1350e12}),
    "NVIDIA H100 80GB HBM3": Ceiling(3.0e12, {"bf16": 780e12, "f16": 780e12, "fp8": 1350e12}),
}


@dataclasses.dataclass(frozen=True)
class Work:
    """The least work of one call.

    Attributes:
      flops: 2 per multiply-add of the matrix products.
      weight_bytes: weights of the experts that have at least one row, read once.
      activation_bytes: inputs read once and outputs written once.
    """

    flops: float
    weight_bytes: float
    activation_bytes: float

    def floor_us(self, ceiling: Ceiling | None, scheme: str = "bf16") -> float | None:
        """Microseconds no version can beat by much; None without known ceilings."""
        if ceiling is None:
            return None
        memory_s = (self.weight_bytes + self.activation_bytes) / ceiling.bytes_per_s
        return max(memory_s, self.flops / ceiling.flops_per_s(scheme)) * 1e6

    def compute_heavy(self, ceiling: Ceiling | None, scheme: str = "bf16") -> bool:
        """Whether arithmetic needs at least half as long as memory: enough for the power cap."""
        if ceiling is None:
            return False
        memory_s = (self.weight_bytes + self.activation_bytes) / ceiling.bytes_per_s
        return self.flops / ceiling.flops_per_s(scheme) >= 0.5 * memory_s


def expected_hit(model: Layer, num_tokens: int, skew: str = "uniform") -> float:
    """Mean number of experts with at least one row when tokens draw evenly from those in use."""
    used = experts_used(model, skew)
    missed = (1 - model.top_k / used) ** num_tokens
    return used * (1 - missed)


def layer(model: Layer, num_tokens: int, experts_hit: float, scheme: str = "bf16") -> Work:
    """The whole layer: x in, y out, both in bf16; everything between stays on the chip."""
    rows = num_tokens * model.top_k
    return Work(
        flops=2.0 * rows * model.hidden * (model.width + model.intermediate),
        weight_bytes=experts_hit * expert_bytes(model, scheme),
        activation_bytes=2.0 * num_tokens * model.hidden * BYTES,
    )


def training(model: Layer, num_tokens: int, experts_hit: float) -> Work:
    """Forward and backward: x and the cotangent in, y and dx out; weights read in both passes.

    The gradients of all weights are written, zeros where an expert has no row. Each product of the
    forward pass has two in the backward pass. What the passes share costs nothing.
    """
    forward = layer(model, num_tokens, experts_hit)
    return Work(
        flops=3.0 * forward.flops,
        weight_bytes=2.0 * forward.weight_bytes + layer_bytes(model),
        activation_bytes=4.0 * num_tokens * model.hidden * BYTES,
    )


def grouped_gemm(num_rows: int, k: int, n: int, experts_hit: float) -> Work:
    """Rows [R, K] in, rows [R, N] out, one [K, N] matrix per expert hit."""
    return Work(
        flops=2.0 * num_rows * k * n,
        weight_bytes=experts_hit * k * n * BYTES,
        activation_bytes=float(num_rows * (k + n) * BYTES),
    )


def grouped_gemm_training(
    num_rows: int, k: int, n: int, experts_hit: float, num_experts: int
) -> Work:
    """The product and both gradients: its rows and their cotangents in, their gradients out.

    Matrices are read in both passes, the gradients of all of them written.
    """
    forward = grouped_gemm(num_rows, k, n, experts_hit)
    return Work(
        flops=3.0 * forward.flops,
        weight_bytes=2.0 * forward.weight_bytes + float(num_experts * k * n * BYTES),
        activation_bytes=2.0 * forward.activation_bytes,
    )


def route(num_tokens: int, num_experts: int, top_k: int) -> Work:
    """Float32 logits in, ids and weights out."""
    return Work(0.0, 0.0, 4.0 * num_tokens * (num_experts + 2 * top_k))


def plan(num_tokens: int, top_k: int, num_experts: int) -> Work:
    """Ids in; offsets, row_to_token and slot_to_row out."""
    return Work(0.0, 0.0, 4.0 * (3 * num_tokens * top_k + num_experts + 1))


def permute(num_tokens: int, top_k: int, hidden: int) -> Work:
    """Tokens in, K copies of each out, indices in."""
    rows = num_tokens * top_k
    return Work(0.0, 0.0, float((num_tokens + rows) * hidden * BYTES + 4 * rows))


def quantize(rows: int, cols: int, num_scales: int) -> Work:
    """Rows in, a byte for each element and the float32 scales out."""
    return Work(0.0, 0.0, float(rows * cols * (BYTES + 1) + 4 * num_scales))


def finalize(num_tokens: int, top_k: int, hidden: int) -> Work:
    """K rows per token in, one out, indices and weights in."""
    rows = num_tokens * top_k
    return Work(0.0, 0.0, float((num_tokens + rows) * hidden * BYTES + 8 * rows))
