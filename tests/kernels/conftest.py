"""Memory that shows what a kernel leaves unwritten, and kernels that are executed as compiled (`--ptx`)."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from wingbeat.kernels import choice
from wingbeat.kernels.parts import load_function


@pytest.fixture(autouse=True, scope="session")
def executed(request: pytest.FixtureRequest) -> Iterator[None]:
    """With `--ptx`, launches are compiled for that compute capability and their PTX is executed."""
    capability = request.config.getoption("--ptx")
    if capability is None:
        yield
        return
    executing, kv_kernels = load_function("tests.ptx.launch:executing"), choice.module_of("move_kv")
    with executing(capability) as launches, pytest.MonkeyPatch.context() as patch:
        make_table = kv_kernels.pool_table

        def known_table(caches: Any) -> torch.Tensor:
            launches.reachable[:] = [part for layer in caches for part in layer]
            return make_table(caches)

        patch.setattr(kv_kernels, "pool_table", known_table)
        yield
    report = request.config.getoption("--ptx-report")
    if report is not None:
        report.write_text(json.dumps(launches.counts))


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` full of NaN or of the largest integer, so that nothing a kernel leaves unwritten goes unseen."""
    empty = torch.empty

    def poisoned(*shape: Any, **options: Any) -> torch.Tensor:
        fresh = empty(*shape, **options)
        return fresh.fill_(float("nan") if fresh.is_floating_point() else torch.iinfo(fresh.dtype).max)

    monkeypatch.setattr(torch, "empty", poisoned)
