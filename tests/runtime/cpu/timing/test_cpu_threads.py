"""More threads are taken where they pay, and only there."""

import time

import pytest
import torch

from tests.runtime.models import random_model
from wingbeat.runtime.cpu.timing import cpu_threads, round_trial
from wingbeat.runtime.cpu.timing.cpu_threads import choose_threads
from wingbeat.runtime.verifier.loading.loader import prepare_model


@pytest.mark.parametrize(
    ("seconds", "chosen", "asked"),
    [
        ({1: [1.0, 4.0], 2: [0.6, 2.2]}, 2, {1, 2}),
        ({1: [1.0, 4.0], 2: [0.97, 3.9]}, 1, {1, 2}),
        ({2: [2.0, 5.0], 4: [0.4, 1.2]}, 4, {2, 4}),
        ({1: [1.0, 4.0], 2: [0.5, 2.1], 4: [0.49, 2.0]}, 2, {1, 2, 4}),
        ({}, 1, set()),
    ],
)
def test_threads_are_halved_until_fewer_take_clearly_longer(seconds, chosen, asked, monkeypatch):
    found: set[int] = set()

    def given(ways, pause_s):
        found.update(ways)
        return {count: seconds[count] for count in ways}

    monkeypatch.setattr(cpu_threads, "least_seconds", given)
    assert cpu_threads.tried("verifier", (1, 16), list, max(seconds, default=1)) == chosen
    assert found == asked


def test_a_round_that_is_long_is_run_little():
    runs = {way: 0 for way in "ab"}

    def rounds(way):
        def run():
            runs[way] += 1
            time.sleep(round_trial.LONG_S * 1.1)

        return lambda: [run]

    seconds = round_trial.least_seconds({way: rounds(way) for way in runs})
    assert set(runs.values()) == {4}, "two turns of one that warms up and one that counts"
    assert all(row[0] > round_trial.LONG_S for row in seconds.values())


def test_what_was_tried_is_what_torch_is_left_with():
    chosen = choose_threads(prepare_model(random_model("llama"), "llama"), 2)
    assert chosen in (1, 2)
    assert torch.get_num_threads() == chosen
