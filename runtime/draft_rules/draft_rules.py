"""Rules of a batch of proposals: sampling rules of the requests, and masks of the tokens allowed after the roots."""

import torch
from torch import Tensor

from wingbeat.kernels.sampling.processors import Histories
from wingbeat.runtime.draft_rules.request_rules import (
    Biases,
    DraftColumns,
    RequestRules,
    TokenCounts,
    prompt_lens,
    root_words,
)
from wingbeat.runtime.drafters.base import DraftBatch
from wingbeat.runtime.drafters.growth import LogitRules, Roots
from wingbeat.runtime.heads.contract import Continuations
from wingbeat.runtime.protocol.sampling_rules import RuleKinds, SamplingRules, no_rules
from wingbeat.runtime.protocol.transfer import copy_into


class RuleTables:
    """Rule tables of one drafter, which need about 9 x draft_vocab_size bytes per slot.

    Args:
        num_slots: number of slots.
        draft_token_ids: int64 [draft_vocab_size]: target token id of each column.
        columns: look-up from token ids to columns.
    """

    def __init__(self, num_slots: int, draft_token_ids: Tensor, columns: DraftColumns) -> None:
        self._draft_token_ids, self._columns = draft_token_ids, columns
        device, shape = draft_token_ids.device, (num_slots, columns.size, draft_token_ids.device)
        # The last row belongs to the padding slot and never has rules.
        self._numbers, self._none = (no_rules(rows, device).numbers for rows in (num_slots + 1, num_slots))
        self._biases, self._counts = Biases.empty(*shape), TokenCounts.empty(*shape)
        self._root_mask = torch.full((num_slots, -(-columns.size // 32)), -1, dtype=torch.int32, device=device)
        self._is_biased = self._is_masked = False
        """Whether the previous round wrote biases, and whether it wrote masks."""
        if device.type == "cuda":  # compile the counting kernel now, not in a round
            nobody = torch.zeros(1, 1, dtype=torch.int64, device=device)
            self._counts.count(Histories(nobody, nobody[0], prompt_lens(no_rules(1, device)), nobody[0]), columns)

    def load(self, batch: DraftBatch, slots: Tensor) -> None:
        """Write the rules of a batch's proposals. `slots`, int64 [num_proposals], is on the device."""
        rules, masks = batch.sampling_rules, batch.allowed_tokens
        kinds = RuleKinds(0) if rules is None else RuleKinds(batch.rule_kinds)
        numbers = self._none if rules is None else rules.numbers
        copy_into(self._numbers[: len(numbers)], numbers)
        if self._is_biased:
            self._biases.rows.fill_(-1)
        if self._is_masked:
            self._root_mask.fill_(-1)
        self._is_biased, self._is_masked = RuleKinds.LISTED in kinds, masks is not None
        if self._is_biased:
            self._biases.write(SamplingRules(*(column[slots] for column in rules)), self._columns)
        if self._is_masked:
            self._root_mask[: len(masks)] = root_words(masks, self._draft_token_ids)
        if RuleKinds.PENALTIES in kinds:
            token_ids = batch.token_ids[:, : batch.max_committed_len]
            histories = Histories(token_ids, batch.committed_lens, prompt_lens(rules), slots)
            self._counts.count(histories, self._columns)

    def attach(self, roots: Roots) -> Roots:
        """Return the roots with these tables as their rules; runs inside the captured graph."""
        numbers, mask = self._numbers[roots.slots], self._root_mask[: len(roots.slots)]
        rules = RequestRules(self._columns, numbers, roots.temperatures, self._biases, self._counts, mask)
        return roots._replace(rules=rules)


class DraftRules:
    """Makes the rules of one drafter's batches.

    Args:
        draft_token_ids: int64 [draft_vocab_size]: target token id of each column of the drafter's logits.
    """

    def __init__(self, draft_token_ids: Tensor) -> None:
        self.columns = DraftColumns(draft_token_ids)
        self._draft_token_ids = draft_token_ids

    def of_batch(self, batch: DraftBatch, slots: Tensor) -> LogitRules | None:
        """Return the rules of a batch's proposals, whose slots are int64 [num_proposals]; None without rules."""
        rules, sampling_rules = None, batch.sampling_rules
        if sampling_rules is not None:
            histories = Histories(batch.token_ids, batch.committed_lens, prompt_lens(sampling_rules), slots)
            kinds = RuleKinds(batch.rule_kinds)
            rules = RequestRules.from_slots(sampling_rules, kinds, batch.temperatures, histories, self.columns)
        if batch.allowed_tokens is None:
            return rules
        return MaskedRoots(batch.allowed_tokens, self._draft_token_ids, rules)

    def tables(self, num_slots: int) -> RuleTables:
        """Return the tables from which captured drafts read the rules."""
        return RuleTables(num_slots, self._draft_token_ids, self.columns)


class MaskedRoots:
    """Masks disallowed tokens after the roots, then applies the requests' sampling rules.

    Args:
        allowed_tokens: see `DraftBatch.allowed_tokens`.
        draft_token_ids: int64 [draft_vocab_size]: target token id of each column.
        rules: sampling rules; None if no request has sampling rules.
    """

    def __init__(self, allowed_tokens: Tensor, draft_token_ids: Tensor, rules: LogitRules | None) -> None:
        self._allowed_tokens, self._draft_token_ids, self._rules = allowed_tokens, draft_token_ids, rules

    def apply(self, given: Continuations, *, is_root: bool = False) -> Continuations:
        """See `LogitRules.apply`."""
        given = self._allowed_only(given) if is_root else given
        return given if self._rules is None else self._rules.apply(given, is_root=is_root)

    def _allowed_only(self, given: Continuations) -> Continuations:
        """Masks disallowed tokens. A row in which no candidate is allowed stays unmasked."""
        allowed = self._allowed_tokens
        token_ids = self._draft_token_ids if given.token_ids is None else given.token_ids
        words, bits = token_ids // 32, (token_ids % 32).to(torch.int32)
        found = allowed[:, words] if given.token_ids is None else allowed.gather(1, words)
        may_follow = ((found >> bits) & 1).to(torch.bool)
        may_follow |= ~may_follow.any(dim=1, keepdim=True)
        return given._replace(logits=given.logits.masked_fill(~may_follow[:, None], float("-inf")))
