"""Weights that a trainer writes into a verifier of int8: they are rounded as those of a file are."""

import pytest

from tests.runtime.models import noisy
from tests.runtime.rollouts.test_served_weights import moved, values_of, write, written
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.runtime.rollouts.served_weights import ServedWeights
from wingbeat.runtime.verifier.loading.loader import prepare_model

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_weights_of_eight_bits_are_rounded_as_they_are_written(name: str, tied: bool):
    model = noisy(name, tie_word_embeddings=tied)
    other = moved(model)
    values = values_of(other)
    expected = written(prepare_model(other, "fresh", eight_bits=True))
    loaded = prepare_model(model, "served", eight_bits=True)
    served = ServedWeights(loaded)
    old, before = written(loaded), served.checksums()
    saved = {one: served.save(one) for one in served.names()}
    write(loaded, values)
    assert written(loaded) == expected != old
    for one, held in saved.items():
        served.restore(one, held)
    served.finish()
    assert (written(loaded), served.checksums()) == (old, before)
