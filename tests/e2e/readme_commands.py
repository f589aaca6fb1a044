"""The commands of README.md, as a reader copies them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```[a-z]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PROGRAMS = ("make ", "curl ", ".venv/bin/", "wingbeat ", "serve ", "pip ")


def commands(text: str, more: tuple[str, ...] = ()) -> list[str]:
    """Each command of the fenced blocks, over as many lines as its quotes are open; without prompts and remarks.

    Args:
        more: programs that commands begin with, beside the usual ones.
    """
    found: list[str] = []
    for block in _BLOCK.findall(text):
        open_one = ""
        for line in block.splitlines():
            begun = line.removeprefix("$ ")
            if open_one or begun.startswith((*_PROGRAMS, *more)):
                open_one = f"{open_one}\n{begun}" if open_one else begun
                if open_one.count("'") % 2 == 0:
                    found.append(re.sub(r"\s{2,}#.*$", "", open_one))
                    open_one = ""
    return found


def readme_commands() -> list[str]:
    """Commands in this repository's README."""
    return commands((ROOT / "README.md").read_text(encoding="utf-8"))
