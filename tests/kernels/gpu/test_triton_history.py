"""The kernel that counts tokens against its reference."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.sampling.test_history import draft_ids, histories_of, tables
from wingbeat.kernels.gpu.sampling import history as history_triton
from wingbeat.kernels.sampling import history
from wingbeat.kernels.sampling.history import count_tokens
from wingbeat.kernels.sampling.processors import Histories

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = [pytest.mark.usefixtures("poisoned_memory")]


@pytest.mark.parametrize(("width", "num_columns"), [(40, 33), (5, 60), (0, 4), (13, 1)])
def test_the_kernel_counts_what_its_reference_counts(width, num_columns, monkeypatch):
    """Several tiles, of which the last is partly filled."""
    monkeypatch.setattr(history_triton, "_TILE", 16)
    told, (ids, columns) = histories_of(width), draft_ids(num_columns).sort()
    expected, found = tables(num_columns), tuple(part.to(DEVICE) for part in tables(num_columns))
    monkeypatch.setattr(history.choice, "compiled", lambda name, tensor: None)
    count_tokens(told, ids, columns, *expected)
    moved = Histories(*(part.to(DEVICE) for part in told))
    history_triton.count_tokens(moved, ids.to(DEVICE), columns.to(DEVICE), *found)
    for mine, its in zip(found, expected, strict=True):
        assert torch.equal(mine.cpu(), its)
