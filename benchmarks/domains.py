"""Texts by domain: new domains, on which the demo pair was not trained, and Python, its training domain.

Texts are collected or generated on this machine.
"""

import hashlib
import json
import os
import pydoc
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

PROMPT_CHARS, MOST_CHARS = 240, 40_000
HELD_OUT = 0.1
"""Share of a domain's files that is held out: used only for measurements, never for training traffic."""
MODULES = ("json", "email", "http.client", "argparse", "logging", "asyncio", "unittest", "socket", "decimal", "csv")


class Prompts(NamedTuple):
    """Prompts of a domain: pieces of its texts."""

    served: list[str]
    held: list[str]
    """Prompts from held-out files."""


def files_of(root: Path, *patterns: str) -> Iterator[str]:
    """Yields the texts of files below a folder."""
    for pattern in patterns:
        for path in sorted(root.rglob(pattern)):
            if path.is_file():
                yield path.read_text(encoding="utf-8", errors="ignore")[:MOST_CHARS]


def html() -> Iterator[str]:
    """Yields the standard library's documentation as HTML, as pydoc writes it."""
    for name in MODULES:
        page = pydoc.HTMLDoc().document(pydoc.locate(name))
        yield from (page[begin : begin + 4000] for begin in range(0, min(len(page), 10 * MOST_CHARS), 4000))


def json_logs() -> Iterator[str]:
    """Yields made-up JSON lines of a service's log, drawn with a fixed seed."""
    rng = random.Random(7)
    paths, levels = ("/v1/orders", "/v1/users/{}", "/health", "/v1/carts/{}/items"), ("INFO", "INFO", "INFO", "WARNING")
    for file in range(200):
        lines, now = [], 1_700_000_000 + 3600 * file
        for _ in range(40):
            now += rng.randrange(1, 9)
            path = rng.choice(paths).format(rng.randrange(1000, 9999))
            status = rng.choice((200, 200, 200, 201, 404, 500))
            fields = {"ts": now, "level": rng.choice(levels), "service": "shop", "method": rng.choice(("GET", "POST"))}
            fields |= {"path": path, "status": status, "duration_ms": rng.randrange(1, 400), "trace": f"{file:04x}"}
            lines.append(json.dumps(fields))
        yield "\n".join(lines)


def english() -> Iterator[str]:
    """Yields licences and READMEs of the installed packages."""
    yield from files_of(Path(sys.prefix), "LICENSE*", "README*.md", "METADATA")
    yield from files_of(Path("/usr/share/doc"), "copyright")


def python() -> Iterator[str]:
    """Yields sources of the standard library, on which the demo pair was trained."""
    yield from files_of(Path(os.__file__).parent, "[a-m]*.py")


DOMAINS: dict[str, Callable[[], Iterator[str]]] = {
    "c": lambda: files_of(Path("/usr/include"), "*.h"),
    "html": html,
    "json": json_logs,
    "english": english,
    "python": python,
}


def is_held(text: str) -> bool:
    """Whether a file is held out, by a hash of its text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") < HELD_OUT * 2**32


def prompts_of(domain: str) -> Prompts:
    """Prompts from the texts of a domain, in an order drawn with a fixed seed."""
    found = Prompts([], [])
    for text in DOMAINS[domain]():
        pieces = [text[at : at + PROMPT_CHARS] for at in range(0, len(text) - PROMPT_CHARS, 3 * PROMPT_CHARS)]
        (found.held if is_held(text) else found.served).extend(pieces)
    rng = random.Random(1)
    rng.shuffle(found.served)
    rng.shuffle(found.held)
    return found
