"""A real GPU in place of the one of numbers: the same cases, counted alike."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction


@dataclass
class RealGpu:
    """Counts of a real device's work."""

    launches: Counter[str] = field(default_factory=Counter)
    """Launches of Triton's kernels by name, eager and captured: a replay launches none."""
    num_replays: int = 0
    """Number of replays of all graphs."""


@contextmanager
def real_gpu() -> Iterator[RealGpu]:
    """Count what this machine's GPU does while entered."""
    gpu, launch, graph = RealGpu(), JITFunction.run, torch.cuda.CUDAGraph

    def counted(function: JITFunction, *args: Any, **options: Any) -> Any:
        gpu.launches[function.__name__] += 1
        return launch(function, *args, **options)

    class Counted(graph):
        def replay(self) -> None:
            gpu.num_replays += 1
            super().replay()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", counted)
        patch.setattr(torch.cuda, "CUDAGraph", Counted)
        yield gpu
