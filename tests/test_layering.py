"""Arrows point one way: kernels <- runtime <- cluster <- deployments."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("kernels", "runtime", "cluster", "deployments")
KERNEL_LIBRARIES = {"torch", "triton"}
CLUSTER_FILES_WITH_RAY = {"placement.py", "autoscaling.py"}
HTTP_LIBRARIES = {"fastapi", "starlette", "uvicorn", "httpx", "aiohttp", "requests"}
SOURCES = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]


def imported_modules(path: Path) -> Iterator[str]:
    """Absolute names a file imports, at the top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_keep_to_the_layers_below(path: Path):
    layer = path.relative_to(ROOT).parts[0]
    forbidden = LAYERS[LAYERS.index(layer) + 1 :]
    for module in imported_modules(path):
        top, _, rest = module.partition(".")
        if top == "wingbeat":
            assert rest.split(".")[0] not in forbidden, f"{path} imports {module}"
        else:
            assert top not in ("tests", "benchmarks", "examples", *LAYERS), f"{path} imports {module}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_layer_keeps_to_its_libraries(path: Path):
    layer = path.relative_to(ROOT).parts[0]
    libraries = {module.partition(".")[0] for module in imported_modules(path)} - {"wingbeat"}
    if layer == "kernels":
        assert libraries <= KERNEL_LIBRARIES | sys.stdlib_module_names
    if layer != "deployments":
        assert not libraries & HTTP_LIBRARIES
        assert "ray" not in libraries or (path.name in CLUSTER_FILES_WITH_RAY and layer == "cluster")


def test_the_layers_hold_files():
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == set(LAYERS)
