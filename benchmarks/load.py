"""Times `jaxmoe.load` beside `cat` of the same files: `python -m benchmarks.load --help`.

Writes the layers of a model's shapes as a checkpoint, drops it from the page cache, reads it with
`cat`, drops it again, and loads it. Says how long both took and how much memory the process had of
its own, beside the page cache and what lies on the device.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxmoe
from benchmarks.models import MODELS, Layer

_BLOCK = 1 << 24  # bytes that are written at a time
_FORMATS = ("bf16", "int4_g128")


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b-a3b")
    parser.add_argument("--format", choices=_FORMATS, default="bf16")
    parser.add_argument("--gb", type=float, default=20.0, help="of the files, about (20)")
    parser.add_argument("--directory", type=Path, help="where to write (a temporary one)")
    parser.add_argument("--json", type=Path, help="file for the result")
    args = parser.parse_args(arguments)
    jax.block_until_ready(jax.device_put(np.zeros(1)))  # the device's start is not the load's
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        size = write(Path(folder), MODELS[args.model], args.format, args.gb * 1e9)
        cat_s = min(timed(lambda: cat(folder), folder) for _ in range(2))
        memory = Memory()
        layers: dict[int, Any] = {}
        load_s = timed(lambda: layers.update(jax.block_until_ready(jaxmoe.load(folder))), folder)
        result = {
            "model": args.model,
            "format": args.format,
            "layers": len(layers),
            "device": jax.devices()[0].device_kind,
            "gb": round(size / 1e9, 2),
            "cat_s": round(cat_s, 4),
            "load_s": round(load_s, 4),
            "load_over_cat": round(load_s / cat_s, 3),
            "own_memory_gb": round(memory.most() / 1e9, 2),
        }
    print(json.dumps(result))
    if args.json is not None:
        args.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return 0


def write(folder: Path, model: Layer, format: str, size: float) -> int:
    """Writes about `size` bytes of layers, a file each; returns how many."""
    config = {
        "model_type": "qwen3_moe",
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.top_k,
        "norm_topk_prob": True,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    noise = np.random.default_rng(0).integers(0, 256, _BLOCK, np.uint8)
    written = 0
    while written < size:
        number = len(list(folder.glob("*.safetensors")))
        header, offset = {}, 0
        for name, dtype, shape in tensors(model, format, number):
            nbytes = int(np.prod(shape)) * {"BF16": 2, "I32": 4}[dtype]
            offsets = [offset, offset + nbytes]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            offset += nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / f"model-{number:05}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for begin in range(0, offset, _BLOCK):
                file.write(noise[: offset - begin].data)
            file.flush()
            os.fsync(file.fileno())
        written += offset
    return written


def tensors(model: Layer, format: str, layer: int) -> Iterator[tuple[str, str, list[int]]]:
    """Names, dtypes and shapes of a layer, expert by expert, as Qwen3's files have them."""
    at = f"model.layers.{layer}.mlp."
    yield f"{at}gate.weight", "BF16", [model.num_experts, model.hidden]
    sizes = {"gate": (model.intermediate, model.hidden), "down": (model.hidden, model.intermediate)}
    for e in range(model.num_experts):
        for name in ("gate", "up", "down"):
            n, k = sizes["down" if name == "down" else "gate"]
            stem = f"{at}experts.{e}.{name}_proj.weight"
            if format == "bf16":
                yield stem, "BF16", [n, k]
            else:
                yield f"{stem}_packed", "I32", [n, k // 8]
                yield f"{stem}_scale", "BF16", [n, k // 128]


def timed(run: Any, folder: str) -> float:
    """Seconds of a run that finds nothing of the files in the page cache."""
    for path in Path(folder).iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start = time.monotonic()
    run()
    return time.monotonic() - start


def cat(folder: str) -> None:
    """Reads the files into the void."""
    with Path(os.devnull).open("wb") as void:
        subprocess.run(["cat", *sorted(map(str, Path(folder).iterdir()))], stdout=void, check=True)


class Memory:
    """The largest memory that belongs to the process alone, above what it had at first."""

    def __init__(self) -> None:
        """Starts watching."""
        self._first = self._most = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def most(self) -> int:
        """Stops watching; bytes."""
        self._done.set()
        self._thread.join()
        return self._most - self._first

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self._most = max(self._most, self._now())

    @staticmethod
    def _now() -> int:
        text = Path("/proc/self/status").read_text(encoding="utf-8")
        return 1024 * int(text.split("RssAnon:")[1].split()[0])


if __name__ == "__main__":
    sys.exit(main())
