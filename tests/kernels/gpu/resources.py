"""GPU resources of compiled kernels: registers, spilled bytes and shared memory.

As a program, `resources.py [CAPABILITY ...]` compiles every variant and prints the table of
`benchmarks/results/gpu_kernel_resources.md`.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
CAPABILITIES = (80, 86, 89, 90, 100, 120)
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


class Resources(NamedTuple):
    """Resources of a compiled variant of a kernel."""

    kernel: str
    variant: str
    registers: int
    """Registers per thread."""
    spilled_bytes: int
    """Bytes that spill from registers to local memory, per thread."""
    shared_bytes: int
    """Bytes of shared memory per program."""
    num_warps: int
    instructions: dict[str, int]
    """Counts of the PTX instructions that the compiling program looks for."""


@cache
def _dumper() -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def report(variant: str, compiled: Any) -> None:
    """Print the resources of a kernel that Triton compiled, as a JSON object."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([_dumper(), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, spilled = map(int, _USAGE.search(usage).groups())
    ptx, metadata = compiled.asm["ptx"], compiled.metadata
    instructions = {
        "warpgroup products": ptx.count("wgmma.mma_async") + ptx.count("tcgen05.mma"),
        "copies of 16 bytes": ptx.count("cp.async.cg.shared.global") + ptx.count("ld.global.v4.b32"),
        "barriers": ptx.count("bar.sync"),
        "looks before its wait": int(_looks_before_its_wait(ptx)),
    }
    kernel = compiled.src.name.strip("_").removesuffix("_kernel")
    print(
        json.dumps([kernel, variant, registers, spilled, metadata.shared, metadata.num_warps, instructions]), flush=True
    )


def _looks_before_its_wait(ptx: str) -> bool:
    """Whether anything global is read or written before the launch ahead has been waited for."""
    looks = re.search(r"\b(?:(?:ld|st|atom|red)(?:\.\w+)*\.global|cp\.async(?!\.(?:commit|wait)))", ptx)
    waits = ptx.find("griddepcontrol.wait")
    return looks is not None and not 0 <= waits < looks.start()


def compiled(program: str, *arguments: str, cache_dir: str | None = None) -> list[Resources]:
    """Resources that `program`, a script beside this file, prints.

    Args:
        cache_dir: of Triton; None is the user's own.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    if cache_dir is not None:
        environment["TRITON_CACHE_DIR"] = cache_dir
    command = [sys.executable, str(FOLDER / program), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [Resources(*json.loads(line)) for line in done.stdout.splitlines() if line.startswith("[")]


def every(capability: int) -> list[Resources]:
    """Resources of every variant of every kernel."""
    return compiled("compile_attention.py", str(capability), "every") + compiled("compile_launches.py", str(capability))


def table(measured: dict[int, list[Resources]]) -> Iterable[str]:
    """Lines of Markdown: the most that any variant takes of each attention tile, and of each capability."""
    yield "| registers / bytes spilled / bytes shared | " + " | ".join(map(str, measured)) + " |"
    yield "| --- |" + " --- |" * len(measured)
    rows: dict[str, dict[int, list[Resources]]] = {}
    for capability, resources in measured.items():
        for one in resources:
            rows.setdefault(_row(one), {}).setdefault(capability, []).append(one)
    for name in sorted(rows, key=_numbers):
        yield f"| {name} | " + " | ".join(_cell(rows[name].get(capability, [])) for capability in measured) + " |"


def _numbers(name: str) -> tuple[bool, list[int]]:
    return "attention" not in name, [int(word) for word in re.findall(r"\d+", name)]


def _row(one: Resources) -> str:
    if one.kernel in {"few_rows_product", "embed_to_heads"}:
        return "products of few rows"
    if one.kernel != "tree_attention":
        return "any other kernel"
    dtype, dim, height = one.variant.split(", ")[:3]
    kind = "32-bit" if dtype == "float32" else "16-bit"
    padded = next((f"dim {size}" for size in (64, 128, 256) if size >= int(dim.split()[1])), "latents")
    return f"attention, {kind}, {padded}, {height}"


def _cell(resources: list[Resources]) -> str:
    if not resources:
        return "-"
    most = [max(one[at] for one in resources) for at in (2, 3, 4)]
    return " / ".join(map(str, most))


if __name__ == "__main__":
    capabilities = tuple(map(int, sys.argv[1:])) or CAPABILITIES
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for line in table(dict(zip(capabilities, pool.map(every, capabilities), strict=True))):
            print(line)
