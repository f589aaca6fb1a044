"""Chooses the target's token at each row of a round, its log-probability, and the accepted path of each tree."""

from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from wingbeat.kernels.round.reference import PathShape, WalkedTrees, settle_paths
from wingbeat.kernels.sampling.processors import LogitProcessors
from wingbeat.kernels.sampling.reference import best_tokens, choose_tokens, sampling_workspace
from wingbeat.kernels.tree.results import GrownTree
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.protocol.messages import AcceptedPaths
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.round.builder import BatchBuilder
from wingbeat.runtime.round.forced_acceptance import AcceptanceForcer
from wingbeat.runtime.round.processors import ProcessorTables, tree_paths
from wingbeat.runtime.round.rows import Decodes
from wingbeat.runtime.round.slots import SlotState
from wingbeat.runtime.scheduling.request import MAX_LOGPROBS, SamplingParams
from wingbeat.runtime.scheduling.sequence import Sequence

_ROWS_AT_ONCE = 64
"""Number of rows whose log-probabilities are computed at once; each row needs vocab_size float32 of memory."""


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """Packs log-probabilities into int64, so that they can be downloaded together with a round's tokens.

    Args:
        logits: [num_rows, vocab_size], any float type.
        token_ids: int64 [num_rows]: token chosen at each row.
        num_top: number of most likely tokens per row, 0 or more.

    Returns:
        int64 [num_rows, 1 + 2 * num_top]. The columns are: log-probability of the chosen token, ids of the most likely
        tokens, log-probabilities of the most likely tokens. Log-probabilities are stored as the bits of float64. On a
        CPU, tokens of equal logits are ordered by id.
    """
    parts = [
        _pack(rows.to(torch.float32), ids, num_top)
        for rows, ids in zip(logits.split(_ROWS_AT_ONCE), token_ids.split(_ROWS_AT_ONCE), strict=True)
    ]
    return torch.cat(parts) if parts else token_ids.new_zeros(0, 1 + 2 * num_top)


def _pack(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    normalizer = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids[:, None]) - normalizer
    top, ids = logits.topk(num_top, dim=-1)
    return torch.cat([_bits(chosen), ids, _bits(top - normalizer)], dim=1)


def _bits(numbers: Tensor) -> Tensor:
    return numbers.to(torch.float64).view(torch.int64)


class Choosing(StrEnum):
    """Kinds of captured token choice; each kind can do everything that the preceding kinds can do."""

    GREEDY = "greedy"
    """Takes the token with the largest logit; for rounds in which every temperature is 0."""
    SAMPLED = "sampled"
    ALTERED = "altered"
    """Processes logits first, and reports log-probabilities."""

    @classmethod
    def of(cls, params: list[SamplingParams]) -> "Choosing":
        """Returns the cheapest kind of choice that serves all these requests."""
        if any(param.alters_logits or param.logprobs is not None for param in params):
            return cls.ALTERED
        return cls.SAMPLED if any(param.temperature > 0 for param in params) else cls.GREEDY


class TokenChooser:
    """Chooses tokens for the sequences of one engine, according to the sampling parameters in the sequences' slots.

    Args:
        slots: device state by slot.
        workspace_rows: maximum number of rows for which a captured round chooses tokens; 0 if rounds are not captured.
        max_depth: depth of the deepest node of a tree.
    """

    def __init__(self, slots: SlotState, workspace_rows: int, max_depth: int) -> None:
        self.slots = slots
        self.processors: ProcessorTables = slots.processors
        self.device = slots.device
        self._max_depth = max_depth
        self._workspace_rows = workspace_rows
        self._workspace = sampling_workspace(workspace_rows, slots.vocab_size, self.device) if workspace_rows else None

    def choose(self, seqs: list[Sequence], decodes: Decodes | None, logits: Tensor) -> Tensor:
        """Chooses a token for each row of the decodes of `seqs`; returns int64 [num_rows].

        Args:
            logits: [num_rows, vocab_size].
        """
        params = [seq.request.params for seq in seqs]
        if is_greedy(params):
            return best_tokens(logits, self._room(len(logits)))
        rows = decodes.packed(decodes.slots[:, None].expand_as(decodes.positions))
        processors, positions = None, decodes.packed(decodes.positions) + 1
        if any(param.alters_logits for param in params):
            nodes, paths = self._nodes_and_paths(decodes)
            processors = self.processors.of_rows(rows, positions, nodes, paths, self._selected(params))
        return self._sample(logits, rows, positions, params, processors)

    def choose_first(self, seqs: list[Sequence], logits: Tensor) -> Tensor:
        """Chooses the first token of each sequence whose prompt ends in this round; returns int64 [num_seqs].

        Args:
            logits: [num_seqs, vocab_size].
        """
        params = [seq.request.params for seq in seqs]
        if is_greedy(params):
            return best_tokens(logits, self._room(len(logits)))
        rows, positions = upload([[seq.slot for seq in seqs], [len(seq.token_ids) for seq in seqs]], self.device)
        processors = None
        if any(param.alters_logits for param in params):
            roots = torch.zeros_like(rows)
            processors = self.processors.of_rows(rows, positions, roots, None, self._selected(params))
        return self._sample(logits, rows, positions, params, processors)

    def _selected(self, params: list[SamplingParams]) -> list[SamplingParams] | None:
        # On a GPU every processor is applied: each combination of processors would need its own kernel, compiled while
        # requests wait.
        return None if self.device.type == "cuda" else params

    def choose_fixed(self, decodes: Decodes, logits: Tensor, choosing: Choosing, nodes: Tensor | None) -> Tensor:
        """Chooses tokens for decodes, int64 [num_rows]; all tensor shapes depend on the arguments' shapes alone.

        Args:
            nodes: int64 [num_reqs, num_nodes]: index of each row's node in the tree before pruning; None if the device
                did not prune trees.
        """
        if choosing is Choosing.GREEDY:
            return best_tokens(logits, self._room(len(logits)))
        rows = decodes.slots[:, None].expand_as(decodes.positions).flatten()
        positions, processors = decodes.positions.flatten() + 1, None
        if choosing is Choosing.ALTERED:
            own, paths = self._nodes_and_paths(decodes)
            own = own if nodes is None else nodes.flatten()
            processors = self.processors.of_rows(rows, positions, own, paths, None)
        return self._sample(logits, rows, positions, None, processors)

    def path_logprobs(
        self, decodes: Decodes, accepted: AcceptedPaths, logits: Tensor, rows: list[int] | None
    ) -> Tensor:
        """Returns the log-probabilities of the emitted tokens, packed as by `token_logprobs`.

        Args:
            logits: [num_rows, vocab_size], the model's unprocessed logits.
            rows: decodes to report on; None reports on all.

        Returns:
            int64 [num_decodes, 1..max_path, 1 + 2 * MAX_LOGPROBS].
        """
        where, token_ids = decodes.rows_of(accepted.nodes), accepted.token_ids[:, : accepted.nodes.shape[1]]
        if rows is not None:
            chosen = upload(rows, self.device)
            where, token_ids = where[chosen], token_ids[chosen]
        packed = token_logprobs(logits[where.flatten()], token_ids.flatten(), self._num_top)
        return packed.view(*token_ids.shape, -1)

    def chunk_logprobs(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        """Log-probabilities of tokens sampled after chunks, then of prompt tokens, packed as by `token_logprobs`."""
        return token_logprobs(logits, token_ids, self._num_top)

    @property
    def _num_top(self) -> int:
        return min(MAX_LOGPROBS, self.slots.vocab_size)

    def _nodes_and_paths(self, decodes: Decodes) -> tuple[Tensor, Tensor | None]:
        """Returns each row's node index, and the token ids on the path from the root (excluded) to that node."""
        tree = decodes.tree
        if tree is None:
            return torch.zeros_like(decodes.slots), None
        index = torch.arange(tree.token_ids.shape[1], device=self.device).expand_as(tree.token_ids)
        return decodes.packed(index), decodes.packed(tree_paths(tree, self._max_depth))

    def _room(self, num_rows: int) -> Any:
        return self._workspace if num_rows <= self._workspace_rows else None

    def _sample(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        params: list[SamplingParams] | None,
        processors: LogitProcessors | None,
    ) -> Tensor:
        """Samples a token for each row.

        `positions` [num_rows] are the tokens' positions, `rows` [num_rows] the sequences' slots.
        """
        state, any_sampled, any_filtered = self.slots, True, True
        if params is not None:
            sampled = [param for param in params if param.temperature > 0]
            any_sampled = bool(sampled)
            any_filtered = any(param.top_k or param.top_p < 1 or param.min_p for param in sampled)
        return choose_tokens(
            logits,
            state.temperatures,
            state.top_ks,
            state.top_ps,
            state.min_ps,
            state.seeds,
            positions,
            any_sampled=any_sampled,
            any_filtered=any_filtered,
            processors=processors,
            workspace=self._room(len(rows)),
            slots=rows,
        )


def is_greedy(params: list[SamplingParams]) -> bool:
    """Whether every request takes the token with the largest unprocessed logit."""
    return not any(param.temperature > 0 or param.alters_logits for param in params)


class PathAcceptance:
    """Walks the trees of one engine's rounds and applies the accepted paths to KV cache and slot state.

    Args:
        slots: device state by slot; accepting a path advances the slot's length and last token to the path's end.
        builder: computes the KV pool address of each position.
    """

    def __init__(self, slots: SlotState, cache: KVCache, builder: BatchBuilder, config: EngineConfig) -> None:
        self.slots, self.cache, self.builder, self.config = slots, cache, builder, config
        self.max_depth = config.speculation.max_path - 1
        self._shape = PathShape(
            config.speculation.max_path,
            config.max_model_len,
            config.block_size,
            moves=config.speculation.draft_top_k > 1,
        )
        self.forcer: AcceptanceForcer | None = None
        if config.forced_acceptance is not None:
            self.forcer = AcceptanceForcer(config.forced_acceptance, self.max_depth, slots.epochs)

    def accept(
        self, decodes: Decodes | None, chosen: Tensor, taps: Tensor | None, evidence: Tensor | None = None
    ) -> AcceptedPaths:
        """Walks the trees along the target's choices, moves the accepted nodes' KV and advances the slot state.

        Args:
            chosen: int64 [num_rows]: token chosen at each row of the decodes.
            taps: [num_rows or more, taps_size]: taps of the decodes' rows, which come first.
            evidence: see `AcceptedPaths.evidence`.
        """
        if decodes is None:
            empty = torch.zeros(0, dtype=torch.int64, device=self.slots.device)
            none = empty.view(0, self.max_depth + 1)
            return AcceptedPaths(empty, empty, none, empty, empty, none, None)
        tree, walked = decodes.tree, None if decodes.tree is None else GrownTree(*decodes.tree)
        draws = None if self.forcer is None else self.forcer.draws(decodes.slots, decodes.roots)
        round_trees = WalkedTrees(decodes.slots, decodes.roots, walked, chosen, evidence, draws)
        settled = settle_paths(round_trees, self.slots.columns, self._shape)
        if tree is not None and self._shape.moves:
            self.cache.move(settled.sources, settled.targets)
        path_taps = None
        if taps is not None:
            # The path of a bare root is the root itself.
            rows = taps[: len(chosen)] if tree is None else taps.index_select(0, settled.rows)
            path_taps = rows.view(*settled.nodes.shape, -1)
        return AcceptedPaths(
            decodes.slots,
            decodes.roots,
            settled.token_ids,
            settled.num_tokens,
            settled.num_tokens if tree is None else tree.num_valid,
            settled.nodes,
            path_taps,
            evidence,
            tree_token_ids=None if tree is None else tree.token_ids,
            tree_parents=None if tree is None else tree.parents,
            columns=settled.columns,
            packed=settled.host_summary,
        )
