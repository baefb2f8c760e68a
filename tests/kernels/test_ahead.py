"""Triton's kernels compile for GPUs that are not there: on tensor cores, without spills, within shared memory."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dash_shampoo.kernels import fused

triton = pytest.importorskip("triton")

# The least shared memory per block of a generation's GPUs, those for desktops too.
SHARED = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10}
INSTRUCTION = {80: r"mma\.sync", 90: r"wgmma\.mma_async", 100: r"tcgen05\.mma"}
CASES = [("mirrored", "fp16x3"), ("mirrored", "fp16"), ("full", "fp16x3"), ("accumulate", "tf32")]


class Compiled(NamedTuple):
    """What a kernel takes."""

    instructions: int  # of tensor cores, in the program's text
    spilled: int  # bytes of registers that do not fit
    shared: int  # bytes


def disassembler() -> str:
    for name in ("cuobjdump", "*/cuobjdump"):
        found = [*Path(triton.__file__).parent.rglob(name)]
        if found:
            return str(found[0])
    return shutil.which("cuobjdump") or pytest.skip("cuobjdump is not there")


def compile_for(architecture: int, kind: str, precision: str, folder: Path) -> Compiled:
    """A kernel for rows that are aligned, as those of every size that 16 divides are."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from dash_shampoo.kernels import jit

    kernel: Any = jit.accumulate_kernel if kind == "accumulate" else jit.product_kernel
    tile, warps = fused.launch(precision, 1024, architecture // 10)
    constants: dict[str, Any] = {"PRECISION": precision, "TILE": tile, "INNER": fused.INNER}
    constants |= {"MIRRORED": kind == "mirrored", "ADD": True} if kind != "accumulate" else {"keep_batch": 1}
    signature, aligned = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name.endswith("_column"):
            constants[name] = 1
        if name in constants:
            signature[name] = "constexpr"
            continue
        pointer, number = name.endswith("_ptr"), name in ("alpha", "beta", "shift")
        signature[name] = "*fp32" if pointer else "fp32" if number else "i64" if name.endswith("_batch") else "i32"
        if not number:
            aligned[(place,)] = [["tt.divisibility", 16]]
    compiled = compile(
        ASTSource(kernel, signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": warps, "num_stages": fused.STAGES, "enable_fp_fusion": True},
    )
    file = folder / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run([disassembler(), "-res-usage", file], capture_output=True, text=True, check=True).stdout
    numbers = {name: int(value) for name, value in re.findall(r"(STACK|LOCAL):(\d+)", usage)}
    count = len(re.findall(INSTRUCTION[architecture], compiled.asm["ptx"]))
    return Compiled(count, numbers["STACK"] + numbers["LOCAL"], compiled.metadata.shared)


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize(("kind", "precision"), CASES)
def test_kernels_run_on_tensor_cores_and_keep_to_their_registers(
    tmp_path: Path, architecture: int, kind: str, precision: str
) -> None:
    found = compile_for(architecture, kind, precision, tmp_path)
    tile, warps = fused.launch(precision, 1024, architecture // 10)
    depth = 8 if precision == "tf32" else 16  # of one instruction
    steps = fused.INNER // depth * (3 if precision == "fp16x3" else 1)
    each = {
        80: tile * tile // (16 * 8) // warps,  # m16n8 of each warp
        90: tile // 64 // (warps // 4),  # m64 by the tile's width, of four warps
        100: 1,  # the tile; copies of the loop's ends come on top
    }[architecture]
    if architecture == 100:
        assert found.instructions >= steps
    else:
        assert found.instructions == steps * each
    assert found.spilled == 0
    assert 0 < found.shared <= SHARED[architecture]
