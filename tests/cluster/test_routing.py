"""Routing by figures alone: which engine, whether there is room, and when there will be."""

import random
from collections import Counter

import pytest

from wingbeat.cluster.routing import (
    MAX_COMPARED,
    AnswerLength,
    EngineLoad,
    TokenRate,
    choose_engine,
    num_missing_places,
    retry_after_s,
)


def test_the_least_loaded_engine_is_chosen_and_ties_go_by_id():
    loads = [EngineLoad("c", 50, 1), EngineLoad("b", 10, 2), EngineLoad("a", 10, 2), EngineLoad("d", 10, 3)]
    assert choose_engine(loads) == "a"
    assert choose_engine([]) is None


@pytest.mark.parametrize(
    ("cached", "outstanding", "chosen"),
    [
        ({"b": 96}, {}, "b"),
        ({"b": 96}, {"b": 95}, "b"),
        ({"b": 96}, {"b": 97}, "a"),
        ({"a": 32, "b": 96}, {"a": 10, "b": 90}, "a"),
        ({"a": 96, "b": 96}, {"a": 1}, "b"),
    ],
)
def test_a_cached_prefix_is_worth_as_many_tokens_of_load_as_it_saves(cached, outstanding, chosen):
    loads = [EngineLoad(engine, outstanding.get(engine, 0), 0) for engine in "ab"]
    assert choose_engine(loads, 100, lambda engine: cached.get(engine, 0)) == chosen


def test_a_session_keeps_to_one_engine_among_equals_and_only_there():
    loads = [EngineLoad(engine, 0, number) for number, engine in enumerate("abc")]
    kept = {session: choose_engine(loads, 10, session_id=session) for session in map(str, range(60))}
    assert all(choose_engine(loads[::-1], 10, session_id=session) == engine for session, engine in kept.items())
    assert min(Counter(kept.values()).values()) > 10
    left = [load for load in loads if load.engine_id != "c"]
    assert all(choose_engine(left, 10, session_id=s) == engine for s, engine in kept.items() if engine != "c")
    busy = [EngineLoad(load.engine_id, load.engine_id != "b", 0) for load in loads]
    assert {choose_engine(busy, 10, session_id=session) for session in kept} == {"b"}


def test_of_many_engines_two_are_compared_so_that_no_two_routers_flood_the_same_one():
    loads = [EngineLoad(f"e{number:02}", number, 0) for number in range(MAX_COMPARED + 8)]
    rng = random.Random(7)
    chosen = Counter(choose_engine(loads, rng=rng) for _ in range(2000))
    assert len(chosen) > MAX_COMPARED
    # The least loaded one wins whenever it is drawn, the most loaded one never.
    assert 0.04 < chosen["e00"] / 2000 < 0.13
    assert chosen[loads[-1].engine_id] < chosen["e00"] / 4


def test_of_many_engines_the_one_with_the_prefix_is_always_compared():
    loads = [EngineLoad(f"e{number:02}", 10, 0) for number in range(40)]
    cached = {"e31": 64}
    chosen = {choose_engine(loads, 65, lambda e: cached.get(e, 0), rng=random.Random(n)) for n in range(30)}
    assert chosen == {"e31"}


def test_what_a_request_will_write_is_learned_from_those_that_ended():
    answers = AnswerLength(num_answers=4)
    assert answers.expected_tokens(500) == 500
    for length in (10, 30):
        answers.add(length)
    assert (answers.expected_tokens(500), answers.expected_tokens(5)) == (20, 5)
    for _ in range(40):
        answers.add(100)
    assert answers.expected_tokens(500) == 100


@pytest.mark.parametrize(
    ("num_wanted", "num_admitted", "missing"), [(1, 0, 0), (1, 6, 0), (1, 7, 1), (1, 9, 3), (7, 0, 0), (8, 0, 1)]
)
def test_room_is_the_running_capacity_of_all_engines_and_the_queue(num_wanted, num_admitted, missing):
    assert num_missing_places(num_wanted, num_admitted, 2, max_num_seqs=2, max_queued_requests=3) == missing


@pytest.mark.parametrize(
    ("num_missing", "unwritten", "rate", "seconds"),
    [
        (1, 1000, 50.0, 2),  # a tenth of the requests end while a tenth of the tokens is written
        (3, 1000, 50.0, 6),
        (10, 1000, 50.0, 20),
        (99, 1000, 50.0, 20),
        (1, 1001, 50.0, 3),
        (1, 10, 50.0, 1),
        (10, 10**6, 50.0, 60),
        (1, 1000, None, 1),
        (1, 1000, 0.0, 1),
    ],
)
def test_a_retry_pays_once_enough_tokens_are_written(num_missing, unwritten, rate, seconds):
    assert retry_after_s(num_missing, 10, unwritten, rate) == seconds


def test_without_requests_a_retry_may_come_at_once():
    assert retry_after_s(1, 0, 0, 50.0) == 1


class TestTokenRate:
    def test_a_steady_stream_is_measured_exactly_from_its_first_interval_on(self):
        rate = TokenRate()
        assert rate.per_s(0.0) is None
        for second in range(20):
            rate.add(40 if second else 0, float(second))
            if second:
                assert rate.per_s(float(second)) == pytest.approx(40.0)

    def test_it_follows_a_change_within_a_few_windows(self):
        rate = TokenRate(window_s=2.0)
        for tick in range(200):
            rate.add(10 if tick < 100 else 1, tick / 10)
        assert rate.per_s(19.9) == pytest.approx(10.0, rel=0.1)

    def test_an_idle_hour_changes_nothing(self):
        rate = TokenRate()
        for second in range(10):
            rate.add(40, float(second))
        before = rate.per_s(9.0)
        rate.resume(3600.0)
        assert rate.per_s(3600.0) == before

    def test_a_stall_lowers_it(self):
        rate = TokenRate()
        for second in range(10):
            rate.add(40, float(second))
        assert rate.per_s(60.0) < 1.0
