"""The text of a PTX kernel as statements: what is declared, and its instructions with their operands as written."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_DEBUG = re.compile(r"^\s*\.(loc|file|pragma)\b[^\n]*$", re.MULTILINE)
_LABEL = re.compile(r"([\w$]+)\s*:\s*")
_GUARDED = re.compile(r"@(!?)(%?[\w$]+)\s+(.*)", re.DOTALL)
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+([%\w$]+?)(?:<(\d+)>)?$")
WIDTHS = {"pred": 8, "b16": 16, "f16": 16, "u16": 16, "s16": 16, "b32": 32, "f32": 32, "u32": 32, "s32": 32}
WIDTHS |= {"b64": 64, "f64": 64, "u64": 64, "s64": 64}


class PtxError(ValueError):
    """PTX that is not understood; names what."""


class Register(NamedTuple):
    """A register of one scope."""

    index: int
    width: int


@dataclass(frozen=True)
class Statement:
    """An instruction as written."""

    opcode: tuple[str, ...]
    """Its parts between dots; what stands behind `::` belongs to the part before it."""
    operands: tuple[str, ...]
    guard: str | None
    negated: bool
    registers: dict[str, Register]
    """Registers of the statement's scope."""
    text: str


@dataclass
class Text:
    """A kernel as written."""

    name: str
    parameters: list[str]
    num_threads: int
    statements: list[Statement] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    """By name, the number of the statement behind it."""
    num_registers: int = 0


def read(ptx: str) -> Text:
    """The only kernel of a PTX module.

    Raises:
        PtxError: there is none, or its shape is not known.
    """
    source = _DEBUG.sub("", _COMMENT.sub("", ptx))
    entry = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", source, re.DOTALL)
    if entry is None:
        raise PtxError("no kernel")
    name, parameters, bounds = entry.groups()
    threads = re.search(r"\.(?:reqntid|maxntid)\s+([\d,\s]+)", bounds)
    if threads is None:
        raise PtxError(f"{name} does not say how many threads it has")
    sizes = [int(size) for size in threads[1].replace(",", " ").split()]
    names = [part.split()[-1] for part in parameters.split(",") if part.strip()]
    text = Text(name, names, sizes[0] * (sizes[1] if sizes[1:] else 1) * (sizes[2] if sizes[2:] else 1))
    scopes: list[dict[str, Register]] = [{}]
    for part in _parts(source[entry.end() :]):
        if part == "{":
            scopes.append(dict(scopes[-1]))
        elif part == "}":
            scopes.pop()
            if not scopes:
                return text
        elif part.startswith(".reg"):
            _declare(part, scopes[-1], text)
        elif part.endswith(":"):
            text.labels[part[:-1]] = len(text.statements)
        elif part.startswith("."):
            raise PtxError(f"{name} declares {part!r}")
        else:
            text.statements.append(_statement(part, scopes[-1]))
    raise PtxError(f"{name} has no end")


def _parts(body: str) -> Iterator[str]:
    """Labels with their colon, braces of scopes, and statements without their semicolon."""
    at = 0
    while at < len(body):
        if body[at].isspace() or body[at] == ";":
            at += 1
        elif body[at] in "{}":
            yield body[at]
            at += 1
        elif label := _LABEL.match(body, at):
            yield f"{label[1]}:"
            at = label.end()
        else:
            end = body.index(";", at)
            yield " ".join(body[at:end].split())
            at = end + 1


def _declare(part: str, scope: dict[str, Register], text: Text) -> None:
    for declared in part.removeprefix(".reg").split(","):
        found = _REGISTERS.match(f".reg {declared.strip()}")
        if found is None or found[1] not in WIDTHS:
            raise PtxError(f"{text.name} declares {part!r}")
        names = [found[2]] if found[3] is None else [f"{found[2]}{number}" for number in range(int(found[3]))]
        for name in names:
            scope[name] = Register(text.num_registers, WIDTHS[found[1]])
            text.num_registers += 1


def _statement(part: str, scope: dict[str, Register]) -> Statement:
    guard, negated, rest = None, False, part
    if guarded := _GUARDED.match(part):
        negated, guard, rest = guarded[1] == "!", guarded[2], guarded[3]
    opcode, _, operands = rest.partition(" ")
    parts = tuple(opcode.replace("::", "@").split("."))
    return Statement(parts, tuple(_split(operands)), guard, negated, scope, part)


def _split(operands: str) -> Iterator[str]:
    """Between commas that are in no brackets."""
    depth, current = 0, ""
    for character in operands:
        depth += (character in "{[(") - (character in "}])")
        if character == "," and depth == 0:
            yield current.strip()
            current = ""
        else:
            current += character
    if current.strip():
        yield current.strip()
