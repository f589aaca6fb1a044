"""A thread that sleeps on several bells wakes for each of them, with `futex_waitv` and without."""

import threading
import time

import pytest

from wingbeat.cluster.channels import any_bell
from wingbeat.cluster.channels.any_bell import sleep_on, wait_for_any
from wingbeat.cluster.channels.doorbell import Bell

LONG_S = 20.0


def new_bells(count):
    words = memoryview(bytearray(8 * count)).cast("q")
    return words, [Bell(words, index) for index in range(count)]


@pytest.fixture(params=[True, False], ids=["one call", "in turn"])
def kernel(request, monkeypatch):
    if request.param and not any_bell.WAITS_FOR_MANY:
        pytest.skip("this kernel has no futex_waitv")
    monkeypatch.setattr(any_bell, "WAITS_FOR_MANY", request.param)


@pytest.mark.parametrize("rung", [0, 2])
def test_a_sleeper_wakes_for_whichever_bell_rings(kernel, rung):
    words, bells = new_bells(3)
    began, heard = threading.Event(), []

    def sleep():
        began.set()
        heard.append(wait_for_any(bells, lambda: words[rung] > 0, LONG_S))

    thread = threading.Thread(target=sleep)
    thread.start()
    began.wait()
    words[rung] += 1
    bells[rung].ring()
    thread.join(LONG_S / 2)
    assert heard == [True]


def test_a_counter_that_has_moved_forbids_the_sleep(kernel):
    words, bells = new_bells(2)
    words[1] = 2**32 + 5  # a futex is the low half of its word
    before = time.monotonic()
    sleep_on(bells, [0, 4], LONG_S)
    assert time.monotonic() - before < LONG_S / 2


def test_nothing_rung_ends_by_the_timeout_and_more_bells_than_one_call_takes_are_no_error(kernel):
    _, bells = new_bells(any_bell.MOST_BELLS + 2)
    assert not wait_for_any(bells, lambda: False, 0.01)
