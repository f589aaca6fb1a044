"""Parts of PTX instructions, by the names that the machine has for them."""

import re
from collections.abc import Sequence

from tests.ptx.statements import PtxError, Statement


def program_line(
    kind: str,
    name: str,
    guard: int = -1,
    negated: bool = False,
    target: int = -1,
    operands: Sequence[int] = (),
    numbers: Sequence[int] = (),
) -> str:
    """See `ptx_program` in machine/run.cpp."""
    return " ".join(
        map(str, (kind, name, guard, int(negated), target, len(operands), *operands, len(numbers), *numbers))
    )


def machine_name(base: str, parts: Sequence[str]) -> str:
    """Name of an instruction in the machine.

    The flushing of subnormals stands right before the type, and bits have the type of unsigned numbers.
    """
    *middle, kind = parts
    flushes = ["ftz"] if "ftz" in middle else []
    kind = f"u{kind[1:]}" if kind[0] == "b" and kind[1:].isdigit() else kind
    return ".".join([base, *(part for part in middle if part != "ftz"), *flushes, kind])


def bits_of(kind: str) -> int:
    """Bits of a register of a type; of a pair, both."""
    if kind == "pred":
        return 8
    bits = re.search(r"(\d+)(x2)?$", kind)
    if bits is None or kind in ("e4m3", "e5m2"):
        return 8
    return int(bits[1]) * (2 if bits[2] else 1)


def space_of(it: Statement) -> str:
    """Where an access goes; raises PtxError where the machine has no such memory."""
    spaces = {"global": "global", "shared": "shared", "shared@cta": "shared", "param": "param"}
    found = [spaces[part] for part in it.opcode if part in spaces]
    if len(found) != 1:
        raise PtxError(f"unknown: {it.text}")
    return found[0]


def parts_of(text: str) -> list[str]:
    """Parts of `{a, b}`."""
    return [part.strip() for part in text.strip("{} ").split(",")] if text.startswith("{") else [text]
