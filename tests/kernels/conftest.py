"""One thread a test, memory that shows what a kernel leaves unwritten, and the way to the modules beside the tests."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors of these tests are too small to be shared out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` full of NaN or of the largest integer, so that nothing a kernel leaves unwritten goes unseen."""
    empty = torch.empty

    def poisoned(*shape: Any, **options: Any) -> torch.Tensor:
        fresh = empty(*shape, **options)
        return fresh.fill_(float("nan") if fresh.is_floating_point() else torch.iinfo(fresh.dtype).max)

    monkeypatch.setattr(torch, "empty", poisoned)
