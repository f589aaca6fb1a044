"""Tables of docs/ray_serve_llm.md are the code's own; `python tests/test_foreign_tables.py` writes them."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from wingbeat.deployments.options.foreign_rows import Row, written
from wingbeat.deployments.options.llm_config import INGRESS, LLM_CONFIG
from wingbeat.deployments.options.speculative_config import METHODS
from wingbeat.deployments.options.vllm_options import VLLM

DOCUMENT = Path(__file__).parents[1] / "docs" / "ray_serve_llm.md"


def lines_of(table: Mapping[str, Row | str]) -> list[str]:
    """Rows of Markdown, in the table's order."""
    said = {name: row if isinstance(row, str) else row.says for name, row in table.items()}
    return [f"| `{name}` | {written(text, '`{}`'.format)} |" for name, text in said.items()]


TABLES = {
    "`speculative_config.method`": lines_of(METHODS),
    "field": lines_of(LLM_CONFIG),
    "field of `ingress_deployment_config`": lines_of(INGRESS),
    "option": lines_of(VLLM),
}
"""By the heading of their first column."""


def pattern(heading: str) -> str:
    return rf"(\| {re.escape(heading)} \| Wingbeat \|\n\|---\|---\|\n)((?:[^\n]+\n)*)"


@pytest.mark.parametrize("heading", TABLES)
def test_the_document_has_the_tables_of_the_code(heading: str) -> None:
    found = re.search(pattern(heading), DOCUMENT.read_text(encoding="utf-8"))
    assert found is not None
    assert found[2].splitlines() == TABLES[heading]


def write() -> None:
    """Put the code's tables into the document."""
    text = DOCUMENT.read_text(encoding="utf-8")
    for heading, lines in TABLES.items():
        rows = "".join(f"{line}\n" for line in lines)
        text = re.sub(pattern(heading), lambda found, rows=rows: found[1] + rows, text)
    DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
