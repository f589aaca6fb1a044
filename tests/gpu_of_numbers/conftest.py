"""The device, in a process that has been started for it."""

from collections.abc import Iterator

import pytest
import torch

from wingbeat.kernels import choice

CARDS_BY_CAPABILITY = {80: "A100", 89: "L4", 90: "H100", 120: "RTX 5090"}


@pytest.fixture(scope="session")
def gpu(request: pytest.FixtureRequest) -> Iterator:
    """This machine's, where it has one. With `--ptx` kernels run as compiled for what it names, which the card has."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        from tests.gpu_of_numbers.real import real_gpu

        with real_gpu() as real:
            yield real
        return
    from tests.gpu_of_numbers.gpu import number_gpu

    capability = request.config.getoption("--ptx")
    with number_gpu(CARDS_BY_CAPABILITY[capability or 90], compiled=capability is not None) as made:
        yield made


@pytest.fixture(autouse=True)
def every_kernel_runs() -> Iterator[None]:
    """No kernel may be replaced by its reference, which at a start is only a warning."""
    yield
    assert not choice.replaced(), f"references run instead of {', '.join(choice.replaced())}"
