"""Takes what the target chose: the trees are walked along it, KV and slot state follow the accepted paths."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from wingbeat.kernels.tree.reference import walk_tree
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.protocol.messages import AcceptedPaths
from wingbeat.runtime.verifier.batch import BatchBuilder, Decodes
from wingbeat.runtime.verifier.choices.forced_acceptance import AcceptanceForcer
from wingbeat.runtime.verifier.slots import SlotState


class PathAcceptance:
    """Decides the decodes of one engine's rounds.

    Args:
        slots: device state by slot, which goes on to the end of each path.
        builder: knows where positions are stored.
    """

    def __init__(self, slots: SlotState, cache: KVCache, builder: BatchBuilder, config: EngineConfig) -> None:
        self.slots, self.cache, self.builder, self.config = slots, cache, builder, config
        self.max_depth = config.speculation.max_path - 1
        self.forcer: AcceptanceForcer | None = None
        if config.forced_acceptance is not None:
            self.forcer = AcceptanceForcer(config.forced_acceptance, self.max_depth, slots.device)

    def accept(self, decodes: Decodes | None, chosen: Tensor, taps: Tensor | None) -> AcceptedPaths:
        """Walk the trees along the target's choices; KV and slot state follow the accepted paths.

        Args:
            chosen: int64 [num_rows] of the decodes.
            taps: [num_rows or more, taps_size].
        """
        if decodes is None:
            empty = torch.zeros(0, dtype=torch.int64, device=self.slots.device)
            none = empty.view(0, self.max_depth + 1)
            return AcceptedPaths(empty, empty, none, empty, empty, none, None)
        if decodes.tree is None:
            return self._accept_bare(decodes, chosen, taps)
        tree = decodes.tree
        num_reqs, num_nodes = tree.token_ids.shape
        targets = chosen if decodes.packing is None else chosen[decodes.packing.rows]
        longest = min(self.max_depth + 1, num_nodes)
        walked, targets = tree.token_ids, targets.view(num_reqs, num_nodes)
        if self.forcer is not None:
            walked, targets = self.forcer.apply(tree, targets, self.slots.epochs[decodes.slots], decodes.roots)
        walk = walk_tree(walked, tree.parents, tree.num_valid, targets, longest)
        # A walk is no longer than its tree: the tokens are padded to the width that the drafter's buffers have.
        token_ids = pad(walk.token_ids, (0, self.max_depth + 1 - longest))
        self._compact(decodes, walk.nodes, walk.num_tokens)
        self.slots.committed_lens[decodes.slots] += walk.num_tokens
        self.slots.last_token_ids[decodes.slots] = token_ids.gather(1, (walk.num_tokens - 1)[:, None])[:, 0]
        path_taps = None
        if taps is not None:
            path_taps = taps[decodes.rows_of(walk.nodes)]
        return AcceptedPaths(
            decodes.slots,
            decodes.roots,
            token_ids,
            walk.num_tokens,
            tree.num_valid,
            walk.nodes,
            path_taps,
            tree_token_ids=walked,
            tree_parents=tree.parents,
        )

    def _accept_bare(self, decodes: Decodes, chosen: Tensor, taps: Tensor | None) -> AcceptedPaths:
        """`accept` of bare roots: each emits the target's choice."""
        ones = torch.ones_like(decodes.slots)
        self.slots.committed_lens[decodes.slots] += 1
        self.slots.last_token_ids[decodes.slots] = chosen
        return AcceptedPaths(
            slots=decodes.slots,
            positions=decodes.roots,
            token_ids=pad(chosen[:, None], (0, self.max_depth)),
            num_tokens=ones,
            num_valid=ones,
            nodes=torch.zeros_like(chosen)[:, None],
            taps=None if taps is None else taps[: len(chosen), None],
        )

    def _compact(self, decodes: Decodes, nodes: Tensor, num_tokens: Tensor) -> None:
        """Move the accepted nodes' KV from their scratch slots to the positions they now occupy."""
        if self.config.speculation.draft_top_k == 1:
            return
        steps = torch.arange(nodes.shape[1], device=nodes.device)
        moved = (steps < num_tokens[:, None]) & (nodes != steps)
        if self.builder.on_host and not bool(moved.any()):
            return
        start = decodes.roots[:, None]
        source = torch.where(moved, self.builder.slot_mapping(decodes.slots, start + nodes), 0)
        target = torch.where(moved, self.builder.slot_mapping(decodes.slots, start + steps), 0)
        self.cache.move(source, target)
