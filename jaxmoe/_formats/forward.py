"""Plain weights whose value is computed in another format: quantized forward, plain gradients.

Tangents and gradients are those of the plain layer, in which rounding is the identity (the
straight-through estimator, https://arxiv.org/abs/1308.3432).
"""

import dataclasses
from typing import Any

from jaxmoe._formats.base import Format, Gradient


@dataclasses.dataclass(frozen=True)
class Forward(Format):
    """Weights that the program quantizes.

    Attributes:
      inner: the format of the value.
    """

    inner: Format = Format("plain")

    def refused_input(self, dtype: Any) -> str | None:
        """Weights are quantized in the dtype of the tokens."""
        refused = self.inner.refused_dtype(dtype)
        return None if refused is None else f"{refused} (experts.forward_format)"


def forward(inner: Format) -> Forward:
    """The format of plain weights whose value is computed in `inner`."""
    return Forward(
        f"forward_{inner.name}",
        composed=True,
        expands=True,
        gradient=Gradient(straight_through=True),
        inner=inner,
    )
