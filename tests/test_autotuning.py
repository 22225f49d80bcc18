"""Autotuning: which layers are found, what is measured, and how a result is used and kept."""

import dataclasses
import functools
import io
import itertools

import jax
import jax.numpy as jnp
import pytest

import jaxmoe
from jaxmoe import AutotuningResult, Experts, GemmConfig, Routing, autotuning, quantize
from jaxmoe._jax import targets as _targets
from jaxmoe._mlp import timer, tuned
from jaxmoe._mlp.op import moe_mlp_p, rule_configs
from tests.lowered import calls, cuda_text, layer_call

T, K, E, H, INTER = 6, 2, 8, 256, 128
ROUTING = Routing(
    jax.ShapeDtypeStruct((T, K), jnp.int32), jax.ShapeDtypeStruct((T, K), jnp.float32), E
)
X = jax.ShapeDtypeStruct((T, H), jnp.bfloat16)
DECODE, WIDE = GemmConfig(128, 32), GemmConfig(256, 160)


def experts_of(format=None, activation="swiglu", hidden=H):
    width = INTER if activation == "relu2" else 2 * INTER
    made = lambda n, k: jnp.zeros((E, n, k), jnp.bfloat16)  # noqa: E731

    def whole():
        arrays = {"gate_up": made(width, hidden), "down": made(hidden, INTER)}
        if format is not None:
            arrays = {n: quantize(w, format, weight_layout="nk") for n, w in arrays.items()}
        return Experts(**arrays, activation=activation, layout="nk")

    return jax.eval_shape(whole)


EXPERTS = experts_of()


def found(fn, *args):
    with _targets.force_cuda_lowering():
        return autotuning.problems(fn, *args)


def tiles_of(fn, *args):
    """The tiles of the first layer that `fn`, jitted or not, asks CUDA for."""
    with _targets.force_cuda_lowering():
        text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    attrs, *_ = layer_call(next(c for c in calls(text) if c[0] == "jaxmoe_moe_mlp_v1"))
    return tuple(config_of(attrs[name]) for name in ("gemm1", "gemm2"))


def config_of(attrs):
    numbers = {name: int(value.split(":")[0]) for name, value in attrs.items()}
    flags = {name: bool(numbers[name]) for name in ("gather", "one_kernel")}
    return GemmConfig(**numbers | flags)


class Fake:
    """A timer by which `fastest` takes a microsecond, and each other choice a different time."""

    fastest = None

    def __init__(self, a, layer):
        self.a, self.layer, self.times = a, layer, itertools.count(10)
        self.asked = []
        Fake.last = self

    def __call__(self, pairs):
        pairs = list(pairs)
        self.asked.append(pairs)
        return {p: 1.0 if p == self.fastest else float(next(self.times)) for p in pairs}


@pytest.fixture(autouse=True)
def no_favourite(monkeypatch):
    monkeypatch.setattr(Fake, "fastest", None)


def result_of(*pairs, device="", hidden=H):
    """A result in which the layer of this page was fastest with each of `pairs` in turn."""
    x = X.update(shape=(T, hidden))
    (problem,) = found(jaxmoe.moe_mlp, x, ROUTING, experts_of(hidden=hidden))
    times = tuple((pair, float(i)) for i, pair in enumerate(pairs))
    return AutotuningResult(device, ((problem, times),))


def test_layers_are_found_wherever_they_are():
    def fn(x, routing, experts):
        y, _ = jax.lax.scan(
            lambda x, _: (jaxmoe.moe_mlp(x, routing, experts), None), x, None, length=3
        )
        rows = jax.jit(jaxmoe.expert_rows)(y, routing, experts)
        return jaxmoe.moe_mlp(y, routing, experts), rows

    layer, rows = found(fn, X, ROUTING, EXPERTS)
    assert (layer.finalize, rows.finalize) == (True, False)
    assert dataclasses.replace(rows, finalize=True) == layer
    assert dataclasses.asdict(layer) == {
        "format": "plain",
        "dtype": "bfloat16",
        "layouts": ("nk", "nk"),
        "activation": "gated",
        "order": "gate_up",
        "promoted": None,
        "num_tokens": T,
        "top_k": K,
        "num_experts": E,
        "num_local_experts": E,
        "hidden": H,
        "intermediate": INTER,
        "finalize": True,
        "static": False,
        "given": False,
    }


def test_a_jitted_function_that_was_traced_before_is_searched_too():
    fn = jax.jit(jaxmoe.moe_mlp)
    with _targets.force_cuda_lowering():
        fn.trace(X, ROUTING, EXPERTS).lower(lowering_platforms=("cuda",))
    assert found(fn, X, ROUTING, EXPERTS)


@pytest.mark.parametrize(
    "fn",
    (
        lambda x, *_: x + x,
        functools.partial(jaxmoe.moe_mlp, config=(DECODE, DECODE)),
        functools.partial(jaxmoe.moe_mlp, batch_invariant=True),
        jax.grad(lambda x, r, e: jaxmoe.moe_mlp(x, r, e).astype(jnp.float32).sum()),
    ),
    ids=("none", "config", "batch_invariant", "derivative"),
)
def test_nothing_to_measure(fn):
    with pytest.raises(ValueError, match=r"^jaxmoe\.autotune: fn must have a jaxmoe\.moe_mlp or "):
        found(fn, X, ROUTING, EXPERTS)


def test_without_a_gpu_nothing_is_measured():
    with pytest.raises(RuntimeError, match=r"^jaxmoe\.autotune: nothing can be measured here: "):
        jaxmoe.autotune(jaxmoe.moe_mlp, X, ROUTING, EXPERTS)


@pytest.mark.parametrize(
    ("format", "activation"),
    (
        (None, "swiglu"),
        (None, "relu2"),
        ("fp8_block", "swiglu"),
        ("fp8_tensor", "swiglu"),
        ("int4_g128", "swiglu"),
        ("mxfp4", "relu2"),
    ),
)
def test_what_is_measured_is_legal(format, activation):
    """Each choice lowers; the rule's is among them, at the end too."""
    arguments = X, ROUTING, experts_of(format, activation)
    result = autotuning.tune(found(jaxmoe.moe_mlp, *arguments), Fake)
    ((_, times),) = result.data
    rule = tiles_of(jaxmoe.moe_mlp, *arguments)
    for pairs in Fake.last.asked:
        assert rule in pairs and len(pairs) == len(set(pairs))
    assert rule in dict(times) and list(times) == sorted(times, key=lambda pair: pair[1])
    pairs = [pair for pair, _ in times]
    assert len({first.tile for first, _ in pairs}) > 3 and len({s.tile for _, s in pairs}) > 3
    one = [first for first, _ in pairs if first.one_kernel]
    assert bool(one) == (activation == "swiglu" and format in (None, "fp8_block", "int4_g128"))
    for pair in pairs:
        assert tiles_of(functools.partial(jaxmoe.moe_mlp, config=pair), *arguments) == pair


@pytest.mark.parametrize(
    ("format", "apart"),
    ((None, True), ("fp8_tensor", True), ("fp8_block", False), ("int4_g128", False)),
)
def test_a_timer_draws_what_the_layer_takes(format, apart, monkeypatch):
    """Arrays of the layer's shapes and dtypes, whose value is finite and not zero."""
    monkeypatch.setattr(timer, "_MAX_LAYERS", 2)
    monkeypatch.setattr(timer, "_BATCH_S", 0.0)
    experts = experts_of(format)
    if apart:
        half = experts_of(format, "relu2").gate_up
        experts = dataclasses.replace(experts, gate_up=None, gate=half, up=half)
    bias = jax.ShapeDtypeStruct((E, H), jnp.bfloat16)
    experts = dataclasses.replace(experts, down_bias=bias)
    local = jax.ShapeDtypeStruct((2 * E,), jnp.int32)
    layer = functools.partial(jaxmoe.moe_mlp, num_experts=2 * E)
    fn = lambda x, r, e, where: layer(x, r, e, expert_map=where, residual=x)  # noqa: E731
    routing = dataclasses.replace(ROUTING, num_experts=2 * E)
    ((asked, layer),) = found(fn, X, routing, experts, local).values()
    timed = timer.Timer(asked, layer)
    rule = rule_configs(asked, layer)
    for drawn in timed._layers:
        for name, x, wanted in zip(asked._fields, drawn, asked, strict=True):
            assert (x is None) == (wanted is None), name
            assert x is None or (x.shape, x.dtype) == (wanted.shape, wanted.dtype), name
        assert len({*drawn.expert_ids[0].tolist()}) == K and drawn.expert_ids.max() < 2 * E
        (y,) = moe_mlp_p(*drawn, layer=layer.replace(config=rule))
        assert jnp.isfinite(y).all() and abs(y).max() > 0
    assert len(timed._layers) == 2 and timed([rule])[rule] > 0


def test_a_timer_gives_tiles_as_results_do(monkeypatch):
    """While a layer is lowered and, where programs of several devices ask again, compiled."""
    ((asked, layer),) = found(jaxmoe.moe_mlp, X, ROUTING, experts_of("int4_g128")).values()
    timed = timer.Timer(asked, layer)
    seen = []

    class Lowered:
        def lower(self, *_):
            seen.append(tuned.find(asked, layer))
            return self

        def compile(self):
            seen.append(tuned.find(asked, layer))
            return seen[-1]

    monkeypatch.setattr(timer.jax, "jit", lambda *_, **__: Lowered())
    pairs = [(GemmConfig(128, 16), GemmConfig(128, n)) for n in (16, 32)]
    assert timed._compile(pairs) == {pair: pair for pair in pairs}
    assert seen[:2] == pairs and sorted(seen[2:], key=str) == pairs


@pytest.mark.parametrize(("copy_bytes", "distinct"), ((1, 1), (10**9, 3)))
def test_a_timer_runs_short_layers_many_times(copy_bytes, distinct, monkeypatch):
    """A program of one would take as long to start; equal ones XLA would run once."""
    monkeypatch.setattr(timer, "_MAX_LAYERS", 3)
    monkeypatch.setattr(timer, "_COPY_BYTES", copy_bytes)
    ((asked, layer),) = found(jaxmoe.moe_mlp, X, ROUTING, EXPERTS).values()
    timed = timer.Timer(asked, layer)
    assert len({id(a.w_down) for a in timed._layers}) == distinct
    assert len({str(a.expert_ids) for a in timed._layers}) == 3
    monkeypatch.setattr(timer, "_PROGRAM_US", 0)
    assert len(timer.Timer(asked, layer)._layers) == distinct


def test_the_fastest_is_used():
    fastest = GemmConfig(128, 32, gather=True, one_kernel=True), DECODE
    Fake.fastest = fastest
    result = autotuning.tune(found(jaxmoe.moe_mlp, X, ROUTING, EXPERTS), Fake)
    ((problem, times),) = result.data
    assert result.best(problem) == fastest and times[0] == (fastest, 1.0)
    with result:
        assert tiles_of(jaxmoe.moe_mlp, X, ROUTING, EXPERTS) == fastest


def test_layers_with_static_scales_are_measured_apart():
    """One kernel runs both of their products, but not where scales follow from all features."""
    dynamic = experts_of("fp8_tensor")
    static = dataclasses.replace(dynamic, h_scale=jax.ShapeDtypeStruct((), jnp.float32))
    results = [
        autotuning.tune(found(jaxmoe.moe_mlp, X, ROUTING, e), Fake) for e in (dynamic, static)
    ]
    (first, slow), (second, fast) = (result.data[0] for result in results)
    assert (first.static, second.static) == (False, True)
    assert dataclasses.replace(second, static=False) == first
    one = [any(first.one_kernel for (first, _), _ in times) for times in (slow, fast)]
    assert one == [False, True]


def test_the_second_product_is_tuned_beside_the_best_first():
    first = GemmConfig(128, 192, gather=True)

    class Prefers(Fake):
        def __call__(self, pairs):
            return {p: 10.0 - 4 * (p[0] == first) - 2 * (p[1] == WIDE) for p in pairs}

    result = autotuning.tune(found(jaxmoe.moe_mlp, X, ROUTING, EXPERTS), Prefers)
    assert result.data[0][1][0] == ((first, WIDE), 4.0)


def test_a_context_holds_for_functions_that_were_jitted_before():
    fn = jax.jit(jaxmoe.moe_mlp)
    rule = tiles_of(fn, X, ROUTING, EXPERTS)
    outer, inner = result_of((DECODE, WIDE)), result_of((WIDE, DECODE))
    other = result_of((WIDE, WIDE), hidden=2 * H)
    with outer:
        assert tiles_of(fn, X, ROUTING, EXPERTS) == (DECODE, WIDE)
        with inner, other:
            assert tiles_of(fn, X, ROUTING, EXPERTS) == (WIDE, DECODE)
            with inner:  # the same once more
                assert tiles_of(fn, X, ROUTING, EXPERTS) == (WIDE, DECODE)
        assert tiles_of(fn, X, ROUTING, EXPERTS) == (DECODE, WIDE)
        asked = functools.partial(jaxmoe.moe_mlp, config=(WIDE, WIDE))
        assert tiles_of(asked, X, ROUTING, EXPERTS) == (WIDE, WIDE)
        whole = functools.partial(jaxmoe.moe_mlp, batch_invariant=True)
        assert tiles_of(whole, X, ROUTING, EXPERTS) != (DECODE, WIDE)
        few = jax.tree.map(lambda a: jax.ShapeDtypeStruct((3, K), a.dtype), ROUTING)
        assert tiles_of(fn, X.update(shape=(3, H)), few, EXPERTS) != (DECODE, WIDE)
    assert tiles_of(fn, X, ROUTING, EXPERTS) == rule != (DECODE, WIDE)


def test_the_scratch_is_that_of_the_measured_tiles():
    one = GemmConfig(128, 32, gather=True, one_kernel=True), DECODE
    with result_of(one):
        measured = calls(cuda_text(jaxmoe.moe_mlp, X, ROUTING, EXPERTS))
    asked = functools.partial(jaxmoe.moe_mlp, config=one)
    assert measured == calls(cuda_text(asked, X, ROUTING, EXPERTS))


def test_on_a_cpu_a_context_changes_nothing():
    x = jnp.ones((T, H), jnp.bfloat16)
    routing = Routing(jnp.zeros((T, K), jnp.int32), jnp.ones((T, K), jnp.float32), E)
    experts = jax.tree.map(lambda a: jnp.full(a.shape, 0.01, a.dtype), EXPERTS)
    with result_of((DECODE, WIDE)):
        inside = jaxmoe.moe_mlp(x, routing, experts)
    assert (inside == jaxmoe.moe_mlp(x, routing, experts)).all()


def test_results_are_kept_as_text():
    one = GemmConfig(128, 32, raster=0, gather=True, one_kernel=True), DECODE
    result = result_of(one, (DECODE, WIDE), device="NVIDIA H200")
    promoted = dataclasses.replace(result.data[0][0], promoted=(True, False))
    result = dataclasses.replace(result, data=(*result.data, (promoted, ())))
    file = io.StringIO()
    result.dump(file)
    file.seek(0)
    again = AutotuningResult.load(file)
    assert again == result and hash(again) == hash(result) and again.best(promoted) is None
    assert again.jaxmoe_version == jaxmoe.__version__


NO_KIND = '{"device_kind": null, "data": [], "jaxmoe_version": "1"}'


@pytest.mark.parametrize(
    "text", ("", "[]", "{}", '{"device_kind": "a", "data": [[1, 2]]}', NO_KIND)
)
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match=r"^jaxmoe\.AutotuningResult: the text must be what dumps"):
        AutotuningResult.loads(text)


def test_numbers_of_another_type_are_refused():
    text = result_of((DECODE, WIDE)).dumps()
    with pytest.raises(ValueError, match="top_k='2' must be of type int"):
        AutotuningResult.loads(text.replace('"top_k": 2', '"top_k": "2"'))


def test_results_are_merged():
    a, b = result_of((DECODE, WIDE)), result_of((WIDE, DECODE))
    other = result_of((WIDE, WIDE), hidden=2 * H)
    (problem, _), (wide, _) = (a | other).data
    assert (a | b).best(problem) == (WIDE, DECODE) and (b | a).best(problem) == (DECODE, WIDE)
    assert (a | other | b).best(wide) == (WIDE, WIDE)
    rule = "results of one kind of device can be merged, not of '' and 'NVIDIA H100'"
    with pytest.raises(ValueError, match=rule):
        a | result_of((WIDE, WIDE), device="NVIDIA H100")
    with pytest.raises(TypeError, match="what is merged must be such a result"):
        a | None  # pyright: ignore[reportOperatorIssue]
    with pytest.raises(TypeError, match="device_kind must be a string"):
        AutotuningResult.packaged(3)  # pyright: ignore[reportArgumentType]


def test_a_result_of_another_device_is_refused(monkeypatch):
    monkeypatch.setattr(autotuning, "_device_kind", lambda: "NVIDIA H200")
    result = result_of((DECODE, WIDE), device="NVIDIA H100")
    rule = "device_kind='NVIDIA H100' must be 'NVIDIA H200', that of the GPUs here"
    with pytest.raises(ValueError, match=rule), result:
        pass
    with dataclasses.replace(result, device_kind="NVIDIA H200"):
        assert tiles_of(jaxmoe.moe_mlp, X, ROUTING, EXPERTS) == (DECODE, WIDE)


@pytest.mark.gpu
@pytest.mark.parametrize("format", (None, "fp8_block", "int4_g128"))
def test_on_a_gpu(format):
    result = jaxmoe.autotune(jaxmoe.moe_mlp, X, ROUTING, experts_of(format))
    ((_, times),) = result.data
    assert len(times) > 10 and all(0.5 < us < 1e6 for _, us in times)
    fn = jax.jit(jaxmoe.moe_mlp)
    x = jax.random.normal(jax.random.key(0), X.shape, X.dtype)
    ids = jnp.arange(T * K, dtype=jnp.int32).reshape(T, K) % E
    routing = Routing(ids, jnp.full((T, K), 0.5, jnp.float32), E)
    w = jax.random.normal(jax.random.key(1), (E, 2 * INTER, H), x.dtype)
    down = jax.random.normal(jax.random.key(2), (E, H, INTER), x.dtype)
    weights = [w if format is None else quantize(w, format, weight_layout="nk") for w in (w, down)]
    experts = Experts(gate_up=weights[0], down=weights[1], layout="nk")
    wanted = fn(x, routing, experts)
    with result:
        scale = float(abs(wanted).max())
        assert float(abs(fn(x, routing, experts) - wanted).max()) <= 0.02 * scale
    assert result == AutotuningResult.loads(result.dumps())


def test_packaged_tables_can_be_used():
    """Each is a result of its device, of tiles that beat those of the rule."""
    tables = sorted(autotuning.TABLES.glob("*.json"))
    assert tables
    for path in tables:
        result = AutotuningResult.loads(path.read_text())
        assert autotuning.table_name(result.device_kind) == path.name
        assert AutotuningResult.packaged(result.device_kind) == result
        for problem, ((best, us), (rule, its)) in result.data:
            assert result.best(problem) == best != rule and its > 1.03 * us


def test_packaged_without_a_table():
    assert AutotuningResult.packaged("NVIDIA Unheard-of").data == ()
    with pytest.raises(ValueError, match=r"packaged\(\) needs device_kind, such as 'NVIDIA H200'"):
        AutotuningResult.packaged()
