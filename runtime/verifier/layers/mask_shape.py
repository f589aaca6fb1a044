"""Derives a sliding window from transformers' mask function, before any text is long enough to show the window.

A mask function returns whether a query position sees a key position. A window of thousands of tokens can therefore be
found from a few rows of the mask, without a forward pass.
"""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import or_masks

MaskFunction = Callable[[int, int, Tensor, Tensor], Tensor]
"""Signature of transformers' mask functions: (batch, head, query position, key position) -> whether the key is
visible."""

MOST_POSITIONS = 1 << 20
"""Maximum number of positions for which masks are evaluated."""


class MaskShape(NamedTuple):
    """Rule for which earlier keys a row sees: all keys, or keys within a window."""

    window: int | None = None
    """Sliding window: keys at a distance >= window are hidden. None hides no key."""
    causal_until: int | None = None
    """If no window describes the mask, the position of the first row that does not see every earlier key; else None."""


def for_text(mask_function: MaskFunction, num_tokens: int, device: torch.device | None = None) -> MaskFunction:
    """Returns the mask function that applies to a pass of `num_tokens` text tokens, without alternatives for media.

    So that the tokens of an image see each other, transformers takes the union of the causal mask and a mask that looks
    up each token's image number. The lookup fails for positions beyond the pass. Therefore, if a mask of the union
    shows no key to any text token, that mask is left out.
    """
    parts = inspect.getclosurevars(mask_function).nonlocals.get("mask_functions")
    if parts is None or mask_function.__name__ != "or_mask":
        return mask_function
    rows = torch.arange(num_tokens, device=device)
    showing = [part for part in parts if bool(torch.as_tensor(part(0, 0, rows[:, None], rows)).any())]
    return or_masks(*(for_text(part, num_tokens, device) for part in showing))


def mask_shape(mask_function: MaskFunction, num_positions: int, device: torch.device | None = None) -> MaskShape | None:
    """Returns the mask's shape for sequences of up to `num_positions`; None if even the first rows are not causal.

    Args:
        device: device of the tensors that the mask function holds, if any.
    """
    num_positions = min(num_positions, MOST_POSITIONS)
    positions = torch.arange(num_positions, device=device)

    def seen(query: int) -> Tensor:
        return torch.as_tensor(mask_function(0, 0, torch.tensor(query, device=device), positions)).expand(num_positions)

    sees_first = torch.as_tensor(mask_function(0, 0, positions, torch.tensor(0, device=device))).expand(num_positions)
    reach = num_positions if bool(sees_first.all()) else int(sees_first.long().argmin())
    early = {0, 1, 2, reach // 2, reach - 1} & set(range(reach))
    if reach == 0 or not all(torch.equal(seen(query), positions <= query) for query in early):
        return None
    if reach == num_positions:
        return MaskShape()
    late = {reach, reach + 1, 2 * reach - 1, 2 * reach, 2 * reach + 1, num_positions // 2, num_positions - 1}
    late &= set(range(reach, num_positions))
    if all(torch.equal(seen(query), (positions <= query) & (positions > query - reach)) for query in late):
        return MaskShape(window=reach)
    return MaskShape(causal_until=reach)
