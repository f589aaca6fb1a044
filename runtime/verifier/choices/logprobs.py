"""Log-probabilities of chosen tokens and of the most likely ones, from the model's own logits."""

import torch
from torch import Tensor

_ROWS_AT_ONCE = 64
"""Rows of a prompt that are turned into probabilities together: each is a row of the vocabulary in float32."""


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """Packed log-probabilities, which travel to the host with a round's tokens.

    Args:
        logits: [num_rows, vocab_size], any float type.
        token_ids: int64 [num_rows]: the token that each row chose.
        num_top: most likely tokens per row, 0 or more.

    Returns:
        int64 [num_rows, 1 + 2 * num_top]: the chosen token's log-probability, the most likely tokens, theirs; as the
        bits of doubles where they are no ids. Equal logits are in order of their ids on a CPU.
    """
    parts = [
        _pack(rows.to(torch.float32), ids, num_top)
        for rows, ids in zip(logits.split(_ROWS_AT_ONCE), token_ids.split(_ROWS_AT_ONCE), strict=True)
    ]
    return torch.cat(parts) if parts else token_ids.new_zeros(0, 1 + 2 * num_top)


def _pack(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    normalizer = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids[:, None]) - normalizer
    top, ids = logits.topk(num_top, dim=-1)
    return torch.cat([_bits(chosen), ids, _bits(top - normalizer)], dim=1)


def _bits(numbers: Tensor) -> Tensor:
    return numbers.to(torch.float64).view(torch.int64)
