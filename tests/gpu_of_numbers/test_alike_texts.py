"""Deterministic mode on the GPU of numbers, each case in a process of its own: see `alike_cases`."""

import pytest

from tests.gpu_of_numbers.test_gpu_of_numbers import run
from tests.needs import needs


def test_a_few_texts_are_the_same_on_and_off_and_alone():
    run("alike_cases.py", "--ptx", "90", "-k", "a_few")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2", "gemma3"])
def test_texts_are_the_same_on_and_off_and_alone(name):
    run("alike_cases.py", "--ptx", "90", "-k", name)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_200_texts_under_changing_load():
    run("alike_cases.py", "--ptx", "90", "-k", "200")


@needs("packed_on_gpus")
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["Q4_0", "fp8", "awq"])
def test_texts_by_packed_weights(kind):
    run("alike_packed_cases.py", "--ptx", "90", "-k", kind)
