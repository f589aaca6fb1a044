"""Token counts of sequences by column of a drafter's logits: torch reference and CPU path."""

import torch
from torch import Tensor

from wingbeat.kernels import choice
from wingbeat.kernels.sampling.processors import Histories


def find_columns(token_ids: Tensor, sorted_ids: Tensor, columns: Tensor) -> Tensor:
    """Column of each token id, int64 of the same shape; -1 for tokens without a column.

    Args:
        sorted_ids: int64 [num_columns], ascending.
        columns: int64 [num_columns]: column of each of `sorted_ids`.
    """
    at = torch.searchsorted(sorted_ids, token_ids.contiguous()).clamp_max(len(sorted_ids) - 1)
    return torch.where(sorted_ids[at] == token_ids, columns[at], -1)


def count_tokens(
    histories: Histories, sorted_ids: Tensor, columns: Tensor, in_prompt: Tensor, in_output: Tensor
) -> None:
    """Writes whether each column's token occurs in a row's prompt, and how often in its output.

    Args:
        sorted_ids, columns: as for `find_columns`.
        in_prompt: bool [num_rows, num_columns], contiguous.
        in_output: int32 [num_rows, num_columns], contiguous.
    """
    if kernels := choice.compiled("count_tokens", in_output):
        kernels.count_tokens(histories, sorted_ids, columns, in_prompt, in_output)
        return
    token_ids, lens, num_prompt_tokens, slots = histories
    token_ids = token_ids[slots]
    at, steps = find_columns(token_ids, sorted_ids, columns), torch.arange(token_ids.shape[1], device=slots.device)
    known = (steps < lens[slots][:, None]) & (at >= 0)
    is_output, entries = steps >= num_prompt_tokens[slots][:, None], at.clamp_min(0)
    counts = torch.zeros_like(in_output).scatter_add_(1, entries, (known & ~is_output).to(torch.int32))
    torch.gt(counts, 0, out=in_prompt)
    in_output.zero_().scatter_add_(1, entries, (known & is_output).to(torch.int32))
