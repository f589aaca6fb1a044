"""Triton's launches on the device's memory: interpreted, or compiled for a capability and executed by tests/ptx."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from triton.runtime.jit import KernelInterface

from tests.gpu_of_numbers.device import on_host
from tests.gpu_of_numbers.graphs import Capturing


class HostArgumentError(RuntimeError):
    """A kernel is given memory of the host."""


@contextmanager
def launching(capturing: Capturing, capability: int | None) -> Iterator[Counter[str]]:
    """Within it kernels run, and are recorded in captures; yields how often each ran, replays included.

    Args:
        capability: to compile for, 90 for 9.0; None interprets.

    Raises:
        RuntimeError: this process has chosen otherwise, by TRITON_INTERPRET, when Triton was imported.
    """
    if (os.environ.get("TRITON_INTERPRET") == "1") != (capability is None):
        raise RuntimeError("TRITON_INTERPRET=1 is for interpreted kernels, and for those alone")
    counts: Counter[str] = Counter()

    def run(kernel: Any, grid: Any, args: tuple, options: dict[str, Any]) -> None:
        counts[kernel.__name__] += 1
        with _disable_current_modes():
            there = tree_map_only(Tensor, on_host, (args, options))
            kernel.run(*there[0], grid=grid, warmup=False, **there[1])

    def launch(kernel: Any, grid: Any) -> Callable[..., None]:
        def call(*args: Any, **options: Any) -> None:
            name = kernel.__name__
            if any(isinstance(value, Tensor) and not value.is_cuda for value in (*args, *options.values())):
                raise HostArgumentError(f"an argument of {name} is on the host")
            run(kernel, grid, args, options)
            if capturing.recorder is not None:
                capturing.recorder.note(run, (kernel, grid, args, options), {}, [], name)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelInterface, "__getitem__", launch)
        if capability is None:
            _leave_memory_where_it_is(patch)
            yield counts
            return
        from tests.ptx.launch import executing

        with executing(capability) as launches:
            _know_pools(patch, launches.reachable)
            yield counts


def _leave_memory_where_it_is(patch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter copies the storages of all arguments to the host and back."""
    from triton.runtime.interpreter import GridExecutor

    patch.setattr(GridExecutor, "_init_args_hst", lambda executor, args, options: (list(args), options))
    patch.setattr(GridExecutor, "_restore_args_dev", lambda *args: None)


def _know_pools(patch: pytest.MonkeyPatch, reachable: list[Tensor]) -> None:
    """Kernels that move keys and values of all layers reach them by addresses in a table."""
    from wingbeat.kernels.gpu import kv as kv_kernels

    make_table = kv_kernels.pool_table

    def known_table(caches: Any) -> Any:
        reachable.extend(part for layer in caches for part in layer)
        return make_table(caches)

    patch.setattr(kv_kernels, "pool_table", known_table)
