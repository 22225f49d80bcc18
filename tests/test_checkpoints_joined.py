"""Gate and up of packed formats as one array: the numbers of both."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import checkpoints
from jaxmoe._testing import assert_equal

E, I, H = 2, 64, 128  # noqa: E741
SHARED = ("nvfp4", "int4_g128", "int4_channel_zp")  # one number for each expert, beside the values


def halves(format, layout="nk", factor=0.25):
    """Two arrays, whose scales are the same where those of both must be."""
    rng = np.random.default_rng(0)
    shape = (E, I, H) if layout == "nk" else (E, H, I)
    w = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) * f for f in (1, factor)]
    gate, up = (jaxmoe.quantize(a, format, weight_layout=layout) for a in w)
    return gate, dataclasses.replace(up, scales=gate.scales) if format in SHARED else up


def numbers(q):
    return np.asarray(jaxmoe.dequantize(q, dtype=jnp.float32))


@pytest.mark.parametrize("layout", ("nk", "kn"))
@pytest.mark.parametrize("format", ("mxfp4", "mxfp8", "int8_channel", *SHARED))
def test_no_number_changes(format, layout):
    gate, up = halves(format, layout)
    q = jax.jit(checkpoints.join_gate_up)(gate, up)
    assert (q.format, q.layout, q.dtype) == (format, layout, gate.dtype)
    want = np.concatenate([numbers(gate), numbers(up)], axis=1 if layout == "nk" else 2)
    assert_equal(numbers(q), want)


def test_exponents_of_other_scales():
    """FlashInfer's global scales may be no powers of two, and the exponents beyond a byte."""
    gate, up = halves("mxfp4")
    gate, up = (dataclasses.replace(q, scales=q.scales * 1.5) for q in (gate, up))
    want = np.concatenate([numbers(gate), numbers(up)], axis=1)
    assert_equal(numbers(checkpoints.join_gate_up(gate, up)), want)
    w = jnp.ones((E, I, H), jnp.bfloat16).at[:, ::2].set(2.0**-20)
    tiny = dataclasses.replace(
        jaxmoe.quantize(w, "mxfp4", weight_layout="nk"), scales=jnp.full(E, 1.5 * 2.0**-126)
    )
    got = numbers(checkpoints.join_gate_up(gate, tiny))
    assert_equal(got[:, :I], want[:, :I])
    assert np.abs(got[:, I:]).max() < 2.0**-110


@pytest.mark.parametrize("format", ("mxfp4", *SHARED))
def test_scales_that_are_not_the_same(format):
    gate, up = halves(format)
    up = dataclasses.replace(up, scales=gate.scales * jnp.array([1.0, 1.5]))
    same = "the same times a power of two" if format == "mxfp4" else "the same"
    message = rf"join_gate_up: gate.scales\[1\]=.* and up.scales\[1\]=.* must be {same} in {format}"
    with pytest.raises(ValueError, match=message):
        checkpoints.join_gate_up(gate, up)
    traced = numbers(jax.jit(checkpoints.join_gate_up)(gate, up))
    assert np.isfinite(traced[0]).all() and np.isnan(traced[1]).all()


def test_tokens_are_refused():
    tokens = jaxmoe.quantize_tokens(jnp.ones((2, 32)), "mxfp4")
    with pytest.raises(ValueError, match="gate must be weights in fp8_tensor or .* not mxfp4 of l"):
        checkpoints.join_gate_up(tokens, tokens)
