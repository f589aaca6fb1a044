"""Settings of engines for models with recurrent states, and unsupported combinations; does not import torch."""

from typing import TYPE_CHECKING

from wingbeat.runtime.refusals import Known, Refusal

if TYPE_CHECKING:
    from wingbeat.runtime.config import EngineConfig

STATES = "a model with recurrent state"
RANKS = "`tensor_parallel_size` above 1"
"""Name of the unsupported feature in messages; must equal the name that the tensor-parallel part gives this feature."""
MOST_INTERVAL = 2**31 - 1
REFUSED = (Refusal(STATES, RANKS, "ranks do not divide states", known=Known.LOADED),)
ENGINE_SETTINGS = {"state_interval": (int, 256), "num_saved_states": (int | None, None)}
"""`state_interval`: tokens between prefixes whose states are saved for the prefix cache, rounded up to whole blocks.

`num_saved_states`: maximum number of prefixes with a saved state; None derives the number from memory and KV blocks.
"""


def check_limits(config: "EngineConfig") -> None:
    """Raises ValueError if `state_interval` is out of range."""
    interval = config.state_interval
    if interval < 1:
        raise ValueError(f"state_interval is {interval}: use at least 1")
    if interval > MOST_INTERVAL:
        raise ValueError(f"state_interval is {interval}: use at most {MOST_INTERVAL}")
