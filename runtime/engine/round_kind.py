"""A kind of round, chosen once for an engine: what runs it, and what decides how much of its trees is verified."""

from collections.abc import Callable
from typing import NamedTuple

from wingbeat.runtime.engine.adaptive import AdaptiveSpeculation
from wingbeat.runtime.round.runner import ModelRunner


class RoundKind(NamedTuple):
    """The classes of one kind of round."""

    runner: Callable[..., ModelRunner]
    adaptive: type[AdaptiveSpeculation]


DEVICE_ROUND = RoundKind(ModelRunner, AdaptiveSpeculation)
"""By torch's operations on any device, in fixed shapes: nobody waits to look at trees."""
