"""The documentation: its code runs, its links lead somewhere, what it names exists."""

import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re
import textwrap
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxmoe
from jaxmoe._jax import primitive as _primitive
from jaxmoe._jax import targets as _targets
from jaxmoe.activation import ACTIVATIONS, GATE_UP_ORDERS
from jaxmoe.grouped_gemm import WEIGHT_LAYOUTS
from jaxmoe.routing_methods import METHODS
from tests import layers
from tests.arguments import ones, zeros

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/*.md", "benchmarks/*.md")
    for path in ROOT.glob(pattern)
)
# Pages whose code runs and whose file names are checked; the log of measurements may speak of what
# is gone.
REFERENCES = (
    "README.md",
    "docs/adding_a_format.md",
    "docs/adding_a_kernel.md",
    "docs/checkpoints.md",
    "docs/expert_parallel.md",
    "docs/frameworks.md",
    "docs/models.md",
    "docs/numerics.md",
    "docs/routing.md",
    "docs/seams.md",
    "docs/semantics.md",
    "docs/sharding.md",
    "docs/training.md",
)
# Drawn from committed results.
PLOTS = {ROOT / "docs" / "img" / name for name in ("layer.svg", "expert_parallel.svg")}
MODULES = sorted(m.name for m in pkgutil.walk_packages(jaxmoe.__path__, "jaxmoe."))
MODULES = [name for name in MODULES if name != "jaxmoe._cuda_ffi"]
# Those that are imported by name.
SUBMODULES = ("expert_parallel", "fsdp", "lora", "nn", "checkpoints")
SUBMODULES += tuple(
    f"seams.{module.name}"
    for module in pkgutil.iter_modules(importlib.import_module("jaxmoe.seams").__path__)
    if not module.name.startswith("_")
)


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def public() -> dict[str, object]:
    values = {name: value for name, value in vars(jaxmoe).items() if not name.startswith("_")}
    return {n: v for n, v in values.items() if not isinstance(v, types.ModuleType)}


def python_blocks(page: str) -> list[tuple[int, str]]:
    """Returns (line in the page, code) of each block marked python."""
    text = read(page)
    return [
        (text.count("\n", 0, match.start(1)), textwrap.dedent(match[1]))
        for match in re.finditer(r"^ *```python\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    ]


@pytest.mark.parametrize("page", REFERENCES[1:])  # README's runs below
def test_code_of_the_page_runs(page, monkeypatch) -> None:
    """The blocks of a page run one after the other in one namespace, as a reader would."""
    importlib.import_module("jaxmoe.lora")  # whose op would be lost with the copy
    monkeypatch.setattr(_primitive, "OPS", dict(_primitive.OPS))  # a page may define an op
    blocks = python_blocks(page)
    assert blocks
    scope: dict[str, object] = {"__name__": "__main__"}
    for line, code in blocks:
        # Newlines in front, so that a traceback has the line numbers of the page.
        exec(compile("\n" * line + code, str(ROOT / page), "exec"), scope)


def test_readme_shows_one_layer_however_it_is_run(capsys) -> None:
    """The layer of the first block, its gradient, and the same layer over 8 devices."""
    scope: dict[str, object] = {"__name__": "__main__"}
    values = []
    for line, code in python_blocks("README.md"):
        exec(compile("\n" * line + code, str(ROOT / "README.md"), "exec"), scope)
        values.append(jax.device_get(scope["y"]))
    loaded = _targets.cuda_available()
    on_cuda = (
        "CUDA: FFI call jaxmoe_moe_mlp_v1" if loaded else "CUDA: pure XLA, the kernels are not"
    )
    assert on_cuda in capsys.readouterr().out
    first, *_, last = values
    assert jax.device_count() == 8
    assert first.shape == (16, 64) and first.any()
    # psum adds parts that were rounded to bf16 on their own
    assert abs(first.astype("float32") - last.astype("float32")).max() <= 2**-7 * abs(first).max()
    grad, experts = scope["grad"], scope["experts"]
    assert jax.tree.map(jnp.shape, grad) == jax.tree.map(jnp.shape, experts)
    assert all(leaf.any() for leaf in jax.tree.leaves(grad))


def _layer(x, weights, w_gate_up, w_down):
    ids = jnp.zeros(weights.shape, jnp.int32)
    return layers.moe_mlp(x, jaxmoe.Routing(ids, weights), w_gate_up, w_down)


def _product(lhs, rhs, bias):
    return jaxmoe.grouped_gemm(lhs, rhs, jnp.array([2, 2], jnp.int32), bias=bias)


def _weight_gradient(lhs, dy, into):
    sizes = jnp.array([2, 2], jnp.int32)
    return jaxmoe.grouped_gemm_weight_grad(lhs, dy, sizes, accumulate_into=into)


def _sum_of_rows(rows, weights):
    plan = jaxmoe.plan(jnp.zeros(weights.shape, jnp.int32), 2)
    return jaxmoe.finalize(rows, plan, weights)


BF16_4X8 = zeros((4, 8), jnp.bfloat16)
BF16_2X8X8 = zeros((2, 8, 8), jnp.bfloat16)
WEIGHTS = ones((4, 1))
# README's column "reverse mode on CUDA": function, arguments, those whose gradient CUDA refuses.
GRADIENTS = {
    "route": (lambda x: jaxmoe.route(x, top_k=2).weights, (BF16_4X8,), ()),
    "route_and_plan": (lambda x: jaxmoe.route_and_plan(x, top_k=2)[0].weights, (BF16_4X8,), ()),
    "permute": (
        lambda x: jaxmoe.permute(x, jaxmoe.plan(jnp.zeros((4, 1), jnp.int32), 2)),
        (BF16_4X8,),
        (),
    ),
    "finalize": (_sum_of_rows, (BF16_4X8, WEIGHTS), ()),
    "grouped_gemm": (_product, (BF16_4X8, BF16_2X8X8, BF16_4X8[:2]), ()),
    "grouped_gemm_weight_grad": (_weight_gradient, (BF16_4X8, BF16_4X8, BF16_2X8X8), ()),
    "moe_mlp": (
        _layer,
        (BF16_4X8, WEIGHTS, zeros((2, 8, 16), jnp.bfloat16), BF16_2X8X8),
        (),
    ),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_what_readme_says_of_reverse_mode_on_cuda(name) -> None:
    fn, args, refused = GRADIENTS[name]
    for argnum in range(len(args)):
        gradient = jax.grad(lambda *a: fn(*a).astype(jnp.float32).sum(), argnum)
        with _targets.force_cuda_lowering():
            traced = jax.jit(gradient).trace(*args)
            if argnum in refused:
                with pytest.raises(NotImplementedError, match="factors of a gradient must"):
                    traced.lower(lowering_platforms=("cuda",))
            else:
                assert traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name) -> None:
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(verbose=False)
    report: list[str] = []
    for test in doctest.DocTestFinder().find(module):
        runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


def of_modules() -> dict[str, object]:
    """Public names of the modules that are imported by name, and those that `jaxmoe` loads late."""
    found: dict[str, object] = {name: getattr(jaxmoe, name) for name in jaxmoe._LATE}
    for module in map(importlib.import_module, (f"jaxmoe.{name}" for name in SUBMODULES)):
        # What a module has a name for, from a private file, is its own; else what it defines.
        given = getattr(module, "__all__", None) or vars(module)
        for name, value in vars(module).items():
            if name in given and not name.startswith("_") and _is_of(value, module.__name__):
                found[f"{module.__name__.removeprefix('jaxmoe.')}.{name}"] = value
    return found


def _is_of(value: object, module: str) -> bool:
    home = getattr(value, "__module__", None) or ""
    is_own = home == module or home.startswith((f"{module}.", "jaxmoe._ep."))
    return is_own and (inspect.isfunction(value) or inspect.isclass(value))


@pytest.mark.parametrize("name", sorted(public() | of_modules()))
def test_every_public_function_has_an_example(name) -> None:
    value = (public() | of_modules())[name]
    doc = inspect.getdoc(value) or ""
    if inspect.isfunction(value):
        assert ">>> " in doc and "Returns:" in doc
        named = (rf"(?<!\w){re.escape(argument)}(, \w+)*:" for argument in _arguments(value))
        assert all(re.search(pattern, doc) for pattern in named), name
    else:
        fields = getattr(value, "_fields", ())
        if dataclasses.is_dataclass(value):
            fields = [field.name for field in dataclasses.fields(value) if field.init]
        own = name in ("Swiglu", "SwigluStep", "SoftcapSwiglu")  # its arguments are not its fields
        assert own or all(re.search(rf"\b{field}\b", doc) for field in fields), name
        assert doc


def _arguments(function) -> list[str]:
    kinds = inspect.Parameter
    return [
        {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}.get(p.kind, "") + name
        for name, p in inspect.signature(function).parameters.items()
        if (function.__name__, name) != ("explain", "args")  # "*args, **kwargs:" in one entry
    ]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(read(page))):
        if re.match(r"https://|http://|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        drawn = file.resolve() in PLOTS and not any(
            (ROOT / "benchmarks" / "results" / "h200").glob("*.json")
        )
        if not file.exists() and not drawn:
            broken.append(target)
        elif anchor and anchor not in _anchors(file):
            broken.append(target)
    assert broken == []


def _anchors(file: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", without_code(file.read_text(encoding="utf-8")), re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


def test_code_cites_pages_and_headings_that_exist() -> None:
    """Comments such as "docs/notes.md#fp8-arrays"."""
    broken, cited = [], 0
    folders = ("jaxmoe/**/*.py", "csrc/**/*.*", "benchmarks/**/*.py", "tools/*.py", "examples/*.py")
    for path in (path for pattern in folders for path in ROOT.glob(pattern)):
        text = path.read_text(encoding="utf-8")
        for page, anchor in re.findall(r"\b(docs/\w+\.md)(?:#([\w-]+))?", text):
            cited += 1
            missing = not (ROOT / page).exists()
            if missing or (anchor and anchor not in _anchors(ROOT / page)):
                broken.append(f"{path.relative_to(ROOT)}: {page}#{anchor}")
    assert cited and broken == []


@pytest.mark.parametrize("page", REFERENCES)
def test_named_files_exist(page) -> None:
    """Paths such as csrc/ffi/checks.h; a page that names a moved file fails here."""
    text = re.sub(r"https?://\S+", "", read(page))
    named = re.findall(r"(?<![\w/.<>-])[\w.-]+(?:/[\w.-]+)+\.(?:py|md|cuh|cu|cc|h|svg)\b", text)
    assert named
    folders = (ROOT, (ROOT / page).parent)  # a link begins at its page
    missing = {name for name in named if not any((at / name).exists() for at in folders)}
    assert not {name for name in missing if not any(at / name in PLOTS for at in folders)}


@pytest.mark.parametrize("page", REFERENCES)
def test_named_tests_exist(page) -> None:
    defined: set[str] = set()
    for path in (ROOT / "tests").glob("test_*.py"):
        defined |= {path.stem, *re.findall(r"^def (test_\w+)", path.read_text("utf-8"), re.M)}
    missing = set(re.findall(r"\btest_\w+", read(page))) - defined - {"test_"}
    assert missing == set()


@pytest.mark.parametrize("name", sorted(public()))
def test_public_names_are_documented(name) -> None:
    text = read("README.md") + read("docs/semantics.md")
    assert re.search(rf"\bjaxmoe\.{name}\b", text)


def test_signatures_in_semantics_are_the_real_ones() -> None:
    text = " ".join(read("docs/semantics.md").split())
    for name, value in public().items():
        if not inspect.isfunction(value) or name in ("explain", "export_checks"):
            continue
        written = re.search(rf"`jaxmoe\.{name}\((.*?)\) -> ", text)
        assert written, name
        bare = re.sub(r" \[[^]]*\]", "", written[1])  # without shapes
        real = []
        for parameter in inspect.signature(value).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY and "*" not in real:
                real.append("*")
            has_default = parameter.default is not parameter.empty
            default = f"={parameter.default!r}".replace("'", '"') if has_default else ""
            real.append(parameter.name + default)
        assert bare.replace("top_k=K", "top_k").split(", ") == real


def test_semantics_has_a_row_for_every_name() -> None:
    rows = re.findall(r'^\| `"(\w+)"`', read("docs/semantics.md"), re.M)
    expected = [*METHODS, *WEIGHT_LAYOUTS, *ACTIVATIONS, *WEIGHT_LAYOUTS, *GATE_UP_ORDERS]
    assert sorted(rows) == sorted(expected)


def test_readme_names_the_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.M))
    named = set(re.findall(r"`make ([a-z-]+)", "".join(map(read, PAGES))))
    assert named <= targets and {"demo", "test"} <= named


def test_nothing_is_left_to_write() -> None:
    marks = "TO" + "DO", "FIX" + "ME", "TB" + "D", "X" * 3, "lorem"
    left = re.compile(rf"\b({'|'.join(marks)})\b")
    assert [page for page in PAGES if left.search(read(page))] == []
