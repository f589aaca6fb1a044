"""What the factories named by a configuration must return; they are imported only in the process that needs them."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.deployments.replica.engine_loop import ServedEngine
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.protocol.messages import ChannelSpec


class AskNeeds(Protocol):
    """The way to a drafter that is starting in a process of its own."""

    def __call__(self, convention: HeadConvention | None = None) -> DrafterNeeds:
        """What it needs of the verifier; blocks until it knows, raises if it cannot start.

        Args:
            convention: how it shall read its head; None where its files say that.
        """
        ...


class EngineSetup(NamedTuple):
    """What an engine factory returns."""

    engine: ServedEngine
    info: ModelInfo
    channel_spec: ChannelSpec | None
    """Of the channel its drafter attaches to; None where there is no drafter."""
    check_drafter: Callable[[Any], object] | None = None
    """Called with the idle engine, in its thread, once the first drafter is attached; raises where it is unfit."""


def load_factory(path: str) -> Callable[..., Any]:
    """The function behind `module:function`.

    Raises:
        ValueError: there is no such module or function; the message names it.
    """
    module_name, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"factory {path!r} cannot be loaded: {error}") from error
