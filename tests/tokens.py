"""Size of the source in tokens, by room, and what a change adds to it.

    .venv/bin/python tests/tokens.py [COMMIT]

Python tokens are counted without comments, docstrings and layout, none of which a reader has to follow; C++ by lines.
The core is what `python -m tests.without --all` leaves. The difference is that of the working tree to COMMIT, by
default to the parent of what is checked out.
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.optional import FEATURES

ROOT = Path(__file__).parents[1]
LAYERS = ("kernels", "runtime", "cluster", "deployments")
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_CPP = {".cpp", ".h"}


def num_tokens(source: str) -> int:
    """Tokens of a Python source without comments, docstrings and layout."""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, holders) and ast.get_docstring(node)]
    documented = {(node.body[0].lineno, node.body[0].col_offset) for node in nodes}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type not in _LAYOUT and token.start not in documented for token in tokens)


def sizes(files: Iterator[tuple[str, str]]) -> tuple[Counter[str], int]:
    """Tokens by room, and lines of C++, of files given by path and text."""
    tokens, lines = Counter[str](), 0
    for path, text in files:
        if path.endswith(".py"):
            tokens[path.rpartition(".py")[0] if path.count("/") == 1 else "/".join(path.split("/")[:2])] += num_tokens(
                text
            )
        else:
            lines += text.count("\n")
    return tokens, lines


def here() -> Iterator[tuple[str, str]]:
    """Files of the working tree."""
    for layer in LAYERS:
        for path in sorted((ROOT / layer).rglob("*")):
            if path.suffix == ".py" or path.suffix in _CPP:
                yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def is_optional(path: str) -> bool:
    """Whether a file of the source belongs to a feature that can be deleted."""
    globs = (glob for feature in FEATURES.values() for glob in feature.paths)
    return any(path.startswith(f"{glob}/") or fnmatch(path, glob) for glob in globs)


def at(commit: str) -> Iterator[tuple[str, str]]:
    """Files of a commit.

    Raises:
        subprocess.CalledProcessError: there is no such commit.
    """
    names = _git("ls-tree", "-r", "--name-only", commit, "--", *LAYERS).splitlines()
    for name in names:
        if Path(name).suffix in _CPP | {".py"}:
            yield name, _git("show", f"{commit}:{name}")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Print the table."""
    commit = sys.argv[1] if len(sys.argv) > 1 else "HEAD^"
    (now, lines), (before, lines_before) = sizes(here()), sizes(at(commit))
    for room in sorted(now.keys() | before.keys()):
        change = now[room] - before[room]
        print(f"{room:<40} {now[room]:>8,} {change:>+8,}" if change else f"{room:<40} {now[room]:>8,}")
    print(f"{'Python, tokens':<40} {now.total():>8,} {now.total() - before.total():>+8,}")
    core, _ = sizes(file for file in here() if not is_optional(file[0]))
    print(f"{'.. of the core':<40} {core.total():>8,}")
    print(f"{'C++, lines':<40} {lines:>8,} {lines - lines_before:>+8,}")


if __name__ == "__main__":
    main()
