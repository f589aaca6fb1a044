"""Names that prose has in backticks exist: files, modules, classes, functions, fields.

A word exists if any code of this repository has it. So removed names are found without a list of ours or of a library's
names.
"""

import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("kernels", "runtime", "cluster", "deployments")
FOLDERS = (*LAYERS, "src/wingbeat", "tests", "benchmarks", "examples")
QUOTED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FILE = re.compile(r"[\w/][\w./-]*\.(?:py|md|sh|yaml|cpp|h|toml)")
NAME = re.compile(r"\w+(?:\.\w+)*(?:\(\))?")
SOURCE_NAMES = re.compile(r"_|\.|[a-z][A-Z]")
DOCUMENT_NAMES = re.compile(r"^[a-z]\w*\.\w|^[A-Z][a-z]+[A-Z]\w+")
"""Files are looked for in any case; other words of a document may be a shell's, a proxy's or Prometheus'."""
TOKENS = re.compile(
    r'''^[ \t]*r?"""(?P<statement>(?:\\.|[^\\])*?)"""|"""(?:\\.|[^\\])*?"""'''
    r"""|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|(?P<comment>\#[^\n]*)""",
    re.M | re.S,
)
"""Strings and comments of a source; a statement is a string that begins its line."""


@cache
def libraries() -> frozenset[str]:
    """Top-level names of what is installed."""
    return sys.stdlib_module_names | packages_distributions().keys() - {"wingbeat", *FOLDERS}


@cache
def paths() -> dict[str, list[Path]]:
    """The files of the repository by every end of their paths."""
    found = [path for folder in (*FOLDERS, "docs", "constraints") for path in (ROOT / folder).rglob("*.*")]
    by_end: dict[str, list[Path]] = {}
    for path in (*found, *ROOT.glob("*.*")):
        parts = path.relative_to(ROOT).parts
        for start in range(len(parts)):
            by_end.setdefault("/".join(parts[start:]), []).append(path)
    return by_end


@cache
def text_of(path: Path) -> str:
    """Text of a file; cached, as many names are looked up in it."""
    return path.read_text(encoding="utf-8")


def prose_of(path: Path) -> str:
    """A document without its blocks of code; of a source, its comments and the strings that are statements."""
    text = text_of(path)
    if path.suffix == ".md":
        return re.sub(r"```.*?```", "", text, flags=re.S)
    return "\n".join(token["statement"] or token["comment"] or "" for token in TOKENS.finditer(text))


def code_of(path: Path) -> str:
    """A source without its prose."""
    return TOKENS.sub(lambda token: token[0] if token["statement"] is token["comment"] is None else "", text_of(path))


@cache
def words() -> frozenset[str]:
    """Words of all code, strings included, and of file names."""
    texts = "\n".join(path.partition(".")[0] for path in paths())
    found = set(re.findall(r"\w+", texts))
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        found.update(re.findall(r"\w+", code_of(path)))
    return frozenset(found)


def has(file: Path, name: str) -> bool:
    """Whether a file has all words of a dotted name."""
    text = text_of(file)
    return all(re.search(rf"\b{re.escape(word)}\b", text) for word in re.findall(r"\w+", name))


def is_there(name: str) -> bool:
    """Whether a name exists: each part of our dotted names in the part before; the words of any other name."""
    parts, folder = name.removesuffix("()").removeprefix("wingbeat.").split("."), ROOT
    if parts[0] in libraries():
        return True
    while len(parts) > 1 and parts[0] in (LAYERS if folder == ROOT else (path.name for path in folder.iterdir())):
        folder /= parts.pop(0)
    if folder == ROOT or (folder / parts[0]).is_dir():
        return words().issuperset(parts)
    file = folder / f"{parts[0]}.py"
    return file.is_file() and (len(parts) == 1 or has(file, ".".join(parts[1:])))


def missing(prose: str, folder: Path, names: re.Pattern[str]) -> Iterator[str]:
    """Names in `prose` that do not exist.

    Args:
        folder: that the prose lies in, for relative paths.
        names: those that must be ours, or in our code.
    """
    for quoted in QUOTED.findall(prose):
        file, _, name = quoted.partition(": ")
        if FILE.fullmatch(file):
            found = paths().get(file, [folder / file])
            if not file.startswith("/") and not any(path.exists() and has(path, name) for path in found):
                yield quoted
        elif NAME.fullmatch(quoted) and names.search(quoted) and not is_there(quoted):
            yield quoted


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_sources_name_is_there(folder: str) -> None:
    files = [path for path in sorted((ROOT / folder).rglob("*.py")) if path != Path(__file__)]
    assert files
    assert not {f"{path}: {name}" for path in files for name in missing(prose_of(path), path.parent, SOURCE_NAMES)}


def test_what_documents_name_is_there() -> None:
    files = [path for folder in ("docs", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.md")]
    found = {path: list(missing(prose_of(path), path.parent, DOCUMENT_NAMES)) for path in (*files, *ROOT.glob("*.md"))}
    assert not {path: gone for path, gone in found.items() if gone}


@pytest.mark.parametrize(
    ("prose", "gone"),
    [
        (
            "`runtime/engine/engine.py: Engine.step` `engine.py` `runtime.engine.engine.Engine` `Engine.step()`",
            0,
        ),
        ("`runtime.engine.no_such` `kernels.kv.reference.no_such` `wingbeat.no_such`", 3),
        ("`runtime/no_such.py` `no_such.py` `runtime/engine/engine.py: Engine.no_such`", 3),
        ("`no_such` `NoSuch` `Scheduler.no_such` `no_such()`", 4),
        ("`torch.no_such` `x` `no such`", 0),
    ],
)
def test_the_rule_sees_what_it_forbids(prose: str, gone: int) -> None:
    # Joined here, as the words of this file are words of the code.
    joined = prose.replace("no_such", "no_" * 2 + "such").replace("NoSuch", "No" * 2 + "Such")
    assert len(list(missing(joined, ROOT, SOURCE_NAMES))) == gone
