"""The device, in a process that has been started for it."""

from collections.abc import Iterator

import pytest

CARDS_BY_CAPABILITY = {80: "A100", 89: "L4", 90: "H100"}


@pytest.fixture(scope="session")
def gpu(request: pytest.FixtureRequest) -> Iterator:
    """With `--ptx` kernels run as compiled for that capability, and the card has it."""
    pytest.importorskip("triton")
    from tests.gpu_of_numbers.gpu import number_gpu

    capability = request.config.getoption("--ptx")
    with number_gpu(CARDS_BY_CAPABILITY[capability or 90], compiled=capability is not None) as made:
        yield made
