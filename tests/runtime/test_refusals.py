"""The table of what does not go together: each pair once, refused in one line, and the documents have the table."""

from pathlib import Path

import pytest

from tests.optional import is_gone
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.parts import hooks
from wingbeat.runtime import parts as runtime_parts
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.refusals import REFUSED_TOGETHER, Feature, Known, Refusal, problem, refuse

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


def test_each_pair_stands_once_and_each_feature_in_some_pair() -> None:
    pairs = [frozenset((one.one, one.other)) for one in REFUSED_TOGETHER]
    assert len(set(pairs)) == len(pairs)
    assert all(len(pair) == 2 for pair in pairs)
    assert set().union(*pairs) == set(Feature)


@pytest.mark.parametrize("refusal", REFUSED_TOGETHER, ids=lambda one: f"{one.one.name}-{one.other.name}")
def test_both_of_a_pair_are_refused_and_each_alone_is_not(refusal: Refusal) -> None:
    said = {refusal.one: "a is 1", refusal.other: "b is 2"}
    with pytest.raises(ValueError, match=r"^a is 1 and b is 2: ") as refused:
        refuse(said)
    assert str(refused.value) == f"a is 1 and b is 2: {refusal.why}; {refusal.remedy}"
    assert [problem({feature: text}) for feature, text in said.items()] == [None, None]


def test_what_is_known_at_the_start_is_asked_of_the_settings() -> None:
    """A feature that no setting is asked for would be refused by nobody."""
    at_start = {part for one in REFUSED_TOGETHER if one.known is Known.AT_START for part in (one.one, one.other)}
    assert at_start == AppConfig().asked().keys() & at_start
    assert not EngineConfig().asked()


def test_the_documents_have_each_pair_once() -> None:
    table = OPERATIONS.read_text(encoding="utf-8").partition("| setting | refused with |\n")[2]
    _, *lines = table.partition("\n\n")[0].splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines]
    shown = [frozenset((one, other)) for one, others in cells for other in others.split("; ")]
    of_parts = [refusal for of in (runtime_parts.hooks, hooks) for refusals in of("refusals") for refusal in refusals]
    pairs = {frozenset((str(refusal.one), str(refusal.other))) for refusal in (*REFUSED_TOGETHER, *of_parts)}
    assert len(shown) == len(set(shown))
    assert {pair for pair in shown if not is_gone(pair)} == {pair for pair in pairs if not is_gone(pair)}
