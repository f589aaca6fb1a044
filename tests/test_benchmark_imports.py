"""Every benchmark starts by the one way that `benchmarks/README.md` names: `.venv/bin/python benchmarks/NAME.py`.

A script's own folder is all that is on its path, beside what is installed. The check reads the files and runs none.
"""

import ast
from pathlib import Path

import pytest

from tests.optional import belongs_to_deleted

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
FILES = sorted(BENCHMARKS.glob("*.py"))
OF_THE_CHECKOUT = {path.name for path in BENCHMARKS.parent.iterdir() if path.is_dir()}
"""Folders that a script could import from the root alone."""


def imports(path: Path) -> list[tuple[str, list[str]]]:
    """Modules that a file imports anywhere, and what it takes out of each."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name} imports relatively"
            found.append((node.module, [alias.name for alias in node.names]))
        elif isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names]
    return found


def defined(path: Path) -> set[str]:
    """Names at the top of a file."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.Import | ast.ImportFrom):
            names |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
            names |= {alias.asname or alias.name for alias in getattr(node, "names", [])}
    return names


def is_script(path: Path) -> bool:
    return "__main__" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_benchmark_imports_from_its_own_folder_and_from_what_is_installed(path: Path) -> None:
    for module, names in imports(path):
        assert module.partition(".")[0] not in OF_THE_CHECKOUT, f"{module} is not on its path"
        sibling = BENCHMARKS / f"{module}.py"
        if sibling.is_file():
            assert set(names) <= defined(sibling)


def test_every_script_has_options_and_a_row_and_every_row_a_script() -> None:
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    rows = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")} - {"gpu/run.sh"}
    scripts = {path.name for path in FILES if is_script(path)}
    assert {row for row in rows if not belongs_to_deleted(f"benchmarks/{row}")} == scripts
    assert [path.name for path in FILES if is_script(path) and "ArgumentParser" not in path.read_text("utf-8")] == []


def test_every_file_is_a_script_or_serves_one() -> None:
    used = {module for path in FILES for module, _ in imports(path)}
    assert [path.stem for path in FILES if not is_script(path) and path.stem not in used] == []
