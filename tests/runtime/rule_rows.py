"""Sampling rules by slot, of every kind."""

import torch

from wingbeat.runtime.protocol.sampling_rules import RuleColumns, no_rules

BAN = float("-inf")
ROWS = [
    RuleColumns(),
    RuleColumns(top_k=5),
    RuleColumns(top_p=0.7),
    RuleColumns(min_p=0.1),
    RuleColumns(top_k=9, top_p=0.8, min_p=0.05),
    RuleColumns(repetition=1.3, presence=0.4, frequency=0.3, num_prompt_tokens=3),
    RuleColumns(top_p=0.9, repetition=1.2, num_prompt_tokens=4),
    RuleColumns(only_listed=1),
]
LISTED = {1: [(3, 2.0), (7, BAN)], 6: [(token_id, BAN) for token_id in range(12)], 7: [(2, 0.0), (5, 1.0), (8, 0.0)]}


def rules_of(num_slots):
    rules = no_rules(num_slots)
    for slot in range(num_slots):
        rules.numbers[slot] = torch.tensor(ROWS[slot % len(ROWS)])
        for place, (token_id, bias) in enumerate(LISTED.get(slot % len(ROWS), [])):
            rules.token_ids[slot, place], rules.biases[slot, place] = token_id, bias
    return rules
