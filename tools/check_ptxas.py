"""Compiler launcher: runs nvcc and fails when ptxas reports spills or serialised wgmma.

Used as CMAKE_CUDA_COMPILER_LAUNCHER with `-Xptxas=-v`. The report is kept next to the object as
`<object>.ptxas`; only a one-line summary and real warnings are printed.
"""

import re
import subprocess
import sys
from pathlib import Path

# C7508: setmaxnreg ignored. C7510 to C7519: "Potential Performance Loss: wgmma.mma_async
# instructions are serialized due to ...".
_SLOW = re.compile(r"C75(08|1\d)\b|wgmma\.mma_async instructions are serialized")
_KERNEL = re.compile(r"Compiling entry function '(\w+)'|Function properties for (\w+)")
_SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
# Lines that `-v` adds to a clean compilation.
_VERBOSE = re.compile(
    r"^ptxas info|^\s+\d+ bytes stack frame|^\s+Used \d+ registers|^$|compile time = "
)


def violations(report: str) -> list[str]:
    """Returns one line for each spill and each remark that costs speed."""
    found: list[str] = []
    kernel = "?"
    for line in report.splitlines():
        if match := _KERNEL.search(line):
            kernel = match[1] or match[2]
        if _SLOW.search(line):
            found.append(line.strip())
        elif (match := _SPILL.search(line)) and (int(match[1]) or int(match[2])):
            found.append(f"{kernel}: {match[1]} bytes spill stores, {match[2]} bytes spill loads")
    return found


def main(command: list[str]) -> int:
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    report = done.stderr
    rest = [line for line in report.splitlines() if not _VERBOSE.search(line)]
    print("\n".join(rest), end="\n" if rest else "", file=sys.stderr)
    if done.returncode or "-o" not in command:
        return done.returncode
    output = Path(command[command.index("-o") + 1])
    output.with_name(output.name + ".ptxas").write_text(report, encoding="utf-8")
    registers = [int(count) for count in _REGISTERS.findall(report)]
    if registers:
        print(f"{output.name}: {len(registers)} kernels, at most {max(registers)} registers")
    failures = violations(report)
    for failure in failures:
        print(f"error: {output.name}: {failure}", file=sys.stderr)
    if failures:
        output.unlink(missing_ok=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
