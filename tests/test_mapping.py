"""docs/mapping.md: each row says what another system's names are called here, and that is there."""

import re

import pytest

from tests.test_names_in_prose import LAYERS, QUOTED, ROOT, has, paths, prose_of, text_of, words

DOCUMENT = ROOT / "docs" / "mapping.md"
SOURCES = [path for layer in LAYERS for path in (ROOT / layer).rglob("*.py")]


def rows() -> list[tuple[str, str]]:
    """Of all tables: what is there, what is here."""
    found = re.findall(r"^\| (.*) \| (.*) \|$", DOCUMENT.read_text(encoding="utf-8"), re.M)
    return [row for row in found if row != ("there", "here")]


def gone(name: str) -> bool:
    """Whether what is in backticks is not there: a path of HTTP, a metric, a member of a class, or any words."""
    verb, _, path = name.partition(" ")
    if verb in {"GET", "POST"}:
        return not any(f'"{path}"' in text_of(source) for source in SOURCES)
    if name.startswith(("vllm:", "wingbeat_")):
        return f"| `{name}` |" not in text_of(ROOT / "docs" / "metrics.md")
    if name in paths():
        return False
    owner, _, member = name.partition(".")
    if re.fullmatch(r"[A-Z]\w+\.\w+", name):
        return not any(re.search(rf"^class {owner}\b", text_of(path), re.M) and has(path, member) for path in SOURCES)
    return not words().issuperset(re.findall(r"\w+", name))


def test_every_name_of_ours_is_there() -> None:
    names = QUOTED.findall(prose_of(DOCUMENT))
    assert len(names) > 150
    assert not sorted({name for name in names if gone(name)})


def test_a_row_says_what_it_is_here_or_why_it_is_not() -> None:
    assert len(rows()) > 100
    for there, here in rows():
        assert "`" not in there, f"{there}: in backticks are Wingbeat's names alone"
        for said in re.findall(r"left out on purpose(.*)", here):
            assert re.match(r": \w+", said), f"{there}: {here}"
        assert re.search(r"`|\]\(|left out on purpose: |\bmissing\b|read from the checkpoint", here), f"{there}: {here}"


@pytest.mark.parametrize(
    "name",
    ["GET /no_such", "vllm:no_such_total", "wingbeat_no_such", "Drafter.no_such", "NoSuch.propose", "wingbeat no_such"],
)
def test_the_rule_sees_what_it_forbids(name: str) -> None:
    # Joined here, as the words of this file are words of the code.
    assert gone(name.replace("no_such", "no_" * 2 + "such").replace("NoSuch", "No" * 2 + "Such"))
