"""A library's submodule is imported where it is used: that another file happens to import it holds until a release.

`import package` brings those submodules alone that the package itself imports, which differs from version to version.
"""

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [path for layer in ("kernels", "runtime", "cluster", "deployments") for path in (ROOT / layer).rglob("*.py")]
WHOLE = {
    "numpy": {"random"},
    "torch": {"compiler", "cpu", "cuda", "nn", "onnx", "optim", "utils", "version", "_C"},
    "triton.language": {"math"},
}
"""What a package's reference documents as attributes of `import package` alone."""


def unimported(source: str) -> Iterator[str]:
    """Submodules that a source reaches by an attribute of their package, and imports nowhere."""
    tree = ast.parse(source)
    packages: dict[str | None, str] = {}
    imported = set()
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, ast.Import) else ():
            packages[alias.asname or alias.name.partition(".")[0]] = (
                alias.name if alias.asname else alias.name.partition(".")[0]
            )
            imported.add(alias.name)
    for node in ast.walk(tree):
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
    files = sorted((ROOT / layer).rglob("*.py"))
    wrong = {f"{file.relative_to(ROOT)}: {name}" for file in files for name in unimported(file.read_text())}
    assert not wrong, "\n".join(sorted(wrong))


def test_the_rule_sees_what_it_forbids():
    assert set(unimported("import xml\nxml.dom.minidom")) == {"xml.dom", "xml.dom.minidom"}
    assert set(unimported("import xml as x\nx.dom")) == {"xml.dom"}
    assert not set(unimported("import xml.dom\nxml.dom.Node"))
    assert not set(unimported("from xml import dom\ndom.Node"))
