"""The rules of sampling that captured drafts read: written between two rounds, at addresses that do not change.

Rules lie by slot. What follows from a round's own requests lies by row: tokens that its grammars allow behind the
roots, and which tokens penalized sequences have. That is counted outside the graph, by as many columns as their
longest has tokens, and only in rounds that penalize.
"""

import torch
from torch import Tensor

from wingbeat.runtime.drafters.base import DraftBatch
from wingbeat.runtime.drafters.growth import Roots
from wingbeat.runtime.drafters.sampling_rules import DraftColumns, RequestRules, TokenCounts
from wingbeat.runtime.protocol.sampling_rules import RuleColumns, SamplingRules, no_rules
from wingbeat.runtime.protocol.transfer import copy_all


class RuleTables:
    """Of one drafter; 5 x draft_vocab_size + vocab_size / 8 bytes a slot.

    Args:
        vocab_size: of the verifier's masks; 0 where it sends none.
    """

    def __init__(self, num_slots: int, columns: DraftColumns, vocab_size: int, device: torch.device) -> None:
        self._columns = columns
        # The last row is nobody's, and stays without rules.
        self._told, self._none = no_rules(num_slots + 1, device), no_rules(num_slots, device)
        self._counts = TokenCounts.empty(num_slots, columns.size, device)
        self._allowed: Tensor | None = None
        self._has_masks = False
        """Whether the masks of the round before restrict anything."""
        if vocab_size:
            words = num_slots, -(-vocab_size // 32)
            self._allowed = torch.full(words, -1, dtype=torch.int32, device=device)

    def load(self, batch: DraftBatch, slots: Tensor) -> None:
        """Bring everything up to date for a batch's proposals, whose slots int64 [num_proposals] lie on the device."""
        rules = self._none if batch.sampling_rules is None else batch.sampling_rules
        copies = [(into[: len(rows)], rows) for into, rows in zip(self._told, rules, strict=True)]
        masks = batch.allowed_tokens
        if self._allowed is not None and (masks is not None or self._has_masks):
            self._allowed.fill_(-1)
        self._has_masks = masks is not None
        if masks is not None:
            copies.append((self._allowed[: len(masks), : masks.shape[1]], masks))
        copy_all(copies)
        if batch.sampling_rules is not None and batch.has_penalties:
            history = batch.token_ids[slots, : batch.max_committed_len]
            num_prompt_tokens = RuleColumns(*rules.numbers[slots].T).num_prompt_tokens
            self._counts.count(history, batch.committed_lens[slots], num_prompt_tokens, self._columns)

    def put(self, roots: Roots) -> Roots:
        """The roots under the rules that lie here; captured."""
        told, num_reqs = SamplingRules(*(part[roots.slots] for part in self._told)), len(roots.slots)
        rules = RequestRules(told, roots.temperatures, self._counts, self._columns)
        allowed = None if self._allowed is None else self._allowed[:num_reqs]
        return roots._replace(rules=rules, allowed_tokens=allowed)
