"""Memory that shows what a kernel leaves unwritten."""

from typing import Any

import pytest
import torch


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` full of NaN or of the largest integer, so that nothing a kernel leaves unwritten goes unseen."""
    empty = torch.empty

    def poisoned(*shape: Any, **options: Any) -> torch.Tensor:
        fresh = empty(*shape, **options)
        return fresh.fill_(float("nan") if fresh.is_floating_point() else torch.iinfo(fresh.dtype).max)

    monkeypatch.setattr(torch, "empty", poisoned)
