"""Sampling rules for captured draft graphs: tables at fixed addresses, written between two rounds.

The table of numbers is indexed by slot. Three other tables have a column per token and a row per proposal of the round:
biases, token counts of penalised sequences, and the tokens that grammars allow after the roots. All tables are written
outside the graph; the other three only in rounds that need them.
"""

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
from wingbeat.runtime.drafters.growth import Roots
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
