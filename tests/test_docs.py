"""Figures of the documents that are constants of the code."""

import re
from pathlib import Path

import pytest

from wingbeat.runtime.config import LEAST_MODEL_LEN, NUM_SEQS, PROMPT_TOKENS
from wingbeat.runtime.engine.memory import LEAST_PROMPT_TOKENS

DOCS = Path(__file__).parents[1] / "docs"


def text_of(document: str) -> str:
    """A document without its line ends."""
    return " ".join((DOCS / document).read_text(encoding="utf-8").split())


def says(document: str, sentence: str) -> bool:
    """Whether a document has a sentence."""
    return re.sub(r"(\d)%", r"\1 %", sentence) in text_of(document)


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ("operations.md", f"a pool below {LEAST_MODEL_LEN} tokens ends the start"),
        (
            "operations.md",
            f"| `max_num_seqs`: {NUM_SEQS['cpu']} on CPUs, up to {NUM_SEQS['cuda']} on GPUs, by memory |",
        ),
        (
            "operations.md",
            f"the prompt tokens of a round, from {PROMPT_TOKENS['cuda']} to {PROMPT_TOKENS['cuda'] // 2} or "
            f"{LEAST_PROMPT_TOKENS}.",
        ),
    ],
    ids=str,
)
def test_what_a_document_says_of_a_limit_is_the_limit(document: str, sentence: str) -> None:
    assert says(document, sentence)


def anchors(text: str) -> set[str]:
    """Anchors of a document's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_to_a_file_and_a_heading_that_is_there() -> None:
    root, dead, num_links = DOCS.parent, [], 0
    others = (root / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md"))
    for document in (*DOCS.glob("**/*.md"), *others):
        for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
            if re.match(r"[a-z]+:", target):
                continue
            num_links += 1
            path, _, anchor = target.partition("#")
            file = (document.parent / path).resolve() if path else document
            if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
                dead.append(f"{document.relative_to(root)}: {target}")
    assert not dead
    assert num_links > 100
