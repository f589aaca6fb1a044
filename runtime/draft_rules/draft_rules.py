"""Rules of a batch of proposals: sampling rules of the requests, and masks of the tokens allowed after the roots."""

import torch
from torch import Tensor

from wingbeat.kernels.sampling.processors import Histories
from wingbeat.runtime.draft_rules.request_rules import DraftColumns, RequestRules, prompt_lens
from wingbeat.runtime.draft_rules.rule_tables import RuleTables
from wingbeat.runtime.drafters.base import DraftBatch
from wingbeat.runtime.drafters.growth import LogitRules
from wingbeat.runtime.heads.contract import Continuations
from wingbeat.runtime.protocol.sampling_rules import RuleKinds


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
