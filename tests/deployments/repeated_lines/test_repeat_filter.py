"""Repeated log lines are shown once."""

import logging

import pytest

from wingbeat.deployments.repeated_lines import repeat_filter
from wingbeat.deployments.request_context import ACCESS


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def record(text: str, name: str = "wingbeat.figures") -> logging.LogRecord:
    return logging.LogRecord(name, logging.INFO, "", 0, text, None, None)


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch):
    """A filter, its clock, the lines that it has written and the ends that it waits for."""
    clock, written, waiting = Clock(), [], []
    found = repeat_filter.RepeatFilter(lambda line: written.append(line.getMessage()), quiet_s=60, clock=clock)
    monkeypatch.setattr(found, "_watch", lambda key, _seconds: waiting.append(key))
    return found, clock, written, waiting


def test_a_repeated_line_is_said_once_and_when_it_has_ended(repeats):
    found, clock, written, waiting = repeats
    line = "Engine e gives no figures: no answer within 1 s"
    passed = []
    for _ in range(10):
        passed.append(found.filter(record(line)))
        clock.now += 9
    assert passed == [True] + [False] * 9
    found.end(waiting.pop())
    assert not written, "it came 9 s ago"
    clock.now += 60
    found.end(waiting.pop())
    assert written == [f"{line} (9 more times in 81 s, and not since)"]
    assert found.filter(record(line)), "it is news again"


def test_other_lines_and_the_access_log_pass(repeats):
    found, clock, _, waiting = repeats
    assert all(found.filter(record(text)) for text in ("one", "two", "three"))
    assert all(found.filter(record("GET /health 200", ACCESS)) for _ in range(3))
    clock.now += 61
    assert found.filter(record("one")), "a line that came a while ago is none that is repeated"
    assert not waiting


def test_lines_that_came_once_are_forgotten(repeats):
    found, clock, _, _ = repeats
    for number in range(3 * repeat_filter.MOST_LINES):
        clock.now += 1
        found.filter(record(str(number)))
    assert len(found._seen) <= repeat_filter.MOST_LINES + 1
