"""Tokens per second of an engine, measured only while enough of its slots are busy."""

import pytest

from wingbeat.cluster.engine_speed import EngineSpeed


def test_nothing_is_known_before_it_had_work_for_half_its_slots():
    speed = EngineSpeed(8)
    for second in range(10):
        speed.look(50 * second, 3, float(second))
    assert speed.tokens_per_s == 0.0


def test_time_with_little_to_do_does_not_count():
    speed, passed = EngineSpeed(8), 0
    for second in range(60):
        speed.look(passed, 8 if second % 20 < 10 else 1, float(second))
        # Requests that are running at a look run until the next look.
        passed += 400 if second % 20 < 10 else 70
    assert speed.tokens_per_s == pytest.approx(400.0)


def test_an_engine_that_was_replaced_is_measured_from_its_own_beginning():
    speed = EngineSpeed(2)
    for second in range(10):
        speed.look(100 * second, 2, float(second))
    for second in range(10, 20):
        speed.look(100 * (second - 10), 2, float(second))
    assert speed.tokens_per_s == pytest.approx(100.0)


def test_an_idle_hour_changes_nothing():
    speed = EngineSpeed(2)
    for second in range(10):
        speed.look(100 * second, 2, float(second))
    speed.look(900, 0, 10.0)
    before = speed.tokens_per_s
    speed.look(900, 0, 3600.0)
    assert speed.tokens_per_s == before
