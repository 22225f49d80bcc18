"""Writes csrc/common/wgmma_shapes.cuh: the wgmma shapes that CUTLASS's light headers lack.

CUTLASS keeps most shapes in an extension header that takes half a minute to parse. Run from
the repository root: python tools/generate_wgmma.py
"""

import pathlib

SHAPES = (48, 80, 112, 144, 160)
# Name of the instruction's types, those of A and B in PTX, k of an instruction.
TYPES = (
    ("F32BF16BF16", "bf16", "bf16", 16),
    ("F32F16F16", "f16", "f16", 16),
    ("F32E4M3E4M3", "e4m3", "e4m3", 32),
    ("F32E5M2E4M3", "e5m2", "e4m3", 32),
    ("F32TF32TF32", "tf32", "tf32", 8),
)

# With A in registers, for which B is K-major.
REGISTER_SHAPES = (48, 160)

HEADER = """\
// wgmma shapes that CUTLASS's light headers lack. Written by tools/generate_wgmma.py.
#pragma once

#include <cstdint>
#include <cute/arch/mma_sm90_gmma.hpp>

// clang-format off
namespace jaxmoe::ptx {
"""


def accumulators(count: int) -> tuple[str, str, str]:
    """Parameters, registers in PTX and asm operands of so many sums."""
    return (
        ", ".join(f"float& d{i}" for i in range(count)),
        ", ".join(f"%{i}" for i in range(count)),
        ", ".join(f'"+f"(d{i})' for i in range(count)),
    )


def atom(n: int, name: str, ptx_a: str, ptx_b: str, k: int) -> str:
    count = n // 2
    parameters, registers, operands = accumulators(count)
    template = majors = constants = ""
    if k == 16:  # of the others both operands are K-major
        template = "template <cute::SM90::GMMA::Major kMajorA, cute::SM90::GMMA::Major kMajorB>\n"
        majors = f", %{count + 3}, %{count + 4}"
        constants = """,
          "n"(static_cast<int32_t>(kMajorA)), "n"(static_cast<int32_t>(kMajorB))"""
    return f"""
{template}struct Mma64x{n}x{k}{name} {{
  static __device__ __forceinline__ void fma(uint64_t a, uint64_t b, {parameters},
                                             cute::SM90::GMMA::ScaleOut scale_d) {{
    asm volatile(
        "{{\\n"
        ".reg .pred p;\\n"
        "setp.ne.b32 p, %{count + 2}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{ptx_a}.{ptx_b} "
        "{{{registers}}}, "
        "%{count}, %{count + 1}, p, 1, 1{majors};\\n"
        "}}\\n"
        : {operands}
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(scale_d)){constants});
  }}
}};
"""


def register_atom(n: int, name: str, ptx_a: str, ptx_b: str, k: int) -> str:
    count = n // 2
    parameters, registers, operands = accumulators(count)
    a = [count + i for i in range(4)]
    words = ", ".join(f"uint32_t a{i}" for i in range(4))
    return f"""
struct Mma64x{n}x{k}{name}Registers {{
  static __device__ __forceinline__ void fma({words}, uint64_t b, {parameters},
                                             cute::SM90::GMMA::ScaleOut scale_d) {{
    asm volatile(
        "{{\\n"
        ".reg .pred p;\\n"
        "setp.ne.b32 p, %{count + 5}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{ptx_a}.{ptx_b} "
        "{{{registers}}}, "
        "{{%{a[0]}, %{a[1]}, %{a[2]}, %{a[3]}}}, %{count + 4}, p, 1, 1, 0;\\n"
        "}}\\n"
        : {operands}
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(static_cast<int32_t>(scale_d)));
  }}
}};
"""


def main() -> None:
    body = "".join(atom(n, *kind) for n in SHAPES for kind in TYPES)
    body += "".join(register_atom(n, *kind) for n in REGISTER_SHAPES for kind in TYPES[:2])
    path = pathlib.Path("csrc/common/wgmma_shapes.cuh")
    path.write_text(HEADER + body + "\n}  // namespace jaxmoe::ptx\n// clang-format on\n")


if __name__ == "__main__":
    main()
