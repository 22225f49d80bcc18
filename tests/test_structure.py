"""What may stand where: sizes of files, names of formats, operands, targets, includes."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxmoe import _formats, checkpoints

ROOT = Path(__file__).resolve().parent.parent
# Lines a file may have, by the pattern of its path.
BUDGETS = {
    "jaxmoe/**/*.py": 400,
    "csrc/**/*.cuh": 500,
    "csrc/ffi/*.cc": 150,
    "CMakeLists.txt": 120,
}
SUFFIXES = (".py", ".sh", ".cc", ".h", ".cu", ".cuh")
# Tuples with an entry for each operand of a primitive.
OPERANDS = {"args", "arrays", "avals", "dims", "operands", "primals", "tangents"}
ARRAY_MAKERS = {"empty", "full", "ones", "zeros", "ShapeDtypeStruct", "ShapedArray"}
FORMAT_NAMES = re.compile("|".join(_formats.QUANTIZED), re.IGNORECASE)
# Words with the name of a format elsewhere, by the file: public readers of `jaxmoe.checkpoints`,
# each for a layout of stored files, which the loader tells apart by what tensors are called.
READERS = {"jaxmoe/_load/find.py": {"from_mxfp4", "from_mxfp8", "from_nvfp4"}}


def package(*besides: str) -> list[Path]:
    """Returns the Python files of the package, but for those whose path has one of `besides`."""
    paths = sorted((ROOT / "jaxmoe").rglob("*.py"))
    assert len({path.parent for path in paths}) > 1, "sub-packages are seen"
    return [p for p in paths if not any(b in str(p.relative_to(ROOT)) for b in besides)]


def found(paths: list[Path], violations) -> list[str]:
    """Returns `path:line: text` of each (line, text) that `violations` finds in a file."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in paths
        for line, text in violations(path.read_text(encoding="utf-8"))
    ]


def docstrings(tree: ast.AST) -> set[ast.AST]:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, documented)
        and node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
    }


def named_formats(source: str) -> Iterator[tuple[int, str]]:
    """Finds words with the name of a format in strings and identifiers, docstrings apart."""
    tree = ast.parse(source)
    ignored = docstrings(tree)
    for node in ast.walk(tree):
        if node in ignored:
            continue
        words = [value for _, value in ast.iter_fields(node) if isinstance(value, str)]
        yield from ((node.lineno, word) for word in words if FORMAT_NAMES.search(word))


def numbered_operands(source: str) -> Iterator[tuple[int, str]]:
    """Finds `avals[3]`, `args[2:]` and their like: an operand has a name."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Subscript):
            continue
        name = getattr(node.value, "id", getattr(node.value, "attr", ""))
        if name in OPERANDS and any(isinstance(n, ast.Constant) for n in ast.walk(node.slice)):
            yield node.lineno, ast.unparse(node)


def empty_arrays(source: str) -> Iterator[tuple[int, str]]:
    """Finds arrays with a 0 among their sizes: an absent operand is None."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        sizes = node.args[0].left if isinstance(node.args[0], ast.BinOp) else node.args[0]
        sizes = sizes.elts if isinstance(sizes, ast.Tuple | ast.List) else [sizes]
        if name in ARRAY_MAKERS and any(
            isinstance(s, ast.Constant) and s.value == 0 for s in sizes
        ):
            yield node.lineno, ast.unparse(node)


def hopper_includes(source: str) -> Iterator[tuple[int, str]]:
    """Finds includes of headers that are for one architecture."""
    for number, line in enumerate(source.splitlines(), 1):
        if re.match(r'\s*#\s*include\s*"(.*/)?sm\d+/', line):
            yield number, line.strip()


def repeated_targets(sources: dict[str, str]) -> list[str]:
    """Returns each name of an FFI target that stands in more than one place."""
    places: dict[str, list[str]] = {}
    for path, source in sources.items():
        for number, line in enumerate(source.splitlines(), 1):
            for name in re.findall(r"\bjaxmoe_\w+_v\d+\b", line.split("//")[0]):
                places.setdefault(name, []).append(f"{path}:{number}")
    assert places, "the pattern matches the names of today"
    return [f"{name}: {', '.join(at)}" for name, at in sorted(places.items()) if len(at) > 1]


def native(besides: tuple[str, ...] = ()) -> list[Path]:
    paths = [path for path in sorted((ROOT / "csrc").rglob("*")) if path.suffix in SUFFIXES]
    return [p for p in paths if not str(p.relative_to(ROOT)).startswith(besides)]


def test_a_format_is_named_where_formats_are() -> None:
    paths = package("jaxmoe/_formats/", "jaxmoe/checkpoints/")
    others = [p for p in paths if str(p.relative_to(ROOT)) not in READERS]
    assert len(others) == len(paths) - len(READERS) and found(others, named_formats) == []
    for path, allowed in READERS.items():
        words = {word for _, word in named_formats((ROOT / path).read_text(encoding="utf-8"))}
        assert words == allowed, path
        assert all(callable(getattr(checkpoints, word)) for word in allowed)


def test_operands_have_names() -> None:
    assert found(package(), numbered_operands) == []


def test_only_the_lowering_makes_an_array_for_an_absent_operand() -> None:
    assert found(package("/_jax/lowering.py"), empty_arrays) == []


def test_only_the_gemm_knows_its_architecture() -> None:
    assert found(native(("csrc/gemm/", "csrc/weight_grad/")), hopper_includes) == []


def test_a_target_is_named_in_one_line() -> None:
    sources = {str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in native()}
    assert repeated_targets(sources) == []


@pytest.mark.parametrize(
    ("rule", "source", "lines"),
    [
        (named_formats, '"""In fp8_tensor."""\nx = 1  # fp8_block\n', []),
        (named_formats, 'def f():\n    """In fp8_tensor."""\n    return "an fp8_block of"\n', [3]),
        (named_formats, "is_fp8 = weights.fp8_channel\n", [1]),
        (named_formats, "import a\nfrom b import FP8_BLOCK as X\n", [2]),
        (named_formats, "f(fp8_block=1)\n\ndef fp8_tensor(): ...\n", [1, 3]),
        (named_formats, "a.from_mxfp4(b)\nif is_fp8_block: ...\nfp8 = MXFP8S\n", [1, 2, 3]),
        (numbered_operands, "x = avals.x\ny = outs[0]\nz = args[i]\n", []),
        (numbered_operands, "x = avals[9]\ny = ctx.operands[2:]\nz = args[-1]\n", [1, 2, 3]),
        (empty_arrays, "x = jnp.zeros((n, 1))\ny = jnp.zeros_like(x)\nz = full((), 0)\n", []),
        (empty_arrays, "a = jnp.zeros((0, 4))\nb = np.empty(0)\nc = S((0,) * r)\n", [1, 2]),
        (empty_arrays, "c = ShapedArray((0,) * rank, dtype)\n", [1]),
        (hopper_includes, '#include "csrc/gemm/layer.h"\n#include <cute/mma_sm90.hpp>\n', []),
        (hopper_includes, '#include "csrc/gemm/sm90/tile.cuh"\n #include "sm100/a.h"\n', [1, 2]),
    ],
)
def test_a_planted_violation_is_found(rule, source, lines) -> None:
    assert sorted(line for line, _ in rule(source)) == lines


def test_a_target_named_twice_is_found() -> None:
    once = '// jaxmoe_plan_v1\nR("jaxmoe_plan_v1", Plan);\nR("jaxmoe_plan_v2", Plan);\n'
    assert repeated_targets({"plan.cc": once}) == []
    twice = {"plan.cc": once, "names.h": '\n"jaxmoe_plan_v1"'}
    assert repeated_targets(twice) == ["jaxmoe_plan_v1: plan.cc:2, names.h:2"]


def test_line_budgets() -> None:
    budgets = {p: budget for pattern, budget in BUDGETS.items() for p in ROOT.glob(pattern)}
    over = [
        f"{path.relative_to(ROOT)}: {lines} lines, budget {budget}"
        for path, budget in sorted(budgets.items())
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > budget
    ]
    assert over == []


def test_first_line_states_the_job() -> None:
    """A docstring or comment opens each file; `and` in it is for the reviewer to judge."""
    folders = ("benchmarks", "csrc", "examples", "jaxmoe", "tests", "tools")
    paths = [p for folder in folders for p in sorted((ROOT / folder).rglob("*.*"))]
    wordless = []
    for path in (p for p in paths if p.suffix in SUFFIXES and p.is_file()):
        lines = path.read_text(encoding="utf-8").splitlines()
        first = next((line for line in lines if not line.startswith("#!")), "")
        opening = {".py": '"""', ".sh": "# "}.get(path.suffix, "// ")
        if not first.startswith(opening) or len(first.split()) < 3:
            wordless.append(f"{path.relative_to(ROOT)}: {first!r}")
    assert wordless == []
