"""Drafts a block in one pass with DFlash-based heads, as chains or trees.

The keys and values of position i of a sequence are computed from the verifier's taps at position i alone, and are
stored at index i of the sequence's block table. Of L committed tokens, positions 0..L - 2 are stored. The block's first
slot is the last committed token, at position L - 1. During the pass the slots' keys and values are stored after the
context; after the pass they are discarded. Keys and values of the context therefore never depend on drafted tokens, so
that cached prefixes and replays give the same values. The whole block is always run, even if the trees have fewer
levels, because heads are trained on whole blocks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wingbeat.kernels.kv.reference import slot_mapping, store_kv
from wingbeat.kernels.tree.candidates import top_candidates
from wingbeat.kernels.tree.results import Coupling
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters import growth
from wingbeat.runtime.drafters.base import DraftBatch, Drafter, DrafterNeeds, DrafterOptions
from wingbeat.runtime.drafters.decided_rows import DecidedRows
from wingbeat.runtime.drafters.draft_pool import DraftPool
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.drafters.growth import Growth, Roots, Rules
from wingbeat.runtime.drafters.head_drafter import HeadDrafter
from wingbeat.runtime.drafters.paged_attend import PagedAttend
from wingbeat.runtime.drafters.staged_drafter import graph_device_of
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.heads.contract import Attend, Continuations, HeadConvention
from wingbeat.runtime.heads.files import CheckpointError
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.kv.pool import LayerAttention
from wingbeat.runtime.one_pass.config import LayerMask
from wingbeat.runtime.one_pass.families import OnePassFamily
from wingbeat.runtime.one_pass.head import OnePassHead
from wingbeat.runtime.one_pass.load import load_one_pass_head, read_one_pass_checkpoint
from wingbeat.runtime.one_pass.parallel_eagle import ParallelEagleHead, load_parallel_head
from wingbeat.runtime.one_pass.walks import ChooseCandidates, MarginalWalk, grow_along
from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.round.rows import Segment
from wingbeat.runtime.verifier.layers.linears import lay_out_linears


class OnePassDrafter(HeadDrafter):
    """Drafter with a head over a block, and the keys and values of the context.

    Args:
        head: weights, on the device to draft on.
        speculation: shape of the trees.
        graph_device: see `StagedDrafter`.

    Raises:
        ValueError: the trees are deeper than the head's block, or have more nodes per level than the head has
            candidates per slot.
    """

    def __init__(
        self, head: OnePassHead, speculation: SpeculationConfig, graph_device: GraphDevice | None = None
    ) -> None:
        config = head.config
        check_shape(speculation, config.num_drafted)
        if config.lattice is not None and speculation.draft_top_k > config.lattice.top_k:
            raise ValueError(
                f"draft_top_k={speculation.draft_top_k}: this head has {config.lattice.top_k} candidates for a token"
            )
        self.head = head.eval().requires_grad_(False)
        lay_out_linears(self.head)
        self.trained_positions = config.max_position_embeddings
        heads, size = config.num_key_value_heads, config.head_dim
        layers = [LayerAttention(config.num_attention_heads, heads, size, size, mask.window) for mask in config.masks]
        pool = DraftPool(layers, config.block_size, head.dtype, head.device)
        growth = Growth(speculation, head.draft_token_ids, packed=True, whole=True)
        super().__init__(speculation, pool, growth, graph_device)
        self.needs = DrafterNeeds(config.tap_layers, keeps_context=True, token_bytes=pool.token_bytes)
        self._choose_for = CandidateChooser(growth, head)

    def read_as(self, convention: HeadConvention) -> None:
        """See `Drafter.read_as`."""
        head = self.head.with_convention(convention)
        check_shape(self.speculation, head.config.num_drafted)
        self.head, self.needs = head, self.needs._replace(tap_layers=convention.tap_layers)

    def _commit_chunks(self, batch: DraftBatch) -> None:
        """Commits the chunks of a batch. The tensors' shapes depend on the data, so this is not captured."""
        chunks = self.pool.chunks(batch)
        rotated = batch.chunk_rotations([chunk.positions for chunk in chunks])
        self._keep(batch.chunk_taps, rotated, torch.cat([chunk.slot_mapping for chunk in chunks]))

    def _commit_decodes(self, rows: DecidedRows, block_tables: Tensor) -> None:
        """Commits decoded positions. Padding columns are written to block 0."""
        positions, counted = rows.spread()
        mapping = slot_mapping(block_tables[rows.slots], positions, self.pool.block_size, counted).flatten()
        # Padding columns must contain finite values, because attention may read block 0 for masked keys.
        taps, rotated = rows.taps.masked_fill(~counted[..., None], 0).flatten(0, 1), rows.rotated(positions).flatten()
        if not self.fixed_shapes:
            real = counted.flatten()
            taps, rotated, mapping = taps[real], rotated[real], mapping[real]
        self._keep(taps, rotated, mapping)

    def _keep(self, taps: Tensor, rotated: Tensor, mapping: Tensor) -> None:
        """Stores keys and values of committed positions, computed from taps [n, taps_size] and RoPE positions."""
        positions = rotated if rotated.dim() == 1 else rotated[0]
        context = self.head.context(self.head.fuse(taps), self.head.rotary(positions))
        for cache, (key, value) in zip(self.pool.caches, context, strict=True):
            store_kv(key.contiguous(), value.contiguous(), *cache, mapping)

    def _grow(self, roots: Roots, block_tables: Tensor, rules: Rules = ()) -> TokenTree:
        """Runs one pass over the blocks of all roots, then grows a tree per root from the outputs of its block's
        slots.
        """
        head, pool = self.head, self.pool
        num_context = roots.positions[0] - 1
        tables = pool.tables(block_tables[roots.slots], num_context)
        positions = num_context[:, None] + torch.arange(head.config.block_size, device=self.device)
        mapping = slot_mapping(tables, positions, pool.block_size).flatten()
        segment_of = _segments(pool, positions, num_context, tables)
        attends: list[Attend] = [
            PagedAttend(cache, mapping, [segment_of(mask)], head.config.head_dim**-0.5, mask.window or 0, layer.sinks)
            for cache, mask, layer in zip(pool.caches, head.config.masks, head.layers, strict=True)
        ]
        states = head.run_block(roots.token_ids, head.rotary(roots.rotated(positions, by_request=True)), attends)
        return grow_along(self.growth, roots, head.walk(states, self._choose_for(roots)), rules)


class CandidateChooser:
    """Selects each slot's candidates, according to the requests' rules and with the noise with which the target will
    sample.

    Without this noise, the token that the target will sample would seldom be among the few candidates.
    """

    def __init__(self, growth: Growth, head: OnePassHead) -> None:
        self.growth, self._ids = growth, head.draft_token_ids
        self._columns: Tensor | None = None
        """int64 [vocab_size]: draft id of each target id; None for heads without candidates."""
        if head.config.lattice is not None:
            ids = self._ids
            columns = torch.arange(len(ids), device=ids.device)
            self._columns = ids.new_zeros(head.config.vocab_size).scatter_(0, ids, columns)

    def __call__(self, roots: Roots) -> ChooseCandidates | None:
        """A function that selects candidates for these roots; None if all roots are greedy and without rules."""
        sampled = growth.couplings_of(roots)[0] is not None
        if self._columns is None or not (sampled or roots.rules is not None):
            return None
        num_levels, columns = len(roots.positions), self._columns
        temperatures, seeds = (column.repeat_interleave(num_levels) for column in (roots.temperatures, roots.seeds))
        coupling = Coupling(temperatures, seeds, roots.positions.t().flatten()) if sampled else None

        def choose(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
            logits = logits[:, :num_levels]
            ruled = ruled_levels(roots, logits)
            rows, noise = ruled.logits.flatten(0, 1)[:, None], coupling
            if ruled.is_tempered and noise is not None:
                noise = noise.tempered()
            token_ids, ranks = (best[:, 0] for best in top_candidates(rows, self._ids, top_k, noise))
            scores = (
                logits.flatten(0, 1).gather(1, columns[token_ids]).masked_fill(ranks == float("-inf"), float("-inf"))
            )
            return token_ids.unflatten(0, (-1, num_levels)), scores.unflatten(0, (-1, num_levels))

        return choose


def ruled_levels(roots: growth.Roots, logits: Tensor) -> Continuations:
    """Apply the requests' rules at once to the logits of all levels, [num_reqs, num_levels, draft_vocab_size].

    Level 0 holds the logits that follow the roots.
    """
    if roots.rules is None:
        return Continuations(logits)
    first, rest = roots.rules.apply(Continuations(logits[:, :1]), is_root=True), logits[:, 1:]
    if not rest.shape[1]:
        return first
    rest = roots.rules.apply(Continuations(rest))
    return first._replace(logits=torch.cat([first.logits, rest.logits], dim=1))


def check_shape(speculation: SpeculationConfig, num_drafted: int) -> None:
    """Raise an error for trees that are deeper than a head's block.

    Raises:
        ValueError: the trees are deeper; the message names both numbers.
    """
    levels = speculation.max_path - 1
    if levels > num_drafted:
        raise ValueError(f"draft_steps={levels}: this head drafts {num_drafted} tokens at most")


def _segments(
    pool: DraftPool, positions: Tensor, num_context: Tensor, tables: Tensor
) -> Callable[[LayerMask], Segment]:
    """Returns a function (layer mask) -> attention segment of slots at positions int64 [num_reqs, num_slots].

    Layers with equal causality share a segment.
    """
    made: dict[bool, Segment] = {}

    def segment_of(mask: LayerMask) -> Segment:
        if mask.causal not in made:
            if mask.causal:
                made[True] = pool.causal_segment(0, positions, num_context, tables)
            else:
                num_reqs, num_slots = positions.shape
                visible = torch.ones(num_reqs, num_slots, num_slots, dtype=torch.bool, device=pool.device)
                made[False] = pool.tree_segment(positions, visible, num_context, tables)
        return made[mask.causal]

    return segment_of


def build_one_pass(
    source: str, target: TargetDescription, speculation: SpeculationConfig, options: DrafterOptions
) -> Drafter:
    """Load a head as the drafter of a verifier; raises the errors of `load_one_pass_head` and of the drafter's class.

    Args:
        source: folder of the head.
    """
    checkpoint = read_one_pass_checkpoint(source)
    family = checkpoint.family
    load = load_parallel_head if family is OnePassFamily.PEAGLE else load_one_pass_head
    kind = ParallelEagleDrafter if family is OnePassFamily.PEAGLE else OnePassDrafter

    def load_head(folder: str) -> Any:
        found = read_one_pass_checkpoint(folder)
        if found.family is not family:
            raise CheckpointError(f"{folder} holds a head of {found.family}, but one of {family} is served")
        return load(found, target, options.dtype, options.device)

    head = load(checkpoint, target, options.dtype, options.device)
    drafter = kind(head, speculation, graph_device_of(options, head.device))
    drafter.load_head, drafter.source, drafter.target = load_head, source, target
    return drafter


class ParallelEagleDrafter(EagleDrafter):
    """Drafter with a P-EAGLE head and its KV; for the arguments see `EagleDrafter`."""

    head: ParallelEagleHead
    in_one_pass = True

    def _grow(self, roots: Roots, block_tables: Tensor, rules: Rules = ()) -> TokenTree:
        """Runs one pass over the masked slots of all roots, then grows a tree per root from the slots' logits."""
        hidden = self.hidden[roots.slots][:, None].to(self.dtype)
        if self.pool.num_drafted:
            hidden = torch.cat([hidden, self._run_masked(roots, block_tables)], dim=1)
        return grow_along(self.growth, roots, MarginalWalk(self.head.logits(hidden)), rules)

    def _run_masked(self, roots: Roots, block_tables: Tensor) -> Tensor:
        """Hidden states [num_reqs, num_masked, H] of the masked slots after the last pairs."""
        num_context, num_masked = roots.positions[0] - 1, self.pool.num_drafted
        tables = self.pool.tables(block_tables[roots.slots], num_context)
        positions = num_context[:, None] + torch.arange(num_masked, device=self.device)
        mapping = slot_mapping(tables, positions, self.pool.block_size).flatten()
        segment = self.pool.causal_segment(0, positions, num_context, tables)
        token_ids = torch.full_like(positions, self.head.mask_token_id).flatten()
        features = self.head.masked_features()[0].expand(len(token_ids), -1).contiguous()
        rotary = self.head.rotary(roots.rotated(positions, by_request=True).flatten())
        attends = self.pool.attends(mapping, [segment], self.head.scaling)
        return self.head.run_layers(token_ids, features, rotary, attends).unflatten(0, positions.shape)
