"""Committed tokens as rows of equal width, which every drafter with weights commits in the same shapes."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class DecidedRows(NamedTuple):
    """Committed tokens of decodes, one sequence per row: input of `draft_accept`. Padding rows have num_tokens 0."""

    slots: Tensor
    """int64 [num_reqs]"""
    positions: Tensor
    """int64 [num_reqs]: first position computed."""
    num_tokens: Tensor
    """int64 [num_reqs]: number of valid pairs, 0..max_path."""
    token_ids: Tensor
    """int64 [num_reqs, max_path]"""
    taps: Tensor
    """[num_reqs, max_path, taps_size]"""
    first_token_ids: Tensor | None = None
    """int64 [num_reqs]: token at the first position; None unless `reads_history` is set."""
    position_deltas: Tensor | None = None
    """int64 [num_reqs]: offsets as in `Roots.position_deltas`; None if all offsets are 0."""
    state_slots: Tensor | None = None
    """int64 [num_reqs]: slots whose state becomes that of the rows' last pairs; None if these are `slots`. Pieces of a
    prompt before its last one have the spare slot."""

    @property
    def ends(self) -> Tensor:
        """Slot whose state becomes that of each row's last pair, int64 [num_reqs]."""
        return self.slots if self.state_slots is None else self.state_slots

    def rotated(self, positions: Tensor) -> Tensor:
        """Returns the RoPE positions of pairs at `positions`, int64 [num_reqs, width]."""
        return positions if self.position_deltas is None else positions + self.position_deltas[:, None]

    def spread(self) -> tuple[Tensor, Tensor]:
        """Returns each column's position, int64 [num_reqs, width], and whether it is valid, bool [num_reqs, width]."""
        steps = torch.arange(self.token_ids.shape[1], device=self.token_ids.device)
        return self.positions[:, None] + steps, steps < self.num_tokens[:, None]

    def trimmed(self) -> "DecidedRows":
        """Drops the columns that no sequence uses; `num_tokens` must be in host memory."""
        width = max(int(self.num_tokens.max()), 1)
        return self._replace(token_ids=self.token_ids[:, :width], taps=self.taps[:, :width])


CommitFunction = Callable[[DecidedRows, Tensor], None]
"""Function (decodes, block tables by slot) that commits the decoded tokens."""
