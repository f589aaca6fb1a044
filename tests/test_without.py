"""`tests.without` sees what a deletion leaves behind, and no feature is looked for outside of the one table."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import needs
from tests.optional import FEATURES, belongs_to_deleted, without
from tests.without import LAYERS, ROOT, Broken, check_links, files_of
from wingbeat.deployments.parts import PARTS
from wingbeat.runtime.parts import PARTS as RUNTIME_PARTS

LIBRARIES = {"deployments/media/opening.py"}
"""Files that import ours under `try`, for a library that an environment need not have: Pillow or soundfile, Triton."""


@pytest.mark.parametrize("name", [name for name, one in FEATURES.items() if any(ROOT.glob(one.paths[0]))])
def test_no_import_is_left_behind(name: str):
    check_links(ROOT, files_of(without({name})))


def test_every_part_is_a_feature():
    parts = [f"deployments.{part}" for part in PARTS] + [f"runtime.{part}" for part in RUNTIME_PARTS]
    folders = {part.replace(".", "/") for part in parts}
    assert folders <= {path for one in FEATURES.values() for path in one.paths}


TREE = {
    "deployments/page/__init__.py": "",
    "deployments/page/part.py": "",
    "deployments/front.py": "import WB.runtime.text",
    "runtime/text.py": "",
    "tests/page/test_page.py": "from WB.deployments.page import part",
}


@pytest.mark.parametrize(
    ("path", "source", "said"),
    [
        ("deployments/front.py", "from WB.deployments.page.part import a", "WB.deployments.page.part.a"),
        ("deployments/front.py", "from WB.deployments.page import part", "WB.deployments.page.part"),
        ("deployments/front.py", "def f():\n    import WB.deployments.page", "WB.deployments.page"),
        ("deployments/front.py", "PATH = 'WB.deployments.page.part:a'", "WB.deployments.page.part.a"),
        ("tests/test_front.py", "from tests.page.test_page import x", "tests.page.test_page.x"),
        ("tests/test_front.py", "from .page import test_page", "tests.page.test_page"),
        ("benchmarks/load.py", "import bench_page", "bench_page"),
        ("tests/other/test_page.py", "from WB.deployments.page import part", "WB.deployments.page.part"),
    ],
    ids=["name", "module", "late", "string", "test", "beside", "script", "test that the table lacks"],
)
def test_an_import_of_what_is_deleted_is_named(tmp_path: Path, path: str, source: str, said: str):
    source, said = source.replace("WB", "wingbeat"), said.replace("WB", "wingbeat")
    for name, text in (TREE | {"benchmarks/bench_page.py": "", path: source}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text.replace("WB", "wingbeat"))
    gone = {Path(name) for name in (*TREE, "benchmarks/bench_page.py") if "page" in name}
    check_links(tmp_path, set())
    with pytest.raises(Broken) as broken:
        check_links(tmp_path, gone)
    assert str(broken.value) == f"{path} imports {said}"


@needs("page")
def test_a_path_of_the_table_that_names_nothing_is_an_error(tmp_path: Path):
    with pytest.raises(Broken, match="page: there is no deployments/page"):
        files_of({"page"}, tmp_path)


def test_no_feature_is_looked_for_outside_of_the_table():
    """Neither by `find_spec` of a module of ours, nor by an import of one that may fail."""
    found = set()
    texts = {path: path.read_text(encoding="utf-8") for layer in LAYERS for path in (ROOT / layer).rglob("*.py")}
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)) if "ImportError" in text or "find_spec" in text else ():
            if isinstance(node, ast.Try) and any(
                "ImportError" in ast.unparse(one.type or node) for one in node.handlers
            ):
                inner = (one for part in node.body for one in ast.walk(part))
                if any(isinstance(one, ast.ImportFrom) and (one.module or "").startswith("wingbeat") for one in inner):
                    found.add(str(path.relative_to(ROOT)))
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("find_spec"):
                assert "wingbeat" not in ast.unparse(node)
                assert (
                    "package" in ast.unparse(node)
                    or '"' in ast.unparse(node)
                    or "'" in ast.unparse(node)
                    or path.name == "parts.py"
                )
    assert found == {path for path in LIBRARIES if not belongs_to_deleted(path)}


def test_parts_are_light_to_import():
    """Every process reads the settings, and with them each part's module."""
    code = "import sys, wingbeat.deployments.app_config; print(*{'typer', 'fastapi', 'torch', 'ray'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
