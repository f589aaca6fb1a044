"""Tables, by slot, of all settings that alter a sequence's logits: biases, penalties and masks of allowed tokens.

All inputs are tables on the device, so that rounds can be captured. A slot's row of token counts covers the sequence's
tokens up to the root of the slot's tree. The tokens on the path from the root to a node are passed separately.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from wingbeat.kernels.sampling.processors import LogitBias, LogitProcessors, Penalties
from wingbeat.kernels.tree.reference import path_token_ids
from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.scheduling.request import SamplingParams
from wingbeat.runtime.scheduling.sequence import Sequence

_ALL_ALLOWED = -1
_BIAS_ROWS = 3


class ProcessorTables:
    """Logit processor state, one row per slot and one row for padding slots.

    The tables take (15 x vocab_size + num_nodes x vocab_size / 8) bytes per slot. The tables are allocated at the first
    request that needs them; at start if rounds are captured.

    Args:
        stop_token_ids: end-of-sequence tokens of the model, which `min_tokens` forbids.
        num_nodes: maximum number of nodes of a tree.
    """

    def __init__(
        self, num_slots: int, num_nodes: int, vocab_size: int, stop_token_ids: frozenset[int], device: torch.device
    ) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._shape = num_slots + 1, num_nodes
        self._stop_token_ids = tuple(sorted(stop_token_ids))
        self._altered: set[int] = set()
        """Slots whose rows may alter logits; the rows are cleared when the slot gets a sequence that uses unprocessed
        logits."""
        self.allocated = False

    def allocate(self) -> None:
        """Allocates the tables if they do not exist yet."""
        if self.allocated:
            return
        self.allocated = True
        num_rows, num_nodes = self._shape

        def column(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full((num_rows, *shape), value, dtype=dtype, device=self.device)

        self._penalty_rows = column(-1, torch.int64)
        self._repetition = column(1, torch.float32)
        self._presence = column(0, torch.float32)
        self._frequency = column(0, torch.float32)
        self._prompt_mask = column(False, torch.bool, self.vocab_size)
        self._output_counts = column(0, torch.int32, self.vocab_size)
        self._bias_rows = column(-1, torch.int64)
        # A slot has three rows of bias; the position selects the row. Row 0 applies at position `_stops_from` and
        # later. Row 1 applies at earlier positions and also forbids stop tokens. At positions before `_begun_from`,
        # which is at most `_stops_from`, row 2 replaces row 1 and also forbids tokens that may not begin an answer.
        self._bias = column(0, torch.float32, _BIAS_ROWS, self.vocab_size)
        self._stops_from = column(0, torch.int64)
        self._begun_from = column(0, torch.int64)
        self.masks = column(_ALL_ALLOWED, torch.int32, num_nodes, -(-self.vocab_size // 32))
        """int32 [num_slots + 1, num_nodes, ceil(vocab_size / 32)]: bit mask of the tokens allowed after each node of a
        slot's tree."""

    def admit(self, seqs: list[Sequence]) -> None:
        """Writes the rows of newly admitted sequences; called before their first round is enqueued."""
        for seq in seqs:
            if seq.request.params.alters_logits:
                self.allocate()
                self._altered.add(seq.slot)  # added before the write, which may raise halfway
                self._write(seq)
            elif seq.slot in self._altered:
                self._penalty_rows[seq.slot].fill_(-1)
                self._bias_rows[seq.slot].fill_(-1)
                self.masks[seq.slot].fill_(_ALL_ALLOWED)
                self._altered.discard(seq.slot)

    def count(self, slots: Tensor, token_ids: Tensor, num_tokens: Tensor) -> None:
        """Adds the tokens that a round emitted to the output counts.

        Args:
            slots: int64 [n].
            token_ids: int64 [n, most].
            num_tokens: int64 [n]: number of leading tokens of each row that are counted.
        """
        steps = torch.arange(token_ids.shape[1], device=self.device)
        emitted = steps < num_tokens[:, None]
        entries = slots[:, None] * self.vocab_size + torch.where(emitted, token_ids, 0)
        self._output_counts.view(-1).index_add_(0, entries.flatten(), emitted.flatten().to(torch.int32))

    def of_rows(
        self, slots: Tensor, positions: Tensor, nodes: Tensor, paths: Tensor | None, params: list[SamplingParams] | None
    ) -> LogitProcessors:
        """Returns the logit processors for the rows of a batch.

        Args:
            slots: int64 [num_rows].
            positions: int64 [num_rows]: position at which the row's token will be placed.
            nodes: int64 [num_rows]: node of the row in its slot's tree.
            paths: int64 [num_rows, depth]: tokens on the path from the root (excluded) to the row's node, padded with
                -1; None for bare roots.
            params: parameters of the sequences; processors that none of the sequences uses are skipped. None skips no
                processor.
        """
        penalties = bias = masks = None
        if params is None or any(param.has_penalties for param in params):
            penalties = Penalties(
                self._repetition[slots],
                self._presence[slots],
                self._frequency[slots],
                self._penalty_rows[slots],
                self._prompt_mask,
                self._output_counts,
                paths,
            )
        if params is None or any(param.has_bias for param in params):
            rows = self._bias_rows[slots]
            early = rows + (positions < self._stops_from[slots]) + (positions < self._begun_from[slots])
            rows = torch.where(rows >= 0, early, rows)
            bias = LogitBias(self._bias.view(-1, self.vocab_size), rows)
        if params is None or any(param.has_masks for param in params):
            masks = self.masks[slots, nodes]
        return LogitProcessors(penalties, bias, masks)

    def _write(self, seq: Sequence) -> None:
        params, slot = seq.request.params, seq.slot
        self._penalty_rows[slot].fill_(slot if params.has_penalties else -1)
        self._bias_rows[slot].fill_(_BIAS_ROWS * slot if params.has_bias else -1)
        self.masks[slot].fill_(_ALL_ALLOWED)
        if params.has_penalties:
            self._repetition[slot].fill_(params.repetition_penalty)
            self._presence[slot].fill_(params.presence_penalty)
            self._frequency[slot].fill_(params.frequency_penalty)
            prompt = self._ids(seq.token_ids[: seq.num_prompt_tokens])
            self._prompt_mask[slot].zero_().index_fill_(0, prompt, True)
            self._output_counts[slot].zero_()
            output = self._ids(seq.token_ids[seq.num_prompt_tokens :])
            self._output_counts[slot].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        if params.has_bias:
            self._write_bias(params, slot)
            not_first = bool(params.banned_first)
            self._stops_from[slot].fill_(seq.num_prompt_tokens + max(params.min_tokens, not_first))
            self._begun_from[slot].fill_(seq.num_prompt_tokens + not_first)

    def _write_bias(self, params: SamplingParams, slot: int) -> None:
        minus_inf, rows = float("-inf"), self._bias[slot]
        rows.fill_(minus_inf if params.allowed_token_ids else 0.0)
        if params.allowed_token_ids:
            rows.index_fill_(1, self._ids(params.allowed_token_ids), 0.0)
        if params.logit_bias:
            token_ids, values = zip(*params.logit_bias, strict=True)
            added = upload(values, self.device, torch.float32).expand(_BIAS_ROWS, -1)
            rows.index_add_(1, self._ids(token_ids), added)
        if single := [word[0] for word in params.bad_words if len(word) == 1]:
            rows.index_fill_(1, self._ids(single), minus_inf)
        if stops := [*self._stop_token_ids, *params.stop_token_ids]:
            rows[1].index_fill_(0, self._ids(stops), minus_inf)
            if params.min_tokens:
                rows[2].index_fill_(0, self._ids(stops), minus_inf)
        if params.banned_first:
            rows[2].index_fill_(0, self._ids(params.banned_first), minus_inf)

    def _ids(self, token_ids: Iterable[int]) -> Tensor:
        return upload(list(token_ids), self.device)


def tree_paths(tree: TokenTree, max_depth: int) -> Tensor:
    """Returns the tokens on the path from the root (excluded) to each node.

    The result is int64 [num_reqs, num_nodes, depth], padded with -1.
    """
    return path_token_ids(tree.token_ids, tree.parents, max(1, min(max_depth, tree.token_ids.shape[1] - 1)))
