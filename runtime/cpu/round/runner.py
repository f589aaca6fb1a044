"""Runs rounds on a CPU with C++ kernels."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from wingbeat.kernels.cpu.drafted import Shape, SlotTensors
from wingbeat.kernels.cpu.ops import CACHE_DTYPES, CpuKernels, cpu_kernels
from wingbeat.runtime.cpu.round.choice import NativeAcceptance, NativeChooser
from wingbeat.runtime.cpu.round.host_trees import HostInbox, HostTrees
from wingbeat.runtime.cpu.round.packed_rows import PackedBuilder
from wingbeat.runtime.parts import hooks
from wingbeat.runtime.round.flight import RoundInFlight
from wingbeat.runtime.round.rows import Feature
from wingbeat.runtime.round.runner import ModelRunner, RoundParts
from wingbeat.runtime.round.slots import DecodeRows
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput


def host_round(kv_dtype: torch.dtype) -> "Callable[..., HostRunner] | None":
    """Returns the CPU's runner class; None without kernels, or if they do not support KV of this dtype."""
    kernels = cpu_kernels() if kv_dtype in CACHE_DTYPES else None
    return None if kernels is None else partial(HostRunner, kernels)


class HostRunner(ModelRunner):
    """Runs rounds whose draft trees are in host memory, so that the host can read the trees without waiting for a
    device.
    """

    rows_can_be_alike = True
    inbox: HostInbox

    def __init__(self, kernels: CpuKernels, **parts: Any) -> None:
        self._kernels = kernels
        super().__init__(**parts)

    def _make_parts(
        self, last_position: int, pieces: bool, features: tuple[Feature, ...], most_rows: int
    ) -> RoundParts:
        kernels, slots, cache, config = self._kernels, self.slots, self.cache, self.config
        present = SlotTensors(*(getattr(slots, name) for name in SlotTensors._fields))
        shape = Shape(slots.vocab_size, config.speculation.draft_top_k == 1, config.block_size, last_position)
        self._intake = intake = kernels.draft_intake(present, shape)
        builder = PackedBuilder(intake, cache, slots, config, last_position, features)
        return RoundParts(
            builder,
            NativeChooser(kernels.native_choice(), slots, self.max_depth),
            NativeAcceptance(kernels, slots, cache, builder, config),
            HostInbox(intake),
            None,
        )

    def check(self, plan: SchedulerOutput, rows: DecodeRows, drafted: HostTrees | None) -> HostTrees | None:
        """See `ModelRunner.check`; forced tokens form chains even without a drafter."""
        if not plan.adds_nodes:
            return drafted
        trees = None if drafted is None else drafted.checked()
        for add_nodes in hooks("add_nodes_on_host"):
            trees = add_nodes(plan, trees, self.config.speculation)
        return None if trees is None else HostTrees.of_checked(self._intake, rows.slots, trees)

    def launch(
        self,
        plan: SchedulerOutput,
        rows: DecodeRows,
        trees: HostTrees | None,
        num_nodes: int | None = None,
        before_choice: Callable[[], object] | None = None,
    ) -> RoundInFlight:
        """See `ModelRunner.launch`."""
        return super().launch(plan, rows, None if trees is None else trees.verified(), num_nodes, before_choice)
