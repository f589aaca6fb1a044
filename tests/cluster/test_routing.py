"""Routing by figures alone: which engine, whether there is room, and when there will be."""

import pytest

from wingbeat.cluster.routing import EngineLoad, TokenRate, choose_engine, num_missing_places, retry_after_s


def test_the_least_loaded_engine_is_chosen_and_ties_go_by_id():
    loads = [EngineLoad("c", 50, 1), EngineLoad("b", 10, 2), EngineLoad("a", 10, 2), EngineLoad("d", 10, 3)]
    assert choose_engine(loads) == "a"
    assert choose_engine([]) is None


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
