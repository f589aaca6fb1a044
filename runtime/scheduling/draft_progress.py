"""How far the drafter is with a sequence."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class DraftProgress:
    """What drafting for a sequence needs; the drafter client alone writes it, everything else may read it."""

    length: int = 0
    """Positions 0..length-1 have the attached drafter's KV."""
    complete: bool = False
    """Whether the drafter has got, or will get, all that was computed, what is in flight included."""
    num_deferred: int = 0
    """Latest pairs that the drafter has not been given yet; see `runtime.engine.deferred_pairs`."""
    deferred_from: int = 0
    """Position of the first of them."""
    tree_requested: bool = False
    recorded: "Tensor | None" = None
    """[num_tokens, taps_size]: of a saved prefix that the sequence begins by, until the drafter has been given it."""

    @property
    def num_recorded(self) -> int:
        """Positions 0..num_recorded-1 need not be computed for the drafter."""
        return 0 if self.recorded is None else len(self.recorded)

    @property
    def is_recorded(self) -> bool:
        """Whether what the drafter lacks next is recorded."""
        return self.length < self.num_recorded
