"""What requests' own rules of sampling make of a drafter's logits: the target chooses from no other tokens.

In the target's order: bias and bans, penalties by what is decided (a draft's own tokens are not counted: that gains
nothing), then top-k, top-p and min-p at the request's temperature. Kernels of the CPU do the same (`sampling_rules.h`).
Nothing is waited for and shapes are fixed, so that all of it can be captured; a filter whose edge is not among the few
likeliest tokens is let go.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels.sampling.processors import LogitBias, LogitProcessors, Penalties, apply_processors
from wingbeat.kernels.sampling.reference import process_logits
from wingbeat.runtime.heads.contract import Continuations
from wingbeat.runtime.protocol.sampling_rules import RuleColumns, SamplingRules


class DraftColumns:
    """Where a drafter's logits say something of the target's tokens."""

    def __init__(self, draft_token_ids: Tensor) -> None:
        self.size = len(draft_token_ids)
        # Searched, because only the device knows how large a table by token would have to be.
        self._token_ids, self._columns = draft_token_ids.sort()

    def of(self, token_ids: Tensor) -> Tensor:
        """int64, as many as token ids: each one's column, -1 where there is none."""
        at = torch.searchsorted(self._token_ids, token_ids.contiguous()).clamp_max(self.size - 1)
        return torch.where(self._token_ids[at] == token_ids, self._columns[at], -1)


class TokenCounts(NamedTuple):
    """Which tokens requests have, by column of the drafter's logits; a row each."""

    in_prompt: Tensor
    """bool [num_reqs, draft_vocab_size]"""
    in_output: Tensor
    """int32 [num_reqs, draft_vocab_size]"""

    @classmethod
    def empty(cls, num_reqs: int, draft_vocab_size: int, device: torch.device) -> "TokenCounts":
        """Of requests that have none."""
        shape = num_reqs, draft_vocab_size
        nothing = torch.zeros(shape, dtype=torch.bool, device=device)
        return cls(nothing, torch.zeros(shape, dtype=torch.int32, device=device))

    def count(self, history: Tensor, lens: Tensor, num_prompt_tokens: Tensor, columns: DraftColumns) -> None:
        """Write the first rows: int64 [num_reqs, width] counts up to `lens` [num_reqs], the prompt coming first."""
        at, steps = columns.of(history), torch.arange(history.shape[1], device=history.device)
        known, is_output = (steps < lens[:, None]) & (at >= 0), steps >= num_prompt_tokens[:, None]
        entries = at.clamp_min(0)
        in_prompt, in_output = (part[: len(history)] for part in self)
        counts = torch.zeros_like(in_output).scatter_add_(1, entries, (known & ~is_output).to(torch.int32))
        torch.gt(counts, 0, out=in_prompt)
        in_output.zero_().scatter_add_(1, entries, (known & is_output).to(torch.int32))


class RequestRules:
    """Of the requests of one draft, a row each.

    Args:
        told: of these requests.
        temperatures: float32 [num_reqs]
        counts: of as many requests or more; None where nobody has penalties.
    """

    def __init__(
        self, told: SamplingRules, temperatures: Tensor, counts: TokenCounts | None, columns: DraftColumns
    ) -> None:
        self._columns, self._counts = columns, counts
        self._bias = _bias_table(told, columns)
        self._numbers = torch.cat([told.numbers.T, temperatures[None]])
        self._by_width: dict[int, tuple[Tensor, RuleColumns, Tensor, Tensor]] = {}

    def apply(self, given: Continuations) -> Continuations:
        """What follows nodes, under the rules: what may not be chosen has no logit, and the others are tempered.

        A head's own few candidates are neither filtered nor tempered: their shares are not the vocabulary's, and drafts
        were worse. They are chosen from logits that are.
        """
        num_reqs, width, _ = given.logits.shape
        row, numbers, temperatures, top_ks = self._of_rows(width)
        logits = given.logits.flatten(0, 1)
        if given.token_ids is not None:
            own = self._columns.of(given.token_ids).clamp_min(0)
            ruled = apply_processors(logits, self._processors(row, numbers, own))
            return given._replace(logits=ruled.view_as(given.logits))
        processed = process_logits(
            logits,
            temperatures,
            top_ks,
            numbers.top_p,
            numbers.min_p,
            processors=self._processors(row, numbers),
            listed_only=True,
        )
        return given._replace(logits=processed.view(num_reqs, width, -1), is_tempered=True)

    def _of_rows(self, width: int) -> tuple[Tensor, RuleColumns, Tensor, Tensor]:
        """Request, numbers, temperature and top-k of each of `width` rows of every request."""
        if width not in self._by_width:
            *numbers, temperatures = self._numbers.repeat_interleave(width, dim=1)
            columns = RuleColumns(*numbers)
            row = torch.arange(len(temperatures), device=temperatures.device) // width
            self._by_width[width] = row, columns, temperatures, columns.top_k.to(torch.int64)
        return self._by_width[width]

    def _processors(self, row: Tensor, numbers: RuleColumns, own: Tensor | None = None) -> LogitProcessors:
        """Of rows; of a head's own candidates, their columns int64 [num_reqs, num_candidates]."""

        def among(table: Tensor) -> Tensor:
            return table if own is None else table[: len(own)].gather(1, own)

        bias, penalties = LogitBias(among(self._bias), row), None
        if self._counts is not None:
            factors = numbers.repetition, numbers.presence, numbers.frequency
            penalties = Penalties(*factors, row, *(among(table) for table in self._counts))
        return LogitProcessors(penalties, bias)


def _bias_table(told: SamplingRules, columns: DraftColumns) -> Tensor:
    """float32 [num_reqs, draft_vocab_size]"""
    num_reqs, only_listed = len(told.numbers), RuleColumns(*told.numbers.T).only_listed
    # One entry more, for what counts nowhere.
    flat = told.biases.new_empty(num_reqs * columns.size + 1)
    table = flat[:-1].view(num_reqs, columns.size)
    table.copy_(torch.where(only_listed > 0, float("-inf"), 0.0)[:, None])
    at, first = columns.of(told.token_ids), torch.arange(num_reqs, device=flat.device)[:, None] * columns.size
    flat.scatter_(0, torch.where(at >= 0, first + at, len(flat) - 1).flatten(), told.biases.flatten())
    return table
