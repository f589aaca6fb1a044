"""The arrows between rooms: what each may import, and that nothing is imported in a circle.

A room is a folder below a layer, or a file that stands alone in a layer; a large room has its folders as rooms. Imports
inside functions count, and so do strings that name a module of ours, such as the path of a factory.
"""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grimp
import pytest

from tests.rooms import DEEP, MAY_IMPORT, ROOMS_WITH_RAY

ROOT = Path(__file__).parents[1]
LAYERS = ("kernels", "runtime", "cluster", "deployments")
LIBRARIES_OF_KERNELS = {"torch", "triton"} | sys.stdlib_module_names
HTTP_LIBRARIES = {"fastapi", "starlette", "uvicorn", "httpx", "aiohttp", "requests"}

IMPORT_PATH = re.compile(r"wingbeat(\.\w+)+(:\w+)?")


def modules() -> dict[str, Path]:
    """Every file by its import name; the package's own is `wingbeat.__init__`."""
    paths = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]
    named = {"wingbeat." + ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    return named | {"wingbeat.__init__": ROOT / "src" / "wingbeat" / "__init__.py"}


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Of a file's syntax tree, parents first."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def imported_names(path: Path) -> tuple[str, ...]:
    """Absolute names a file imports, anywhere in it, and names of ours that stand in its strings alone."""
    return tuple(_imported_names(path))


def _imported_names(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
    yield from strings_of(path)


def strings_of(path: Path) -> Iterator[str]:
    """Names of ours that a file has as strings."""
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and IMPORT_PATH.fullmatch(node.value):
            yield node.value.replace(":", ".")


def module_of(name: str, known: dict[str, Path]) -> str | None:
    """The module that a name lies in; None for a package."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


def room_of(module: str) -> str:
    """`runtime.engine` for `wingbeat.runtime.engine.drafter_client`; folders of `DEEP` are rooms of their own."""
    parts = module.split(".")[1:-1] or module.split(".")[1:]
    room = ".".join(module.split(".")[1:3])
    return ".".join(parts[:3]) if room in DEEP else room


def arrows() -> dict[str, set[str]]:
    """Module -> modules of ours that it imports."""
    known = modules()
    found = {module: {module_of(name, known) for name in imported_names(path)} for module, path in known.items()}
    return {module: targets - {None, module} for module, targets in found.items()}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other."""
    reach = {node: set(targets) for node, targets in graph.items()}
    for via in graph:
        for node in graph:
            if via in reach[node]:
                reach[node] |= reach[via]
    groups = {tuple(sorted(b for b in reach[a] if a in reach[b])) for a in graph if a in reach[a]}
    return [list(group) for group in sorted(groups)]


def test_each_room_imports_only_what_it_may():
    wrong = []
    for module, path in modules().items():
        room, layer = room_of(module), module.split(".")[1]
        libraries = {name.partition(".")[0] for name in imported_names(path)} - {"wingbeat"}
        if layer == "kernels":
            wrong += [f"{module} imports {library}" for library in sorted(libraries - LIBRARIES_OF_KERNELS)]
        if layer != "deployments":
            wrong += [f"{module} imports {library}" for library in sorted(libraries & HTTP_LIBRARIES)]
            wrong += [f"{module} imports ray"] if "ray" in libraries and room not in ROOMS_WITH_RAY else []
        wrong += [f"{module} imports {top}" for top in sorted(libraries & {"tests", "benchmarks", "examples", *LAYERS})]
    for module, targets in arrows().items():
        allowed = MAY_IMPORT[room_of(module)] | {room_of(module)}
        wrong += [f"{module} imports {target}" for target in sorted(targets) if room_of(target) not in allowed]
    assert not wrong, "\n".join(wrong)


def test_no_room_may_import_what_it_does_not():
    used: dict[str, set[str]] = {room: set() for room in MAY_IMPORT}
    for module, targets in arrows().items():
        used[room_of(module)] |= {room_of(target) for target in targets} - {room_of(module)}
    assert used == MAY_IMPORT


@pytest.mark.slow
def test_an_import_graph_by_a_common_tool_has_the_same_arrows():
    """But for those of strings, which no tool sees, and of the package's own file, which is no part of its roots."""
    graph = grimp.build_graph(*(f"wingbeat.{layer}" for layer in LAYERS), cache_dir=None)
    ours = {module: targets for module, targets in arrows().items() if module != "wingbeat.__init__"}
    for module, targets in ours.items():
        theirs = graph.find_modules_directly_imported_by(module.removesuffix(".__init__"))
        assert theirs <= targets, module
        assert targets - theirs <= {module_of(name, modules()) for name in strings_of(modules()[module])}, module


def test_nothing_is_imported_in_a_circle():
    by_file = arrows()
    by_room: dict[str, set[str]] = {room_of(module): set() for module in by_file}
    for module, targets in by_file.items():
        by_room[room_of(module)] |= {room_of(target) for target in targets} - {room_of(module)}
    assert not circles(by_file)
    assert not circles(by_room)
