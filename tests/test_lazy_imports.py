"""A library's submodule is imported where it is used: that another file happens to import it holds until a release.

`import package` brings those submodules alone that the package itself imports, which differs from version to version.
"""

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
IMPORT = re.compile(r"^ *import ", re.M)
"""Without one, a source reaches no submodule by its package."""
WHOLE = {
    "numpy": {"random"},
    "torch": {"compiler", "cpu", "cuda", "nn", "onnx", "optim", "utils", "version", "_C"},
    "triton.language": {"math"},
}
"""Submodules that a package's reference documents as attributes of `import package` alone."""


def unimported(source: str) -> Iterator[str]:
    """Submodules that a source reaches by an attribute of their package, and imports nowhere."""
    nodes = list(ast.walk(ast.parse(source)))
    packages: dict[str | None, str] = {}
    imported = set()
    for alias in (alias for node in nodes if isinstance(node, ast.Import) for alias in node.names):
        top = alias.name.partition(".")[0]
        packages[alias.asname or top] = alias.name if alias.asname else top
        imported.add(alias.name)
    for node in (node for node in nodes if isinstance(node, ast.Attribute)):
        root, *attributes = attribute_chain(node)
        name = packages.get(root)
        for attribute in attributes if name is not None else ():
            if attribute in WHOLE.get(name, ()):
                break
            name = f"{name}.{attribute}"
            if not is_module(name):
                break
            if not any(found == name or found.startswith(f"{name}.") for found in imported):
                yield name


def attribute_chain(node: ast.AST) -> list[str | None]:
    """`a.b.c` as its words; [None] for what is no such chain."""
    words: list[str | None] = []
    while isinstance(node, ast.Attribute):
        words.append(node.attr)
        node = node.value
    return [node.id, *reversed(words)] if isinstance(node, ast.Name) else [None]


@cache
def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, AttributeError, ValueError):
        return False


@pytest.mark.parametrize("layer", ["kernels", "runtime", "cluster", "deployments"])
def test_submodules_are_imported_by_the_file_that_uses_them(layer: str):
    texts = {file: file.read_text(encoding="utf-8") for file in (ROOT / layer).rglob("*.py")}
    found = {file: unimported(text) for file, text in texts.items() if IMPORT.search(text)}
    wrong = {f"{file.relative_to(ROOT)}: {name}" for file, names in found.items() for name in names}
    assert not wrong, "\n".join(sorted(wrong))


def test_the_rule_sees_what_it_forbids():
    assert set(unimported("import xml\nxml.dom.minidom")) == {"xml.dom", "xml.dom.minidom"}
    assert set(unimported("import xml as x\nx.dom")) == {"xml.dom"}
    assert not set(unimported("import xml.dom\nxml.dom.Node"))
    assert not set(unimported("from xml import dom\ndom.Node"))


WITHOUT = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"pydantic", "ray", "tensorrt", "fastapi", "typer"}:
            raise ModuleNotFoundError(f"{name} is not there")

sys.meta_path.insert(0, Without())
from wingbeat.kernels.parts import PARTS as kernels, hooks_of
from wingbeat.runtime.parts import PARTS as runtime
hooks_of("wingbeat.kernels", kernels, "none")
hooks_of("wingbeat.runtime", runtime, "none")
"""


def test_optional_parts_of_an_engine_need_torch_and_transformers_alone():
    """A machine for measurements with a GPU has no more, and imports all parts at the first hook."""
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
