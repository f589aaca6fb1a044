"""Round kind, chosen once per engine: the model runner class and the adaptive speculation class."""

from collections.abc import Callable
from typing import NamedTuple

from wingbeat.runtime.engine.adaptive import AdaptiveSpeculation
from wingbeat.runtime.round.runner import ModelRunner


class RoundKind(NamedTuple):
    """Runner class and adaptive speculation class of one kind of round."""

    runner: Callable[..., ModelRunner]
    adaptive: type[AdaptiveSpeculation]


DEVICE_ROUND = RoundKind(ModelRunner, AdaptiveSpeculation)
"""Rounds with torch operations on any device, in fixed shapes; the host never waits to read trees."""
