"""A fixture of this folder: a GPU of shapes."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def gpu() -> Iterator[Any]:
    """A `FakeGpu`; tests that need one are skipped where Triton cannot stand in for it."""
    from tests.runtime.fake_gpu import fake_gpu, why_not

    if (reason := why_not()) is not None:
        pytest.skip(f"no fake GPU: {reason}")
    with fake_gpu() as mode:
        yield mode
