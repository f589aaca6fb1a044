"""Signals that stop a server: when they interrupt it, and when they wait."""

import signal
from collections.abc import Iterator

import pytest

from wingbeat.deployments.stop_signals import STOP_SIGNALS, StopSignals


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    installed = StopSignals()
    installed.install()
    yield installed
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_interrupts_what_runs(signals: StopSignals):
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert signals.exit_code() == 128 + signal.SIGTERM


def test_a_first_signal_waits_for_the_end_of_a_held_block_and_a_second_does_not(signals: StopSignals):
    passed = []

    def held(*numbers: int) -> None:
        with signals.held():
            for number in numbers:
                signal.raise_signal(number)
                passed.append(number)

    with pytest.raises(KeyboardInterrupt):
        held(signal.SIGINT)
    assert passed == [signal.SIGINT]
    with pytest.raises(KeyboardInterrupt):
        held(signal.SIGTERM)
    assert passed == [signal.SIGINT], "the second one of this process did not wait"


def test_behind_a_held_block_a_signal_interrupts_again(signals: StopSignals):
    with signals.held():
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
