"""Leave one ordering instruction out of a compiled kernel at a time, and see whether the machine notices.

A program of its own, `mutations.py CAPABILITY`: prints one JSON object for each instruction that was left out. An
instruction that is never missed is either needless in that kernel or beyond the machine; `test_mutations` counts them.
"""

import json
import sys
from collections.abc import Callable

import torch

from tests.kernels.attention_cases import NAN, Case, assert_close, build, by_formula
from tests.ptx.launch import executing
from tests.ptx.machine import Fault
from tests.ptx.program import Program
from wingbeat.kernels.gpu import kv as triton_kv
from wingbeat.kernels.gpu.attention import launch as triton_attention
from wingbeat.kernels.gpu.attention.splits import Splits
from wingbeat.kernels.gpu.attention.tiles import TileConfig

SEEDS = 3
ORDERING = {"bar": ("sync",), "cp": ("async", "wait_group"), "wgmma": ("wait_group",)}


def orders(opcode: tuple[str, ...]) -> bool:
    """Whether an instruction is there to order others."""
    return opcode[0] in ORDERING and set(ORDERING[opcode[0]]) <= set(opcode)


def attention(block_rows: int, block_keys: int, stages: int, dtype: torch.dtype) -> Callable[[], None]:
    """The attention kernel over a context of several tiles of keys."""
    rows = {"num_query": block_rows // 2}
    inputs = build(Case((100,), heads=(2, 1), dims=(64, 64), block_size=16, dtype=dtype, **rows), poison=NAN)
    expected = by_formula(inputs)

    def check() -> None:
        query = inputs.arguments[0]
        config, whole = TileConfig(block_rows, block_keys, 4, stages, 0), Splits(1, block_keys)
        out = triton_attention.tree_attention(
            *inputs.arguments, **inputs.options, out=torch.full_like(query, NAN), config=config, splits=whole
        )
        assert_close(out, expected)

    return check


def moves() -> None:
    """A chain of moves of KV rows that overwrites its own sources."""
    cache = torch.arange(6 * 4 * 64.0).view(6, 4, 1, 64).clone()
    sources, targets = torch.tensor([[9, 10, 13]]), torch.tensor([[8, 9, 10]])
    expected = cache.flatten(0, 1).clone()
    expected[targets[0]] = expected[sources[0]].clone()
    caches = [(cache, cache.clone())]
    launches.reachable[:] = caches[0]
    triton_kv.move_kv(caches, sources, targets)
    assert torch.equal(cache.flatten(0, 1), expected)


CASES = {
    "tree_attention_kernel": attention(64, 32, 3, torch.bfloat16),
    "_move_kv_kernel": moves,
}


def noticed(check: Callable[[], None], mutation: Callable[[str, Program], list[int]]) -> str | None:
    """Fault or failed check that a mutation causes; None if no seed shows any."""
    launches.without = mutation
    for seed in range(SEEDS):
        launches.machines.clear()
        launches.counts["seed"] = seed
        try:
            check()
        except Fault as fault:
            return str(fault).split(" [")[0]
        except AssertionError:
            return "another result"
    return None


def main() -> None:
    """Every ordering instruction of every case, one at a time."""
    for kernel, check in CASES.items():
        found: list[int] = []

        def look(name: str, program: Program, kernel: str = kernel, found: list[int] = found) -> list[int]:
            if name == kernel and not found:
                found += [at for at, it in enumerate(program.text.statements) if orders(it.opcode)]
            return []

        told = noticed(check, look)
        if told is not None:
            raise SystemExit(f"{kernel} is wrong as it is: {told}")
        for at in found:
            result = noticed(check, lambda name, _, at=at, kernel=kernel: [at] if name == kernel else [])
            print(json.dumps({"kernel": kernel, "instruction": at, "noticed": result}), flush=True)


if __name__ == "__main__":
    with executing(int(sys.argv[1])) as launches:
        main()
