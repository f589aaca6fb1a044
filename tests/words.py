"""Prose of the repository: how many words the documents have, and which docstrings and comments begin badly.

`python -m tests.words` prints the counts. `python -m tests.words --draw 40` prints that many docstrings, comments and
sentences of documents, drawn with the parent commit's hash as the seed, for a reader who has not seen the project.
"""

import argparse
import ast
import io
import random
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LAYERS = ("kernels", "runtime", "cluster", "deployments")
FOLDERS = (*LAYERS, "src", "tests", "benchmarks", "examples")
BANNED = re.compile(r"(Of|What|Those|That|Who|Whose|It|One|The same|Which)\b")
"""First words that leave the subject of a sentence to the reader."""
DIRECTIVE = re.compile(r"#\s*(fmt:|noqa|type:|pyright:|ruff:)")


class Passage(NamedTuple):
    """A docstring, a comment or a sentence of a document."""

    place: str
    """Path and line."""
    text: str
    paragraph: str = ""
    """Paragraph of a sentence."""


def docstrings(path: Path) -> Iterator[Passage]:
    """Strings that are statements: docstrings, and those below a field."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for part in getattr(node, "body", ()) if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            if (
                isinstance(part, ast.Expr)
                and isinstance(part.value, ast.Constant)
                and isinstance(part.value.value, str)
            ):
                yield Passage(f"{path.relative_to(ROOT)}:{part.lineno}", " ".join(part.value.value.split()))


def comments(path: Path) -> Iterator[Passage]:
    """Comments; consecutive lines without code are one."""
    line, words = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type != tokenize.COMMENT or DIRECTIVE.match(token.string):
            continue
        is_behind_code = token.line[: token.start[1]].strip() != ""
        if words and (is_behind_code or token.start[0] != line + len(words)):
            yield Passage(f"{path.relative_to(ROOT)}:{line}", " ".join(words))
            words = []
        line = line if words else token.start[0]
        words.append(token.string.lstrip("# "))
    if words:
        yield Passage(f"{path.relative_to(ROOT)}:{line}", " ".join(words))


def sources(folders: tuple[str, ...] = FOLDERS) -> Iterator[Path]:
    """Python files below the folders."""
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def documents() -> list[Path]:
    """The manual; the README and CONTRIBUTING are counted apart."""
    return sorted((ROOT / "docs").rglob("*.md"))


def sentences(path: Path) -> Iterator[Passage]:
    """Sentences of a document's prose: no code, no tables, no headings."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*- )", text):
        if not re.match(r"\s*(\||#|!\[|<)", paragraph):
            joined = " ".join(paragraph.split())
            for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z`])", joined):
                yield Passage(str(path.relative_to(ROOT)), sentence, joined)


def num_words(path: Path) -> int:
    """Words of a document, tables and code included; bars, dashes and other marks are not words."""
    return sum(any(map(str.isalnum, word)) for word in path.read_text(encoding="utf-8").split())


def badly_begun() -> list[Passage]:
    """Docstrings and comments whose first word is banned."""
    return [
        passage for path in sources() for passage in (*docstrings(path), *comments(path)) if BANNED.match(passage.text)
    ]


def draw(number: int, seed: str) -> list[Passage]:
    """Passages of the four layers and the manual, each kind as often as the others."""
    random_ = random.Random(seed)
    kinds = (
        [passage for path in sources(LAYERS) for passage in docstrings(path)],
        [passage for path in sources(LAYERS) for passage in comments(path)],
        [passage for path in documents() for passage in sentences(path)],
    )
    return [random_.choice(kinds[index % len(kinds)]) for index in range(number)]


def above(passage: Passage) -> list[str]:
    """The two lines of code above a passage, and its own where it stands behind code; a sentence's paragraph."""
    path, _, line = passage.place.partition(":")
    if passage.paragraph:
        return [passage.paragraph]
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    first = int(line) if line else 0
    return [line for line in lines[max(0, first - 3) : first] if line.strip() and '"""' not in line]


def main() -> None:
    """Print the counts, or the passages that were drawn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=int, help="how many passages to print")
    parser.add_argument("--seed", help="default: hash of the parent commit")
    options = parser.parse_args()
    if options.draw:
        git = ("git", "rev-parse", "HEAD^")
        seed = options.seed or subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        print(f"seed {seed}")
        for passage in draw(options.draw, seed):
            print(f"\n{passage.place}", *above(passage), f"    >>> {passage.text}", sep="\n")
        return
    for path in (*documents(), ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        print(f"{num_words(path):6,} {path.relative_to(ROOT)}")
    print(f"{sum(map(num_words, documents())):6,} the manual")
    bad = badly_begun()
    print(*(f"{passage.place}: {passage.text[:80]}" for passage in bad), sep="\n")
    print(f"{len(bad)} docstrings and comments begin badly")


if __name__ == "__main__":
    main()
