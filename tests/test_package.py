"""The installed package: its names, its version and its CUDA extension."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxmoe
from jaxmoe._jax import primitive as _primitive
from jaxmoe._jax import targets as _targets

ROOT = Path(__file__).resolve().parent.parent
PUBLIC_NAMES = {
    "export_checks",
    "Activation",
    "ExpertRows",
    "expert_rows",
    "Experts",
    "GemmConfig",
    "Plan",
    "QuantizedArray",
    "Routing",
    "RoutingMethod",
    "SoftcapSwiglu",
    "Swiglu",
    "SwigluStep",
    "dequantize",
    "expert_batches",
    "expert_load",
    "explain",
    "finalize",
    "grouped_gemm",
    "grouped_gemm_weight_grad",
    "load_balancing_loss",
    "moe_mlp",
    "permute",
    "plan",
    "quantize",
    "quantize_tokens",
    "ragged_dot_general",
    "route",
    "route_and_plan",
    "router_z_loss",
    "sequence_balance_loss",
    "update_selection_bias",
}

needs_extension = pytest.mark.skipif(
    not _targets.cuda_available(), reason=f"no CUDA extension: {_targets.why_not()}"
)


def _load_with(monkeypatch: pytest.MonkeyPatch, extension: types.ModuleType | None) -> list[str]:
    """Runs the import-time registration with a fake extension; returns the registered targets."""
    registered: list[str] = []
    monkeypatch.setitem(sys.modules, "jaxmoe._cuda_ffi", extension)
    monkeypatch.setattr(
        jax.ffi,
        "register_ffi_target",
        lambda name, _handler, *, platform: registered.append(f"{name} on {platform}"),
    )
    loaded, why_not = _targets._load()
    monkeypatch.setattr(_targets, "_extension", loaded)
    monkeypatch.setattr(_targets, "_why_not", why_not)
    return registered


def _fake_extension(version: tuple[int, int]) -> types.ModuleType:
    module = types.ModuleType("jaxmoe._cuda_ffi")
    module.ffi_api_version = lambda: version
    module.registrations = lambda: {"jaxmoe_plan_v1": object()}
    module.execute_count = lambda _target: 3
    return module


def test_public_names() -> None:
    public = {
        name
        for name, value in vars(jaxmoe).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public == PUBLIC_NAMES


def test_every_public_object_has_a_docstring() -> None:
    assert [name for name in sorted(PUBLIC_NAMES) if not getattr(jaxmoe, name).__doc__] == []


@pytest.mark.parametrize("name", ("moe_mlp", "expert_rows", "expert_batches"))
def test_what_says_how_weights_are_read_is_no_parameter_of_the_layer(name) -> None:
    assert len(inspect.signature(getattr(jaxmoe, name)).parameters) <= 12


def test_metadata() -> None:
    metadata = importlib.metadata.metadata("jaxmoe")
    assert metadata["Requires-Python"] == ">=3.12"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "jax>=0.10" in metadata.get_all("Requires-Dist")
    assert "jaxmoe" in metadata.get_payload(), "the description is README.md"
    assert (Path(jaxmoe.__file__).parent / "py.typed").is_file()


def test_the_version_stands_in_pyproject_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert jaxmoe.__version__ == project["version"]
    assert jaxmoe.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert jaxmoe.__version__ not in Path(jaxmoe.__file__).read_text(encoding="utf-8")


@needs_extension
def test_every_handler_is_registered() -> None:
    importlib.import_module("jaxmoe.lora")  # whose op is known from then on
    targets = {op.cuda.target for op in _primitive.OPS.values() if op.cuda} - {""}
    assert _targets._extension.registrations().keys() == targets
    assert min(_targets.execute_count(target) for target in targets) >= 0
    with pytest.raises(KeyError):
        _targets.execute_count("jaxmoe_unknown_v1")


@needs_extension
def test_extension_is_built_against_the_oldest_supported_ffi() -> None:
    assert _targets._extension.ffi_api_version() == (0, 3)


@needs_extension
def test_extension_needs_no_cuda_library() -> None:
    """It loads without a driver: cudart is linked statically and libcuda not at all."""
    linked = subprocess.run(
        ["ldd", _targets._extension.__file__], capture_output=True, text=True, check=True
    ).stdout
    assert "libstdc++" in linked
    assert "libcuda" not in linked


@pytest.mark.parametrize("version", [(0, 3), (0, 1), "runtime"])
def test_supported_ffi_version_registers(monkeypatch, version) -> None:
    version = _targets.runtime_ffi_api_version() if version == "runtime" else version
    assert _load_with(monkeypatch, _fake_extension(version)) == ["jaxmoe_plan_v1 on CUDA"]
    assert _targets.cuda_available()
    assert _targets.why_not() is None
    assert _targets.execute_count("jaxmoe_plan_v1") == 3


@pytest.mark.parametrize("version", [(0, 99), (1, 0)])
def test_newer_ffi_version_is_reported_and_not_registered(monkeypatch, version) -> None:
    with pytest.warns(RuntimeWarning, match="newer than version 0.* of the installed jaxlib"):
        registered = _load_with(monkeypatch, _fake_extension(version))
    assert registered == []
    assert not _targets.cuda_available()
    assert f"version {version[0]}.{version[1]} is newer" in _targets.why_not()


def test_unknown_runtime_version_is_reported(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    with pytest.warns(RuntimeWarning, match="ships no c_api.h"):
        assert _load_with(monkeypatch, _fake_extension((0, 3))) == []


def test_missing_extension_is_no_warning(monkeypatch) -> None:
    class Missing:
        """Hides the extension from the import system."""

        def find_spec(self, name: str, *_: object) -> None:
            if name == "jaxmoe._cuda_ffi":
                raise ModuleNotFoundError(name=name)

    monkeypatch.delitem(sys.modules, "jaxmoe._cuda_ffi", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    loaded, why_not = _targets._load()
    assert loaded is None
    assert "JAXMOE_CUDA=OFF" in why_not


def test_broken_extension_is_reported(monkeypatch) -> None:
    class Broken:
        """Fails as the dynamic linker does."""

        def find_spec(self, name: str, *_: object) -> None:
            if name == "jaxmoe._cuda_ffi":
                raise ImportError("undefined symbol: PlanFfi")

    monkeypatch.delitem(sys.modules, "jaxmoe._cuda_ffi", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.warns(RuntimeWarning, match="undefined symbol: PlanFfi"):
        loaded, why_not = _targets._load()
    assert loaded is None
    assert "undefined symbol" in why_not


@pytest.mark.parametrize("text", ["", "#define XLA_FFI_API_MAJOR 0\n", None])
def test_unreadable_ffi_header(tmp_path, text) -> None:
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    if text is not None:
        header.write_text(text, encoding="utf-8")
    assert _targets.runtime_ffi_api_version(str(tmp_path)) is None


def test_execute_count_without_extension(monkeypatch) -> None:
    monkeypatch.setattr(_targets, "_extension", None)
    monkeypatch.setattr(_targets, "_why_not", "no compiler")
    message = "no execution count of jaxmoe_grouped_gemm_v1: no compiler"
    with pytest.raises(NotImplementedError, match=message):
        _targets.execute_count("jaxmoe_grouped_gemm_v1")


def test_forced_lowering_is_scoped() -> None:
    assert not _targets.cuda_lowering_forced()
    with _targets.force_cuda_lowering():
        assert _targets.cuda_lowering_forced()
    assert not _targets.cuda_lowering_forced()


_CHILD = """
import json, sys, types, warnings
newer = types.ModuleType("jaxmoe._cuda_ffi")
newer.ffi_api_version = lambda: (0, 99)
newer.registrations = lambda: {"jaxmoe_plan_v1": 1 / 0}
if sys.argv[1] == "newer":
    sys.modules["jaxmoe._cuda_ffi"] = newer
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import jaxmoe
    from jaxmoe._jax import primitive as _primitive
    from jaxmoe._jax import targets as _targets
import jax
import jax.numpy as jnp
print(json.dumps({
    "available": _targets.cuda_available(),
    "warnings": [str(w.message) for w in caught if "jaxmoe" in str(w.message)],
    "sum": int(jax.jit(lambda x: x + 1)(41)),
}))
"""


@pytest.mark.parametrize("extension", ["installed", "newer"])
def test_jax_lives_in_a_new_process(extension) -> None:
    """Importing jaxmoe leaves JAX's backend alive, whatever FFI version the extension has."""
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, extension],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    seen = json.loads(child.stdout)
    assert seen["sum"] == 42
    assert seen["available"] == (extension == "installed" and _targets.cuda_available())
    assert len(seen["warnings"]) == (1 if extension == "newer" else 0)


def _ptxas_report(kernel: str, stores: int, note: str = "") -> str:
    return (
        f"ptxas info    : Compiling entry function '{kernel}' for 'sm_90a'\n{note}"
        f"ptxas info    : Function properties for {kernel}\n"
        f"    0 bytes stack frame, {stores} bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers\n"
    )


_SERIALIZED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to insufficient register resources for the wgmma pipeline in function 'GemmA'\n"
)


@pytest.mark.parametrize(
    ("report", "found"),
    [
        (_ptxas_report("GemmA", 0) + _ptxas_report("GemmB", 0), []),
        (
            _ptxas_report("GemmA", 0) + _ptxas_report("GemmB", 24),
            ["GemmB: 24 bytes spill stores, 0 bytes spill loads"],
        ),
        (_ptxas_report("GemmA", 0, _SERIALIZED), [_SERIALIZED.strip()]),
    ],
)
def test_ptxas_report_is_checked(monkeypatch, report, found) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    check_ptxas = importlib.import_module("check_ptxas")
    assert check_ptxas.violations(report) == found


class _Device:
    device_kind = "NVIDIA A100"
    compute_capability = "8.0"


def test_other_cards_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _targets.device_reason() is None, "no card at all: lowering for another machine"
    monkeypatch.setattr(jax, "local_devices", lambda backend: [_Device()])
    with _targets.force_cuda_lowering():
        lowering = jax.jit(jaxmoe.plan, static_argnums=1).trace(jnp.zeros((2, 1), jnp.int32), 4)
        with pytest.raises(NotImplementedError, match=r"9\.0 \(Hopper\); NVIDIA A100 has 8\.0"):
            lowering.lower(lowering_platforms=("cuda",))


# Imports `jax`, then what it is told to. Prints who came with that, and the CPU seconds of each.
# Whether this process may write bytecode or not, that of the second import is in a folder.
_IMPORTS = """
import importlib, json, sys, time
start = time.process_time()
import jax
middle, before = time.process_time(), set(sys.modules)
sys.dont_write_bytecode, sys.pycache_prefix = False, sys.argv[1]
for name in sys.argv[2:]:
    importlib.import_module(name)
seconds = middle - start, time.process_time() - middle
print(json.dumps({"s": seconds, "before": sorted(before), "after": sorted(sys.modules)}))
"""


def _imports(folder: Path, *names: str) -> dict[str, list]:
    child = subprocess.run(
        [sys.executable, "-c", _IMPORTS, str(folder), *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(child.stdout)


def _packages(modules: list[str]) -> set[str]:
    return {name.split(".")[0] for name in modules} - sys.stdlib_module_names


_SEAMS = sorted(f"jaxmoe.seams.{path.stem}" for path in (ROOT / "jaxmoe/seams").glob("[a-z]*.py"))


def test_import_brings_jax_and_what_every_layer_needs_alone(tmp_path) -> None:
    """No other package that is not there with JAX, and no module that is for one purpose."""
    names = ("autotuning", "inspect", "loading", "lora", "nn", "seams")
    unasked = {f"jaxmoe.{name}" for name in (*names, "reference", "_load", "_testing")}
    for name in unasked:
        assert importlib.util.find_spec(name), name  # not one that has another name today
    found = _imports(tmp_path, "jaxmoe")
    assert _packages(found["after"]) - _packages(found["before"]) == {"jaxmoe"}
    assert unasked.isdisjoint(found["after"])


def test_seams_are_imported_by_name_alone(tmp_path) -> None:
    """Without the library that each is for; `jaxmoe.nn` too."""
    found = _imports(tmp_path, "jaxmoe.nn", *_SEAMS)
    assert _packages(found["after"]) - _packages(found["before"]) == {"jaxmoe"}


def test_import_takes_a_part_of_the_time_of_jax(tmp_path) -> None:
    """CPU time, which hardly depends on other processes: 0.18 of that of jax, or 0.5 with flax."""
    times = [_imports(tmp_path, "jaxmoe")["s"] for _ in range(5)]  # the first one compiles
    of_jax, of_jaxmoe = map(min, zip(*times, strict=True))
    assert of_jaxmoe < 0.4 * of_jax
