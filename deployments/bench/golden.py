"""Published acceptance lengths by name. If drafts are forced to be accepted at such a length, speed can be measured
even with weights whose values are arbitrary.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from wingbeat.runtime.config import ForcedAcceptance

_FILE = Path(__file__).parent / "data" / "golden_lengths.json"
USUAL_TOKENS = 7
"""Default number of drafted tokens, used if an acceptance length is published for this number."""


class GoldenLength(NamedTuple):
    """A published acceptance length."""

    name: str
    num_speculative_tokens: int
    acceptance_length: float
    """Tokens per round, including the verifier's own token."""
    head: str
    workload: str
    source: str


def published(name: str) -> dict[int, GoldenLength]:
    """Return the acceptance lengths published under a name, by number of drafted tokens.

    Raises:
        ValueError: the name is unknown; the message is one line that lists the known names.
    """
    table = json.loads(_FILE.read_text(encoding="utf-8"))
    if name not in table:
        raise ValueError(f"golden is {name!r}: use one of {', '.join(table)}")
    return {
        int(number): GoldenLength(name, int(number), length, row["head"], row["workload"], row["source"])
        for row in table[name]
        for number, length in row["lengths"].items()
    }


def golden_length(name: str, num_tokens: int | None = None) -> GoldenLength:
    """Return the acceptance length for a number of drafted tokens.

    With None, the number is `USUAL_TOKENS` if a length is published for this number, else the largest number for which
    a length is published.

    Raises:
        ValueError: no length is published for this number.
    """
    lengths = published(name)
    if num_tokens is None:
        num_tokens = USUAL_TOKENS if USUAL_TOKENS in lengths else max(lengths)
    if num_tokens not in lengths:
        counts = ", ".join(map(str, sorted(lengths)))
        raise ValueError(f"golden is {name!r} and draft_steps is {num_tokens}: lengths are published for {counts}")
    return lengths[num_tokens]


def golden_settings(length: GoldenLength) -> dict[str, Any]:
    """Return settings of an engine whose rounds have this mean acceptance length; all drafts are chains of the same
    depth.
    """
    rates = ForcedAcceptance.length(length.acceptance_length).rates
    return {
        "forced_acceptance": rates,
        "draft_steps": length.num_speculative_tokens,
        "draft_top_k": 1,
        "adaptive": False,
    }
