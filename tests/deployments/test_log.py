"""Log lines of an application's processes: their level at the start."""

import logging

import pytest

from wingbeat.deployments import log


@pytest.mark.parametrize(("given", "level"), [("debug", "DEBUG"), ("error", "ERROR"), ("loud", "INFO"), ("", "INFO")])
def test_processes_start_with_the_level_of_their_environment(monkeypatch: pytest.MonkeyPatch, given: str, level: str):
    monkeypatch.setenv(log.LEVEL_VARIABLE, given)
    logger = logging.getLogger("wingbeat")
    monkeypatch.setattr(logger, "handlers", [])
    before = logger.level
    try:
        log.show_log()
        assert logging.getLevelName(logger.level) == level
    finally:
        logger.setLevel(before)
    assert log.level_at_start() == level.lower()
    assert log.level_environment() == {log.LEVEL_VARIABLE: level.lower()}
