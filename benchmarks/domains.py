"""Text of domains that the demo pair was not trained for, made on this machine, and Python, which it was trained on."""

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
"""Of a domain's files: whose text is never asked for but at a mark."""
MODULES = ("json", "email", "http.client", "argparse", "logging", "asyncio", "unittest", "socket", "decimal", "csv")


class Prompts(NamedTuple):
    """Pieces of a domain's text that are to be completed."""

    served: list[str]
    held: list[str]
    """Of other files."""


def files_of(root: Path, *patterns: str) -> Iterator[str]:
    """Texts of files below a folder."""
    for pattern in patterns:
        for path in sorted(root.rglob(pattern)):
            if path.is_file():
                yield path.read_text(encoding="utf-8", errors="ignore")[:MOST_CHARS]


def html() -> Iterator[str]:
    """Documentation of the standard library as pydoc writes it."""
    for name in MODULES:
        page = pydoc.HTMLDoc().document(pydoc.locate(name))
        yield from (page[begin : begin + 4000] for begin in range(0, min(len(page), 10 * MOST_CHARS), 4000))


def json_logs() -> Iterator[str]:
    """Lines of a service's log, drawn with a fixed seed."""
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
    """Licences and READMEs of the packages that are installed."""
    yield from files_of(Path(sys.prefix), "LICENSE*", "README*.md", "METADATA")
    yield from files_of(Path("/usr/share/doc"), "copyright")


def python() -> Iterator[str]:
    """What the demo pair was trained on."""
    yield from files_of(Path(os.__file__).parent, "[a-m]*.py")


DOMAINS: dict[str, Callable[[], Iterator[str]]] = {
    "c": lambda: files_of(Path("/usr/include"), "*.h"),
    "html": html,
    "json": json_logs,
    "english": english,
    "python": python,
}


def is_held(text: str) -> bool:
    """Whether a file is of those that nobody is asked to complete but at a mark."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") < HELD_OUT * 2**32


def prompts_of(domain: str) -> Prompts:
    """Pieces of the texts of a domain, in an order drawn with a fixed seed."""
    found = Prompts([], [])
    for text in DOMAINS[domain]():
        pieces = [text[at : at + PROMPT_CHARS] for at in range(0, len(text) - PROMPT_CHARS, 3 * PROMPT_CHARS)]
        (found.held if is_held(text) else found.served).extend(pieces)
    rng = random.Random(1)
    rng.shuffle(found.served)
    rng.shuffle(found.held)
    return found
