"""No code of a checkpoint is run: one file calls transformers' loaders, and every file that may hold a pickle is read
as weights only."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.optional import belongs_to_deleted

ROOT = Path(__file__).parents[1]
GUARD = ROOT / "runtime" / "hugging_face.py"
SOURCES = [path for layer in ("kernels", "runtime", "cluster", "deployments") for path in (ROOT / layer).rglob("*.py")]
FROM_PARENT = {ROOT / "runtime" / "grammar" / "worker.py"}
"""A child process that reads a pickle which its parent wrote to its standard input."""
LOADERS = {"from_pretrained", "from_config", "for_model", "load_custom_generate"}
DATA_ALONE = {"nn.Embedding.from_pretrained", "Embedding.from_pretrained", "GenerationConfig.from_pretrained"}
"""Calls that read numbers, and no file that names code."""
FOREIGN_CODE = {"dynamic_module_utils", "hub_kernels", "pipelines"}
"""Modules of transformers that exist to run what a repository holds."""


def walked(source: str, words: set[str]) -> Iterator[ast.AST]:
    """Nodes of a source that has one of some words; to parse all of them takes seconds."""
    return ast.walk(ast.parse(source if any(word in source for word in words) else ""))


def unguarded(source: str) -> Iterator[str]:
    """Calls and imports of a source by which a checkpoint's own code could run."""
    for node in walked(source, LOADERS | FOREIGN_CODE | {"trust_remote_code"}):
        if isinstance(node, ast.Attribute) and node.attr in LOADERS and ast.unparse(node) not in DATA_ALONE:
            yield f"{node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.Constant) and node.value in LOADERS:
            yield f"{node.lineno}: {node.value!r} by name"
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and ast.unparse(node.value) != "False":
            yield f"{node.value.lineno}: trust_remote_code={ast.unparse(node.value)}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            if "transformers" in names[0] + names[-1] and FOREIGN_CODE & set(".".join(names).split(".")):
                yield f"{node.lineno}: {ast.unparse(node)}"


def unsafe_pickles(source: str) -> Iterator[str]:
    """Calls that would unpickle anything."""
    for node in walked(source, {"allow_pickle", ".load"}):
        if isinstance(node, ast.Call):
            called, options = ast.unparse(node.func), {one.arg: ast.unparse(one.value) for one in node.keywords}
            if called == "torch.load" and options.get("weights_only") != "True":
                yield f"{node.lineno}: torch.load without weights_only"
            if options.get("allow_pickle", "False") != "False":
                yield f"{node.lineno}: {called} with pickles"
            if called in ("pickle.load", "joblib.load", "dill.load", "torch.hub.load", "torch.jit.load"):
                yield f"{node.lineno}: {called}"


def test_loaders_of_transformers_are_called_by_one_file_alone():
    found = {path: list(unguarded(path.read_text(encoding="utf-8"))) for path in SOURCES if path != GUARD}
    assert not {path: lines for path, lines in found.items() if lines}


def test_the_guard_trusts_no_code_in_any_call():
    calls = [
        node
        for node in ast.walk(ast.parse(GUARD.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOADERS
    ]
    assert calls
    for call in calls:
        assert "False" in [ast.unparse(one.value) for one in call.keywords if one.arg == "trust_remote_code"]


def test_pickles_are_read_as_weights_only():
    found = {path: list(unsafe_pickles(path.read_text(encoding="utf-8"))) for path in SOURCES}
    from_parent = {path for path in FROM_PARENT if not belongs_to_deleted(str(path.relative_to(ROOT)))}
    assert {path for path, lines in found.items() if lines} == from_parent
    assert all("pickle.load(sys.stdin.buffer)" in path.read_text(encoding="utf-8") for path in from_parent)
    assert all(len(found[path]) == 1 for path in from_parent)


@pytest.mark.parametrize(
    "source",
    [
        "AutoConfig.from_pretrained(folder)",
        "model_class.from_config(config)",
        "load = AutoTokenizer.from_pretrained",
        "getattr(AutoModel, 'from_pretrained')(folder)",
        "read(folder, trust_remote_code=ask)",
        "from transformers.dynamic_module_utils import get_class_from_dynamic_module",
        "from transformers import dynamic_module_utils",
    ],
)
def test_the_rule_finds_other_ways(source: str):
    assert list(unguarded(source))
