"""Activations: numbers, names, constants for the kernels, special values, refusals."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxmoe._codes import Choice
from jaxmoe.activation import (
    ACTIVATIONS,
    ERF,
    IDENTITY,
    RELU,
    RELU2,
    SIGMOID,
    SOFTCAP,
    STEP,
    Activation,
    SoftcapSwiglu,
    Swiglu,
    SwigluStep,
    resolve,
    split_gate_up,
)

GPT_OSS = Swiglu(alpha=1.702, beta=1.0, limit=7.0)
ALL = {
    **ACTIVATIONS,
    "gpt_oss": GPT_OSS,
    "step": SwigluStep(0.7),
    "softcap": SoftcapSwiglu(2.0, 1.5),
}


def _apply(activation, gate, up=3.0):
    gate = jnp.asarray(gate, jnp.float32)
    if not activation.gated:
        return activation(gate)
    return activation(gate, jnp.broadcast_to(jnp.asarray(up, jnp.float32), gate.shape))


@pytest.mark.parametrize(
    ("name", "at_1", "at_minus_2"),
    [
        # sigmoid(1) = 0.7310586, sigmoid(-2) = 0.1192029; Phi(1) = 0.8413447, Phi(-2) = 0.0227501
        ("silu", 0.7310586, -0.2384058),
        ("gelu", 0.8413447, -0.0455003),
        # of the tanh form: half of 1 + tanh(0.7978846 * 1.044715) and so on
        ("gelu_tanh", 0.8411920, -0.0454023),
        ("relu", 1.0, 0.0),
        ("relu2", 1.0, 0.0),
        ("identity", 1.0, -2.0),
        ("swiglu", 3 * 0.7310586, 3 * -0.2384058),
        ("geglu", 3 * 0.8413447, 3 * -0.0455003),
        ("geglu_tanh", 3 * 0.8411920, 3 * -0.0454023),
        # sigmoid(1.702) = 0.8457959, -2 * sigmoid(-3.404) = -0.0643414, and up + 1 = 4
        ("gpt_oss", 4 * 0.8457959, 4 * -0.0643414),
        # the lesser of 0.7310586 and the limit 0.7; 3 is clipped to it
        ("step", 0.7 * 0.7, 0.7 * -0.2384058),
        # 2 tanh(1 / 2) = 0.9242343, 2 tanh(-1) = -1.5231883, 1.5 tanh(2) = 1.4460414
        ("softcap", 1.4460414 * 0.9242343 * 0.7310586, 1.4460414 * -1.5231883 * 0.1192029),
    ],
)
def test_numbers(name, at_1, at_minus_2):
    np.testing.assert_allclose(_apply(ALL[name], [1.0, -2.0]), [at_1, at_minus_2], rtol=1e-5)


def test_relu2_squares():
    np.testing.assert_array_equal(_apply(resolve("relu2"), [3.0, -3.0]), [9.0, 0.0])


def test_clamp():
    # g = min(10, 7), u = max(-10, -7): 7 * sigmoid(1.702 * 7) * (-7 + 1); a low gate is not clamped
    y = GPT_OSS(jnp.array([10.0, -10.0]), jnp.array([-10.0, 10.0]))
    low = -10 / (1 + math.exp(17.02)) * 8
    np.testing.assert_allclose(y, [-42 / (1 + math.exp(-11.914)), low], rtol=1e-5)


def test_a_step_clamps_after_silu():
    """Unlike Swiglu, whose limit of 0.8 would make 0.8 sigmoid(0.8) of a gate of 5."""
    y = SwigluStep(0.8)(jnp.array([5.0, 0.5, -5.0]), jnp.array([0.1, -9.0, 9.0]))
    want = [0.8 * 0.1, 0.5 / (1 + math.exp(-0.5)) * -0.8, -5 / (1 + math.exp(5)) * 0.8]
    np.testing.assert_allclose(y, want, rtol=1e-6)
    g, u = jnp.linspace(-8, 8, 33), jnp.linspace(-2, 2, 33)
    np.testing.assert_allclose(SwigluStep(math.inf)(g, u), Swiglu()(g, u), rtol=1e-6)


def test_equal_constants_are_one_activation():
    assert SoftcapSwiglu(4.0, 25.0) == SoftcapSwiglu(4, np.float32(25)) != SoftcapSwiglu(4, 24)
    assert SwigluStep(7) == SwigluStep(np.float32(7)) != SwigluStep(8)
    assert hash(SwigluStep(7)) == hash(SwigluStep(7.0))


def step_in_float64(limit):
    return lambda g, u: np.minimum(g / (1 + np.exp(-g)), limit) * np.clip(u, -limit, limit)


def softcap_in_float64(a, b):
    return lambda g, u: a * np.tanh(g / a) / (1 + np.exp(-g)) * b * np.tanh(u / b)


IN_FLOAT64 = {
    SwigluStep(7.0): step_in_float64(7.0),
    SwigluStep(0.3): step_in_float64(0.3),
    SoftcapSwiglu(4.0, 25.0): softcap_in_float64(4.0, 25.0),
    SoftcapSwiglu(1.5, 0.2): softcap_in_float64(1.5, 0.2),
    SoftcapSwiglu(1e6, 1e-6): softcap_in_float64(1e6, 1e-6),
}


@pytest.mark.parametrize("activation", IN_FLOAT64, ids=str)
def test_every_digit_of_every_size(activation):
    """A relative error below 1e-6, of arguments for which 1 - exp would cancel too."""
    sizes = np.concatenate([np.logspace(-12, 38, 101), np.linspace(0.01, 15, 300)])
    values = np.concatenate([[0.0], sizes, -sizes]).astype(np.float32)
    g, u = np.meshgrid(values, values)
    with np.errstate(over="ignore"):
        want = IN_FLOAT64[activation](g.astype(np.float64), u.astype(np.float64))
    # The least product of two sizes is 1e-24; below 1e-30 there is what exp(-g) has left of g.
    np.testing.assert_allclose(jax.jit(activation)(g, u), want, rtol=1e-6, atol=1e-30)


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("activation", "ups", "of_infinity", "of_minus_infinity"),
    [
        (SwigluStep(0.5), {1.0: 0.5, INF: 0.5, -INF: -0.5, NAN: NAN}, 0.5, NAN),  # as silu has it
        (SoftcapSwiglu(4.0, 2.0), {1e20: 2.0, INF: 2.0, -INF: -2.0, NAN: NAN}, 4.0, 0.0),
    ],
    ids=("step", "softcap"),
)
def test_infinity_and_nan(activation, ups, of_infinity, of_minus_infinity):
    for up, factor in ups.items():
        y = activation(jnp.array([INF, -INF, NAN]), jnp.full(3, up))
        want = np.array([of_infinity, of_minus_infinity, NAN]) * factor
        np.testing.assert_array_equal(y, want)


def test_gradients_beyond_the_bounds_are_zero():
    """Of what a clamp or tanh holds at its bound, and no NaN from what it holds back."""
    for activation in (SwigluStep(0.5), SoftcapSwiglu(4.0, 2.0)):
        gradient = jax.grad(lambda g, u, act=activation: act(g, u).sum(), (0, 1))
        huge = jnp.array([40.0, 1e20, 3e38])
        for sign in (1, -1):
            of_gate, of_up = gradient(huge, sign * huge)
            np.testing.assert_array_equal(of_gate, np.zeros(3))
            np.testing.assert_array_equal(of_up, np.zeros(3))


def test_gradient_of_a_soft_cap():
    """In closed form: (1 - t^2) s + c t s (1 - s) with t = tanh(g / c) and s = sigmoid(g)."""
    g, c, u = np.linspace(-9, 9, 61), 4.0, 0.7
    t, s = np.tanh(g / c), 1 / (1 + np.exp(-g))
    want = ((1 - t * t) * s + c * t * s * (1 - s)) * 25 * np.tanh(u / 25)
    got = jax.vmap(jax.grad(SoftcapSwiglu(c, 25)), (0, None))(jnp.float32(g), jnp.float32(u))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_plain_swiglu_is_the_named_one():
    assert Swiglu().kernel_params() == resolve("swiglu").kernel_params()
    assert Swiglu(1.702, 1, np.float32(7)) == GPT_OSS
    assert hash(Swiglu(1.702, 1.0, 7.0)) == hash(GPT_OSS)
    assert Swiglu(1.702, 1.0, 8.0) != GPT_OSS


@pytest.mark.parametrize("name", ALL)
def test_kernel_constants_give_the_same_function(name):
    """Recomputes the activation in float64 from what a kernel is given."""
    params = ALL[name].kernel_params()
    assert {k: type(v) for k, v in params.items()} == {
        "kind": Choice,
        **dict.fromkeys(("c1", "c3", "limit", "beta"), np.float32),
    }
    c1, c3, limit, beta = (float(params[k]) for k in ("c1", "c3", "limit", "beta"))
    g = np.linspace(-9, 9, 37)
    u = np.linspace(12, -12, 37)
    x = np.minimum(g, limit)
    f = {
        SIGMOID: lambda: x / (1 + np.exp(-x * (c1 + c3 * x * x))),
        ERF: lambda: x * 0.5 * (1 + np.array([math.erf(v / math.sqrt(2)) for v in x])),
        RELU: lambda: np.maximum(x, 0),
        RELU2: lambda: np.maximum(x, 0) ** 2,
        IDENTITY: lambda: x,
        STEP: lambda: np.minimum(g / (1 + np.exp(-g)), limit),
        SOFTCAP: lambda: c1 * np.tanh(g / c1) / (1 + np.exp(-g)),
    }[params["kind"]]()
    factor = c3 * np.tanh(u / c3) if params["kind"] == SOFTCAP else np.clip(u, -limit, limit) + beta
    want = f * factor if ALL[name].gated else f
    np.testing.assert_allclose(_apply(ALL[name], g, u), want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("silu", jax.nn.silu),
        ("gelu", lambda x: jax.nn.gelu(x, approximate=False)),
        ("gelu_tanh", lambda x: jax.nn.gelu(x, approximate=True)),
        ("relu", jax.nn.relu),
    ],
)
def test_same_as_jax(name, reference):
    x = jnp.linspace(-20.0, 20.0, 401)
    np.testing.assert_allclose(_apply(resolve(name), x), reference(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_nan_stays_nan_and_stays_alone(name):
    activation = ALL[name]
    assert np.array_equal(np.isnan(_apply(activation, [1.0, np.nan])), [False, True])
    if activation.gated:
        assert np.array_equal(
            np.isnan(_apply(activation, [1.0, 1.0], [np.nan, 1.0])), [True, False]
        )


@pytest.mark.parametrize("name", ALL)
def test_large_gates_are_finite(name):
    """|g| > 1.8e19 squares to infinity, which must not meet a coefficient of 0."""
    y = _apply(ALL[name], [1e20, -1e20], 1e-3)
    if ALL[name].kind == RELU2:  # the exact value is infinite
        np.testing.assert_array_equal(y, [np.inf, 0.0])
    else:
        assert np.isfinite(y).all()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_keeps_the_dtype(name, dtype):
    gate = jnp.linspace(-3, 3, 8, dtype=dtype)
    y = ALL[name](gate, gate) if ALL[name].gated else ALL[name](gate)
    assert y.dtype == dtype
    np.testing.assert_allclose(
        y.astype(jnp.float32),
        _apply(ALL[name], gate.astype(jnp.float32), gate.astype(jnp.float32)),
        rtol=0.05,
        atol=0.02,  # bfloat16 has 8 bits, and a formula rounds up to six times
    )


@pytest.mark.parametrize("name", ALL)
def test_gradients(name):
    gate = jnp.array([-3.0, -0.7, 0.4, 2.5])  # away from the corners of relu and of the clamp
    args = (gate, gate[::-1] + 0.1) if ALL[name].gated else (gate,)
    check_grads(ALL[name], args, order=2, atol=2e-2, rtol=2e-2, eps=1e-2)


def test_split_gate_up():
    h = jnp.arange(12.0).reshape(2, 6)
    for order, gate, up in (
        ("gate_up", [0, 1, 2], [3, 4, 5]),
        ("up_gate", [3, 4, 5], [0, 1, 2]),
        ("interleaved", [0, 2, 4], [1, 3, 5]),
    ):
        got = split_gate_up(h, order)
        np.testing.assert_array_equal(got[0][0], gate)
        np.testing.assert_array_equal(got[1][0], up)


def test_resolve_takes_names_and_instances():
    assert resolve("geglu").name == "geglu"
    assert resolve(GPT_OSS) is GPT_OSS
    assert isinstance(GPT_OSS, Activation)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: resolve("swish"),
            ValueError,
            r"jaxmoe\.moe_mlp: activation='swish' must be one of swiglu, .*, Swiglu\(alpha",
        ),
        (
            lambda: resolve(7),
            TypeError,
            r"activation must be one of swiglu, .*\. Got activation: 7\.",
        ),
        (
            lambda: resolve("swiglu")(jnp.ones(2)),
            TypeError,
            r"swiglu needs up\. Got up: None",
        ),
        (
            lambda: resolve("silu")(jnp.ones(2), jnp.ones(2)),
            TypeError,
            r"silu does not take up\. Got up: f32\[2\]",
        ),
        (
            lambda: split_gate_up(jnp.ones((1, 2)), "gateup"),
            ValueError,
            r"gate_up='gateup' must be one of gate_up, up_gate, interleaved",
        ),
        (lambda: Swiglu(alpha=math.inf), ValueError, r"jaxmoe\.Swiglu: alpha=inf must be finite"),
        (lambda: Swiglu(limit=math.nan), ValueError, r"limit=nan must be finite"),
        (lambda: Swiglu(limit=0.0), ValueError, r"limit=0\.0 must be positive"),
        (lambda: SwigluStep(-1), ValueError, r"jaxmoe\.SwigluStep: limit=-1 must be positive"),
        (lambda: SwigluStep("7"), TypeError, r"limit must be a Python number .* Got limit: '7'"),
        (lambda: SoftcapSwiglu(0, 1), ValueError, r"SoftcapSwiglu: gate_cap=0 must be positive"),
        (lambda: SoftcapSwiglu(1, math.inf), ValueError, r"up_cap=inf must be finite"),
        (
            lambda: SoftcapSwiglu(1e39, 1),
            ValueError,
            r"gate_cap=1e\+39 must be from 1e-06 to ",
        ),
        (lambda: SoftcapSwiglu(1, 1e-7), ValueError, r"up_cap=1e-07 must be from 1e-06 to 1e\+06"),
        (
            lambda: jax.jit(lambda a: Swiglu(alpha=a)(a, a))(jnp.ones(())),
            TypeError,
            r"alpha must be a Python number known at trace time\. Got alpha: f32\[\]",
        ),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    (
        ({"kind": 9}, ValueError, "kind=9 must"),
        ({"kind": 0, "c1": np.inf}, ValueError, "c1=inf.*must be finite"),
        ({"kind": 1, "limit": 7.0}, NotImplementedError, "limit=7.0 and beta=0.0 are there for"),
        ({"kind": 4, "beta": 1.0}, NotImplementedError, "limit=inf and beta=1.0 are there for"),
        ({"kind": STEP, "beta": 1.0}, NotImplementedError, "limit=inf and beta=1.0 are there"),
        ({"kind": SOFTCAP, "c1": 1.0, "c3": 0.0}, ValueError, "c3=0.0, the caps, must be from"),
        ({"kind": SOFTCAP, "c1": 2e6, "c3": 1.0}, ValueError, "c1=2000000.0 and c3=1.0, the caps,"),
        ({"kind": SOFTCAP, "limit": 7.0}, NotImplementedError, "limit=7.0 and beta=0.0 are there"),
        ({"kind": SOFTCAP, "gated": False}, NotImplementedError, "kind=softcap needs gated=True"),
        ({"kind": SIGMOID, "limit": np.nan}, ValueError, "limit=nan must be positive"),
        ({"kind": STEP, "limit": -7.0}, ValueError, "limit=-7.0 must be positive"),
        ({"kind": STEP, "gated": False}, NotImplementedError, "kind=step needs gated=True"),
    ),
)
def test_formulas_that_no_kernel_has_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        Activation("mine", **{"gated": True} | arguments)


def test_limit_needs_a_gate():
    with pytest.raises(NotImplementedError, match="gated SIGMOID only"):
        Activation("mine", False, 0, 1.0, limit=7.0)
