"""More threads are taken where they pay, and only there."""

import pytest
import torch

from tests.runtime.models import random_model
from wingbeat.runtime.verifier.loading.cpu_threads import choose_threads, least_that_pays
from wingbeat.runtime.verifier.loading.loader import prepare_model


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({1: [1.0, 4.0], 2: [0.6, 2.2]}, 2),
        ({1: [1.0, 4.0], 2: [0.97, 3.9]}, 1),
        ({1: [1.0, 4.0], 2: [2.0, 5.0], 4: [0.4, 1.2]}, 4),
        ({1: [1.0, 4.0], 2: [0.5, 2.1], 4: [0.49, 2.0]}, 2),
        ({1: [1.0, 4.0]}, 1),
    ],
)
def test_the_least_that_pays_is_taken(seconds, chosen):
    assert least_that_pays(seconds) == chosen


def test_what_was_tried_is_what_torch_is_left_with():
    before = torch.get_num_threads()
    try:
        chosen = choose_threads(prepare_model(random_model("llama"), "llama"), 2)
        assert chosen in (1, 2)
        assert torch.get_num_threads() == chosen
    finally:
        torch.set_num_threads(before)
