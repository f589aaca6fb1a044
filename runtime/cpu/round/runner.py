"""Runs rounds on a CPU with C++ kernels: token choice and path acceptance are one call each, and give the same tokens
as torch's operations.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wingbeat.kernels.cpu.accept import Compacted, Decree
from wingbeat.kernels.cpu.choice import NativeChoice, SamplingRows
from wingbeat.kernels.cpu.drafted import Shape, SlotTensors
from wingbeat.kernels.cpu.ops import CACHE_DTYPES, CpuKernels, cpu_kernels
from wingbeat.kernels.round.reference import path_moves
from wingbeat.kernels.sampling.processors import LogitProcessors
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.cpu.round.host_trees import HostInbox, HostTrees
from wingbeat.runtime.cpu.round.packed_rows import PackedBuilder, PackedDecodes
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.parts import hooks
from wingbeat.runtime.protocol.messages import AcceptedPaths
from wingbeat.runtime.round.builder import BatchBuilder
from wingbeat.runtime.round.choice import PathAcceptance, TokenChooser, is_greedy
from wingbeat.runtime.round.flight import RoundInFlight
from wingbeat.runtime.round.rows import Feature
from wingbeat.runtime.round.runner import ModelRunner, RoundParts
from wingbeat.runtime.round.slots import DecodeRows, SlotState
from wingbeat.runtime.scheduling.request import SamplingParams
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput
from wingbeat.runtime.scheduling.sequence import Sequence


class NativeChooser(TokenChooser):
    """Chooses tokens in C++. Greedy rows with logit processors are left to the base class."""

    def __init__(self, choice: NativeChoice, slots: SlotState, max_depth: int) -> None:
        super().__init__(slots, 0, max_depth)
        self._native = choice

    def choose(self, seqs: list[Sequence], decodes: PackedDecodes, logits: Tensor) -> Tensor:
        """See `TokenChooser.choose`.

        If all rows are greedy, returns the logits instead of tokens: `NativeAcceptance` takes the argmax only along the
        paths.
        """
        if logits.dtype == torch.float32 and is_greedy([seq.request.params for seq in seqs]):
            return logits
        return super().choose(seqs, decodes, logits)

    def _sample(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        params: list[SamplingParams] | None,
        processors: LogitProcessors | None,
    ) -> Tensor:
        if params is not None and not any(param.temperature > 0 for param in params):
            return super()._sample(logits, rows, positions, params, processors)
        state = self.slots
        columns = (state.temperatures, state.top_ks, state.top_ps, state.min_ps, state.seeds)
        return self._native.choose(logits, SamplingRows(*(column[rows] for column in columns), positions), processors)


class NativeAcceptance(PathAcceptance):
    """Walks trees in C++. The same C++ call also compacts keys and values, if they are in this process's pools."""

    def __init__(
        self, kernels: CpuKernels, slots: SlotState, cache: KVCache, builder: BatchBuilder, config: EngineConfig
    ) -> None:
        super().__init__(slots, cache, builder, config)
        pools = cache.own_pools()
        self._moves = not pools
        """Whether the cache moves keys and values, because the C++ call does not."""
        compacted = Compacted(pools, slots.block_tables) if pools else None
        self._paths = kernels.tree_acceptance(slots.committed_lens, slots.last_token_ids, compacted)

    def accept(
        self, decodes: PackedDecodes | None, chosen: Tensor, taps: Tensor | None, evidence: Tensor | None = None
    ) -> AcceptedPaths:
        """See `PathAcceptance.accept`.

        Args:
            chosen: int64 [num_rows] tokens, or logits, as `NativeChooser.choose` returns them.
        """
        if decodes is None:
            return super().accept(None, chosen, taps)
        slots, tree, width = decodes.slots, decodes.tree, self.max_depth + 1
        if tree is None:
            walk = self._paths.accept(slots, decodes.token_ids, None, None, chosen, None, None, longest=1, width=width)
            path_taps = None if taps is None else taps[: len(slots), None]
            ones = walk.num_tokens
            return AcceptedPaths(slots, decodes.roots, walk.token_ids, ones, ones, walk.nodes, path_taps, evidence)
        decree = None
        if self.forcer is not None:
            decree = Decree(self.forcer.limits, self.slots.epochs, decodes.roots)
        walk = self._paths.accept(
            slots,
            tree.token_ids,
            tree.parents,
            tree.num_valid,
            chosen,
            None if decodes.packing is None else decodes.packing.rows,
            taps,
            longest=min(width, tree.token_ids.shape[1]),
            width=width,
            decree=decree,
        )
        if walk.moved and self._moves and self._shape.moves:
            places = slots, decodes.roots, walk.nodes, walk.num_tokens
            self.cache.move(*path_moves(*places, self.slots.columns, self._shape))
        return AcceptedPaths(
            slots,
            decodes.roots,
            walk.token_ids,
            walk.num_tokens,
            tree.num_valid,
            walk.nodes,
            walk.taps,
            evidence,
            tree_token_ids=tree.token_ids,
            tree_parents=tree.parents,
        )


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
