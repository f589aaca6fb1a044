"""Settings of engines that serve LoRA adapters; imports no torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wingbeat.runtime.config import EngineConfig

MOST_LORAS = MOST_RANK = 2**12
"""Upper bounds of `max_loras` and `max_lora_rank`. The bounds serve to detect typing errors; no sensible value is above
them.
"""
RANK = 16
ENGINE_SETTINGS = {"max_loras": (int, 0), "max_lora_rank": (int, RANK)}
"""`max_loras`: number of adapters that can be loaded at once, and among which each row of a batch can choose; 0 serves
no adapters.

`max_lora_rank`: maximum rank of an adapter.
"""


def check_limits(config: "EngineConfig") -> None:
    """Raises ValueError if a setting is out of range; the message names field and value."""
    for name, most in (("max_loras", MOST_LORAS), ("max_lora_rank", MOST_RANK)):
        if getattr(config, name) > most:
            raise ValueError(f"{name} is {getattr(config, name)}: use at most {most}")
    if config.max_loras < 0 or config.max_lora_rank < 1:
        raise ValueError(
            f"max_loras is {config.max_loras} and max_lora_rank is {config.max_lora_rank}: use at least 0 and 1"
        )


def has_adapters(config: "EngineConfig") -> bool:
    """Whether an engine serves adapters; rounds without them are then captured apart."""
    return config.max_loras > 0
