"""Writes the sections of README and of two pages, the page of all results, and the plots."""

import argparse
import sys
from pathlib import Path

from benchmarks.report import ep, every_row, fp8, other_models, packed, readme
from benchmarks.report.measurements import Measurements, load
from benchmarks.report.tables import replace_section

ROOT = Path(__file__).resolve().parents[2]


def sections(found: Measurements) -> dict[str, dict[str, str]]:
    """Text between the markers of each page, by their names; "" where nothing was measured."""
    return {
        "README.md": {
            "first": readme.first(found),
            "ratios": readme.ratios(found),
            "numbers": readme.numbers(found),
        },
        "docs/performance.md": {
            "other models": other_models.table(found),
            "fp8": fp8.details(found),
            "packed": packed.details(found),
        },
        "docs/expert_parallel.md": {"devices": ep.page(found)},
    }


def main(arguments: list[str] | None = None) -> int:
    """Writes everything; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    folder = ROOT / "benchmarks" / "results" / "h200"
    parser.add_argument("--results", type=Path, default=folder, help="folder of results files")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of the pages")
    args = parser.parse_args(arguments)
    found = load(args.results)
    if not found.points():
        print(f"no rows of jaxmoe's layer under {args.results}")
        return 1
    written = []
    for device in sorted({path.parent for path in args.results.parent.glob("*/*.json")}):
        rows = found if device == args.results else load(device)
        written.append(device / "README.md")
        written[-1].write_text(every_row.page(rows), encoding="utf-8")
    for page, texts in sections(found).items():
        path = args.root / page
        for name, text in texts.items():
            if text:
                whole = replace_section(path.read_text(encoding="utf-8"), name, text)
                path.write_text(whole, encoding="utf-8")
        written.append(path)
    from benchmarks.report import plot_ep, plot_layer  # which need matplotlib

    images = args.root / "docs" / "img"
    plot_layer.write(found, images / "layer.svg")
    written.append(images / "layer.svg")
    if spread := ep.points(found):
        plot_ep.write(spread, images / "expert_parallel.svg")
        written.append(images / "expert_parallel.svg")
    print("wrote", *written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
