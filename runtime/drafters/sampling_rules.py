"""What requests' own rules of sampling make of a drafter's logits: the target chooses from no other tokens.

In the target's order: bias and bans, penalties by what is decided (a draft's own tokens are not counted: that gains
nothing), then top-k, top-p and min-p at the request's temperature. Kernels of the CPU do the same (`sampling_rules.h`).
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from wingbeat.kernels.sampling.processors import LogitBias, LogitProcessors, Penalties, apply_processors
from wingbeat.kernels.sampling.reference import process_logits
from wingbeat.runtime.protocol.sampling_rules import RuleColumns, SamplingRules


class RequestRules(NamedTuple):
    """Of the requests of one draft, a row each; tables are by token of the target, as far as the drafter knows them."""

    columns: RuleColumns
    """float32 [num_reqs] each."""
    temperatures: Tensor
    """float32 [num_reqs]"""
    bias: Tensor
    """float32 [num_reqs, num_tokens]"""
    in_prompt: Tensor
    """bool [num_reqs, num_tokens]"""
    output_counts: Tensor
    """int32 [num_reqs, num_tokens]"""
    draft_token_ids: Tensor
    """int64 [draft_vocab_size]"""

    @classmethod
    def of(
        cls, told: SamplingRules, history: Tensor, lens: Tensor, temperatures: Tensor, draft_token_ids: Tensor
    ) -> Self:
        """Of requests by row, whose `history` [num_reqs, width] counts up to their `lens` [num_reqs]."""
        columns, num_tokens = RuleColumns(*told.numbers.T), int(draft_token_ids.max()) + 1
        num_reqs = len(history)
        # One column more, for what counts nowhere.
        nowhere = torch.where((told.token_ids >= 0) & (told.token_ids < num_tokens), told.token_ids, num_tokens)
        bias = torch.zeros(num_reqs, num_tokens + 1, device=history.device)
        bias.masked_fill_((columns.only_listed > 0)[:, None], float("-inf"))
        bias.scatter_(1, nowhere, told.biases)
        steps = torch.arange(history.shape[1], device=history.device)
        known = (steps < lens[:, None]) & (history >= 0) & (history < num_tokens)
        is_output = steps >= columns.num_prompt_tokens[:, None]
        seen = torch.zeros(2, num_reqs, num_tokens + 1, dtype=torch.int32, device=history.device)
        for counts, which in zip(seen, (~is_output, is_output), strict=True):
            counts.scatter_add_(1, torch.where(known & which, history, num_tokens), which.to(torch.int32))
        prompt, output = seen[..., :-1]
        return cls(columns, temperatures, bias[:, :-1], prompt > 0, output, draft_token_ids)

    def apply(self, logits: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Logits [num_reqs, width, num_candidates] under the rules: what may not be chosen has none.

        A head's own few candidates are not filtered: their shares are not the vocabulary's, and drafts were worse. They
        are chosen from logits that are.

        Args:
            token_ids: int64 [num_reqs, num_candidates]: of the candidates; None for the draft vocabulary.
        """
        num_reqs, width, _ = logits.shape
        row = torch.arange(num_reqs, device=logits.device).repeat_interleave(width)
        bias, in_prompt, counts = (self._among(part, token_ids) for part in self[2:5])
        columns = RuleColumns(*(column[row] for column in self.columns))
        penalties = Penalties(columns.repetition, columns.presence, columns.frequency, row, in_prompt, counts)
        flat = apply_processors(logits.flatten(0, 1), LogitProcessors(penalties, LogitBias(bias, row)))
        if token_ids is not None:
            return flat.view_as(logits)
        top_ks = columns.top_k.to(torch.int64)
        kept = process_logits(flat, self.temperatures[row], top_ks, columns.top_p, columns.min_p)
        return flat.masked_fill(kept == float("-inf"), float("-inf")).view_as(logits)

    def _among(self, table: Tensor, token_ids: Tensor | None) -> Tensor:
        """Columns of a table, of some candidates."""
        if token_ids is None:
            return table[:, self.draft_token_ids]
        return table.gather(1, token_ids.clamp(max=table.shape[1] - 1))
