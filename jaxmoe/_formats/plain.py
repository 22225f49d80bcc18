"""Plain weights: arrays in the dtype of the tokens, or float32 masters rounded to it."""

import dataclasses

from jaxmoe._formats.base import Format

PLAIN = Format("plain", code=0)

# Float32 weights: every product rounds them to the dtype of the tokens, and the gradient is the
# float32 sum of the product that makes it. The gradient of a rounded array would have its dtype.
MASTER = dataclasses.replace(PLAIN, name="master", composed=True, master=True)
