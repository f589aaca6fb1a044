"""Seconds of an encoder's passes are those that have ended, and nobody waits for the others."""

import time

import pytest
import torch

from wingbeat.runtime.media.clock import EncoderClock


class FakeEvent:
    """Of a device whose passes end when a test says so, 250 ms after their begin."""

    ended = False

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        """Nothing waits."""

    def query(self):
        return type(self).ended

    def elapsed_time(self, end):
        assert end.query()
        return 250.0


def test_passes_of_a_device_count_when_they_have_ended(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "ended", False)
    clock = EncoderClock(torch.device("cuda"))
    for _ in range(2):
        with clock.running():
            pass
    assert clock.read() == 0.0
    FakeEvent.ended = True
    assert (clock.read(), clock.read()) == (0.5, 0.5)
    clock.forget()
    assert clock.read() == 0.0


def test_passes_of_a_host_are_those_of_its_clock(monkeypatch):
    now = iter((10.0, 10.5, 20.0, 22.0))
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    clock = EncoderClock(torch.device("cpu"))
    for _ in range(2):
        with clock.running():
            pass
    assert clock.read() == pytest.approx(2.5)
