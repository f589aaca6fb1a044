"""Applies the requests' sampling rules to a drafter's logits, so that drafts are tokens that the target may sample.

Order as in the target: bias and bans, penalties from committed tokens (the draft's own tokens are not counted: counting
gains nothing), then top-k, top-p and min-p at the request's temperature. The CPU kernels do the same
(`sampling_rules.h`). Nothing synchronises and shapes are fixed, so that the rules can be captured; a filter whose
threshold is not among the few likeliest tokens is skipped.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from wingbeat.kernels.sampling.history import count_tokens, find_columns
from wingbeat.kernels.sampling.processors import Histories, LogitBias, LogitProcessors, Penalties, apply_processors
from wingbeat.kernels.sampling.reference import process_logits
from wingbeat.kernels.tree.reference import pack_mask
from wingbeat.runtime.heads.contract import Continuations
from wingbeat.runtime.protocol.sampling_rules import RuleColumns, RuleKinds, SamplingRules


class DraftColumns:
    """Maps target token ids to columns of a drafter's logits."""

    def __init__(self, draft_token_ids: Tensor) -> None:
        self.size = len(draft_token_ids)
        # Looked up by binary search: a direct table would need its size from the device, a synchronisation.
        self.places = draft_token_ids.sort()
        """int64 [size] each: token ids in ascending order, and their columns."""

    def find(self, token_ids: Tensor) -> Tensor:
        """Column of each token id, int64 of the same shape; -1 if the drafter cannot draft it."""
        return find_columns(token_ids, *self.places)


class TokenCounts(NamedTuple):
    """Tokens that occur in each request's prompt and output, by column of the drafter's logits; one row per request."""

    in_prompt: Tensor
    """bool [num_reqs, draft_vocab_size]"""
    in_output: Tensor
    """int32 [num_reqs, draft_vocab_size]"""

    @classmethod
    def empty(cls, num_reqs: int, draft_vocab_size: int, device: torch.device) -> "TokenCounts":
        """Tables without any counts."""
        shape = num_reqs, draft_vocab_size
        nothing = torch.zeros(shape, dtype=torch.bool, device=device)
        return cls(nothing, torch.zeros(shape, dtype=torch.int32, device=device))

    def count(self, histories: Histories, columns: DraftColumns) -> None:
        """Write the first rows of the tables."""
        count_tokens(histories, *columns.places, *(table[: len(histories.slots)] for table in self))


class Biases(NamedTuple):
    """Logit biases by column; one row per request."""

    table: Tensor
    """float32 [num_reqs, draft_vocab_size]"""
    rows: Tensor
    """int64 [num_reqs]: row of the table for each request; -1 if the request has no bias."""

    @classmethod
    def empty(cls, num_reqs: int, draft_vocab_size: int, device: torch.device) -> "Biases":
        """Tables without any bias."""
        # The extra entry after the rows receives writes for tokens without a column.
        flat = torch.zeros(num_reqs * draft_vocab_size + 1, device=device)
        none = torch.full((num_reqs,), -1, dtype=torch.int64, device=device)
        return cls(flat[:-1].view(num_reqs, draft_vocab_size), none)

    def write(self, rules: SamplingRules, columns: DraftColumns) -> None:
        """Write the first rows from the tokens that these requests' rules list."""
        (size, width), num_reqs = self.table.shape, len(rules.numbers)
        index = torch.arange(num_reqs, device=self.rows.device)
        only_listed = RuleColumns(*rules.numbers.T).only_listed
        self.table[:num_reqs] = torch.where(only_listed > 0, float("-inf"), 0.0)[:, None]
        at, nowhere = columns.find(rules.token_ids), size * width
        entries = torch.where(at >= 0, index[:, None] * width + at, nowhere)
        self.table.as_strided((nowhere + 1,), (1,)).scatter_(0, entries.flatten(), rules.biases.flatten())
        self.rows[:num_reqs] = index


def root_words(allowed_tokens: Tensor, draft_token_ids: Tensor) -> Tensor:
    """Bit mask int32 [num_reqs, ceil(draft_vocab_size / 32)] of the columns allowed after roots.

    A row in which no column would be allowed allows all.

    Args:
        allowed_tokens: see `DraftBatch.allowed_tokens`.
        draft_token_ids: int64 [draft_vocab_size]: target token id of each column.
    """
    words, bits = draft_token_ids // 32, (draft_token_ids % 32).to(torch.int32)
    may_follow = ((allowed_tokens[:, words] >> bits) & 1).to(torch.bool)
    may_follow |= ~may_follow.any(dim=1, keepdim=True)
    return pack_mask(may_follow).view(torch.int32)[:, : -(-len(draft_token_ids) // 32)]


class RequestRules:
    """Rules of the requests of one draft, one row per request.

    Args:
        columns: columns of the drafter's logits.
        numbers: float32 [num_reqs, NUM_RULES]: `RuleColumns`.
        temperatures: float32 [num_reqs]
        biases: at least num_reqs rows; None if no rules list tokens.
        counts: at least num_reqs rows; None if no request has penalties.
        root_mask: int32 [num_reqs, ceil(draft_vocab_size / 32)]: see `root_words`; None if all tokens may follow the
            roots or `Roots.allowed_tokens` holds the mask.
    """

    def __init__(
        self,
        columns: DraftColumns,
        numbers: Tensor,
        temperatures: Tensor,
        biases: Biases | None = None,
        counts: TokenCounts | None = None,
        root_mask: Tensor | None = None,
    ) -> None:
        self._columns, self._biases, self._counts, self._root_mask = columns, biases, counts, root_mask
        self._numbers = torch.cat([numbers.T, temperatures[None]])
        self._by_width: dict[int, _Rows] = {}

    @classmethod
    def from_slots(
        cls, rules: SamplingRules, kinds: RuleKinds, temperatures: Tensor, histories: Histories, columns: DraftColumns
    ) -> Self:
        """Rules of the requests in the slots of `histories`; all other arguments are indexed by slot."""
        slots, biases, counts = histories.slots, None, None
        chosen, shape = SamplingRules(*(column[slots] for column in rules)), (len(slots), columns.size, slots.device)
        if RuleKinds.LISTED in kinds:
            biases = Biases.empty(*shape)
            biases.write(chosen, columns)
        if RuleKinds.PENALTIES in kinds:
            counts = TokenCounts.empty(*shape)
            counts.count(histories, columns)
        return cls(columns, chosen.numbers, temperatures[slots], biases, counts)

    def apply(self, given: Continuations, *, is_root: bool = False) -> Continuations:
        """Apply the rules to continuations: excluded logits become -inf, the others are divided by temperature.

        A head's own short candidate list is neither filtered nor tempered: its probabilities are not those of the full
        vocabulary, and doing so made drafts worse. The list was selected from logits that were.

        Args:
            given: continuations of the nodes.
            is_root: whether the nodes are the roots.
        """
        num_reqs, width, _ = given.logits.shape
        rows, logits = self._of_rows(width), given.logits.flatten(0, 1)
        mask = self._root_mask if is_root else None
        if given.token_ids is not None:
            candidates = self._columns.find(given.token_ids).clamp_min(0)
            ruled = apply_processors(logits, self._processors(rows, candidates)).view_as(given.logits)
            if mask is not None:
                bits = mask.gather(1, candidates // 32) >> (candidates % 32).to(torch.int32)
                may_follow = (bits & 1).to(torch.bool)
                may_follow |= ~may_follow.any(dim=1, keepdim=True)
                ruled = ruled.masked_fill(~may_follow[:, None], float("-inf"))
            return given._replace(logits=ruled)
        numbers = rows.numbers
        processed = process_logits(
            logits,
            rows.temperatures,
            rows.top_ks,
            numbers.top_p,
            numbers.min_p,
            processors=self._processors(rows)._replace(grammar_mask=mask),
            listed_only=True,
        )
        return given._replace(logits=processed.view(num_reqs, width, -1), is_tempered=True)

    def _of_rows(self, width: int) -> "_Rows":
        if width not in self._by_width:
            *numbers, temperatures = self._numbers.repeat_interleave(width, dim=1)
            columns = RuleColumns(*numbers)
            request = torch.arange(len(temperatures), device=temperatures.device) // width
            biased = None if self._biases is None else self._biases.rows[request]
            self._by_width[width] = _Rows(request, columns, temperatures, columns.top_k.to(torch.int64), biased)
        return self._by_width[width]

    def _processors(self, rows: "_Rows", candidates: Tensor | None = None) -> LogitProcessors:
        """Logit processors of rows.

        Args:
            rows: the rows, one per node.
            candidates: int64 [num_reqs, num_candidates]: columns of a head's candidate list; None means all columns.
        """

        def among(table: Tensor) -> Tensor:
            return table if candidates is None else table[: len(candidates)].gather(1, candidates)

        bias = penalties = None
        if self._biases is not None:
            bias = LogitBias(among(self._biases.table), rows.biased)
        if self._counts is not None:
            factors = rows.numbers.repetition, rows.numbers.presence, rows.numbers.frequency
            penalties = Penalties(*factors, rows.request, *(among(table) for table in self._counts))
        return LogitProcessors(penalties, bias)


class _Rows(NamedTuple):
    """Rules repeated per node of a level: `width` rows for each request."""

    request: Tensor
    """int64 [num_rows]"""
    numbers: RuleColumns
    temperatures: Tensor
    top_ks: Tensor
    """int64 [num_rows]"""
    biased: Tensor | None
    """int64 [num_rows]: see `Biases.rows`."""
