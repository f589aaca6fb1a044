"""How far the drafter is with a sequence."""

from dataclasses import dataclass


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
