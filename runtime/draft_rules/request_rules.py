"""Applies the requests' sampling rules to a drafter's logits, so that drafts are tokens that the target may sample.

Rules are applied in the target's order: bias and bans, penalties from committed tokens, then top-k, top-p and min-p at
the request's temperature. Penalties do not count the draft's own tokens, because counting them does not improve drafts.
The CPU kernels do the same (`sampling_rules.h`). No operation synchronises and shapes are fixed, so that the rules can
be captured. A filter whose threshold is not among the few likeliest tokens is skipped.
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


def prompt_lens(rules: SamplingRules) -> Tensor:
    """Return a view of the column num_prompt_tokens: float32 [num_slots]."""
    return rules.numbers[:, RuleColumns._fields.index("num_prompt_tokens")]


class DraftColumns:
    """Maps target token ids to columns of a drafter's logits."""

    def __init__(self, draft_token_ids: Tensor) -> None:
        self.size = len(draft_token_ids)
        # Token ids are looked up by binary search, because the size of a direct table would have to be read from the
        # device, which would synchronise.
        self.places = draft_token_ids.sort()
        """Two tensors int64 [size]: token ids in ascending order, and the columns of these token ids."""

    def find(self, token_ids: Tensor) -> Tensor:
        """Return the column of each token id, int64 of the same shape; -1 for tokens that the drafter cannot draft."""
        return find_columns(token_ids, *self.places)


class TokenCounts(NamedTuple):
    """Whether a token occurs in a request's prompt, and how often in its output.

    Rows are requests; columns are those of the drafter's logits.
    """

    in_prompt: Tensor
    """bool [num_reqs, draft_vocab_size]"""
    in_output: Tensor
    """int32 [num_reqs, draft_vocab_size]"""

    @classmethod
    def empty(cls, num_reqs: int, draft_vocab_size: int, device: torch.device) -> "TokenCounts":
        """Return tables in which all counts are zero."""
        shape = num_reqs, draft_vocab_size
        nothing = torch.zeros(shape, dtype=torch.bool, device=device)
        return cls(nothing, torch.zeros(shape, dtype=torch.int32, device=device))

    def count(self, histories: Histories, columns: DraftColumns) -> None:
        """Count the tokens of `histories`, whose rows are the first rows of the tables."""
        count_tokens(histories, *columns.places, *(table[: len(histories.slots)] for table in self))


class Biases(NamedTuple):
    """Logit biases by column; one row per request."""

    table: Tensor
    """float32 [num_reqs, draft_vocab_size]"""
    rows: Tensor
    """int64 [num_reqs]: row of the table for each request; -1 if the request has no bias."""

    @classmethod
    def empty(cls, num_reqs: int, draft_vocab_size: int, device: torch.device) -> "Biases":
        """Return tables without biases."""
        # An extra entry after the last row receives the writes for tokens that have no column.
        flat = torch.zeros(num_reqs * draft_vocab_size + 1, device=device)
        none = torch.full((num_reqs,), -1, dtype=torch.int64, device=device)
        return cls(flat[:-1].view(num_reqs, draft_vocab_size), none)

    def write(self, rules: SamplingRules, columns: DraftColumns) -> None:
        """Write into the first rows of the table the biases that are listed in these requests' rules."""
        (size, width), num_reqs = self.table.shape, len(rules.numbers)
        index = torch.arange(num_reqs, device=self.rows.device)
        only_listed = RuleColumns(*rules.numbers.T).only_listed
        self.table[:num_reqs] = torch.where(only_listed > 0, float("-inf"), 0.0)[:, None]
        at, nowhere = columns.find(rules.token_ids), size * width
        entries = torch.where(at >= 0, index[:, None] * width + at, nowhere)
        self.table.as_strided((nowhere + 1,), (1,)).scatter_(0, entries.flatten(), rules.biases.flatten())
        self.rows[:num_reqs] = index


def root_words(allowed_tokens: Tensor, draft_token_ids: Tensor) -> Tensor:
    """Return a bit mask of the columns allowed after roots, int32 [num_reqs, ceil(draft_vocab_size / 32)].

    A row in which no column would be allowed allows all columns.

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
        numbers: float32 [num_reqs, NUM_RULES]: numeric rules, in the columns of `RuleColumns`.
        temperatures: float32 [num_reqs]
        biases: biases with at least num_reqs rows; None if no request's rules list tokens.
        counts: token counts with at least num_reqs rows; None if no request has penalties.
        root_mask: int32 [num_reqs, ceil(draft_vocab_size / 32)]: see `root_words`; None if all tokens may follow the
            roots or `MaskedRoots` holds the mask.
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
        """Return the rules of the requests in the slots of `histories`; all other arguments are indexed by slot."""
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
        """Apply the rules to continuations: excluded logits become -inf, other logits are divided by the temperature.

        The logits of a head's own short candidate list get biases and penalties, but are neither filtered nor divided
        by the temperature. The probabilities of such a list are not those of the full vocabulary, and filtering or
        dividing the list's logits made drafts worse. The full logits, from which the head selected the list, have
        already been filtered and divided.

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
        """Return the logit processors of rows.

        Args:
            rows: the rows, one per node.
            candidates: int64 [num_reqs, num_candidates]: columns of the tokens in a head's candidate list; None means
                all columns.
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
    """Rules repeated for each node of a level: `width` rows for each request."""

    request: Tensor
    """int64 [num_rows]"""
    numbers: RuleColumns
    temperatures: Tensor
    top_ks: Tensor
    """int64 [num_rows]"""
    biased: Tensor | None
    """int64 [num_rows]: row of the bias table, as in `Biases.rows`."""
