"""Sampling rules of requests, by slot, as published to a drafter.

The tables are allocated once a request has rules.
"""

from functools import reduce
from operator import or_

import torch
from torch import Tensor

from wingbeat.runtime.protocol.sampling_rules import MOST_BIASED, RuleColumns, RuleKinds, SamplingRules, no_rules
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.scheduling.request import SamplingParams
from wingbeat.runtime.scheduling.sequence import Sequence

_BAN = float("-inf")


class PublishedRules:
    """Published sampling rules of an engine's slots."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._num_slots, self._device = num_slots, device
        self.ruled: set[int] = set()
        """Slots whose rows hold rules."""
        self._kinds: dict[int, RuleKinds] = {}
        self.num_changes = 0
        self.rows: SamplingRules | None = None
        """Tables of rules; None until the first request with a rule."""

    def admit(self, seqs: list[Sequence]) -> None:
        """Writes the rows of newly admitted sequences."""
        for seq in seqs:
            params = seq.request.params
            if has_rules(params):
                entries = listed(params)
                self.ruled.add(seq.slot)
                self._kinds[seq.slot] = kinds_of(params, entries)
                self._write(seq.slot, columns_of(params, seq.num_prompt_tokens), entries)
            elif seq.slot in self.ruled:
                self._write(seq.slot, RuleColumns(), [])
                self.ruled.discard(seq.slot)

    def kinds(self, seqs: list[Sequence]) -> int:
        """Returns the kinds of rules that these sequences need, as bits of `RoundHeader.sampling_rules`."""
        return reduce(or_, (self._kinds[seq.slot] for seq in seqs if seq.slot in self.ruled), 0)

    def copies(self, into: SamplingRules) -> list[tuple[Tensor, Tensor]]:
        """Returns the copies (target, source) that bring a drafter's rows up to date."""
        return [] if self.rows is None else list(zip(into, self.rows, strict=True))

    def _write(self, slot: int, columns: RuleColumns, entries: list[tuple[int, float]]) -> None:
        if self.rows is None:
            self.rows = no_rules(self._num_slots, self._device)
        self.num_changes += 1
        padded = [*entries, *[(-1, 0.0)] * (MOST_BIASED - len(entries))]
        token_ids, biases = zip(*padded, strict=True)
        self.rows.numbers[slot] = upload(columns, self._device, torch.float32)
        self.rows.token_ids[slot] = upload(token_ids, self._device)
        self.rows.biases[slot] = upload(biases, self._device, torch.float32)


def has_rules(params: SamplingParams) -> bool:
    """Whether a request has sampling rules, other than its temperature, that are published to a drafter."""
    filtered = params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    return filtered or params.has_penalties or bool(listed(params))


def kinds_of(params: SamplingParams, entries: list[tuple[int, float]]) -> RuleKinds:
    """Returns the kinds of rules that a request has; `entries` is the result of `listed`."""
    kinds = RuleKinds.NUMBERS
    if entries:
        kinds |= RuleKinds.LISTED
    return kinds | RuleKinds.PENALTIES if params.has_penalties else kinds


def columns_of(params: SamplingParams, num_prompt_tokens: int) -> RuleColumns:
    """Returns the numeric rules of a request."""
    return RuleColumns(
        params.top_k,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        num_prompt_tokens,
        float(_tells_allowed(params)),
    )


def listed(params: SamplingParams) -> list[tuple[int, float]]:
    """Returns token ids and the change of their logits: at most `MOST_BIASED` tokens, largest changes first.

    If a request allows more than `MOST_BIASED` tokens, its allowed tokens are not listed.
    """
    changes = dict.fromkeys(params.allowed_token_ids, 0.0) if _tells_allowed(params) else {}
    single = [(word[0], _BAN) for word in params.bad_words if len(word) == 1]
    for token_id, value in (*params.logit_bias, *single):
        if token_id in changes or not _tells_allowed(params):
            changes[token_id] = changes.get(token_id, 0.0) + value
    return sorted(changes.items(), key=lambda entry: -abs(entry[1]))[:MOST_BIASED]


def _tells_allowed(params: SamplingParams) -> bool:
    return 0 < len(params.allowed_token_ids) <= MOST_BIASED
