"""A drafter in its engine's process: one thread runs both, and they meet in memory that is theirs alone."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.engine.round_failed import InnerDrafterFailed
from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.heads.lendable import lendable
from wingbeat.runtime.heads.target import Lender
from wingbeat.runtime.pair import PairSettings, drafter_of_pair
from wingbeat.runtime.protocol.ends import DrafterEnd, VerifierEnd
from wingbeat.runtime.protocol.messages import ChannelSpec

if TYPE_CHECKING:
    from wingbeat.runtime.engine.engine import Engine
    from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel


class LocalChannel(Protocol):
    """A channel with both ends in this process (`wingbeat.cluster.channels.channel.InProcessChannel`)."""

    verifier_end: VerifierEnd
    drafter_end: DrafterEnd
    pump: Callable[[], object] | None


ChannelFactory = Callable[[ChannelSpec], LocalChannel]


class InnerDrafter:
    """Loaded when the engine's verifier is there, and attached when the engine is.

    Args:
        device: of the drafter, the verifier's own or the host.
        load: makes what drafts, given the verifier's weights; None takes what the settings name.
    """

    def __init__(
        self, settings: PairSettings, device: str, load: Callable[[Lender], DraftWorker | None] | None = None
    ) -> None:
        self.worker: DraftWorker | None = None
        """None until it is loaded, and where everything is decoded plainly."""
        self._settings, self._device = settings, device
        self._load = load or self._load_own

    def needs(self, convention: HeadConvention | None, loaded: "LoadedModel") -> DrafterNeeds:
        """Load it; what it needs of the verifier.

        Args:
            convention: how it shall read its head; None where its files say that.
            loaded: the verifier, whose embedding and output matrix it reads where they are on its device.

        Raises:
            ValueError, FileNotFoundError: its checkpoint cannot be used; one line that names the tensor or field.
        """
        self.worker = self._load(self._lender(loaded))
        if self.worker is None:
            return DrafterNeeds()
        if convention is not None:
            self.worker.drafter.read_as(convention)
        return self.worker.drafter.needs

    def take(self, engine: "Engine", convention: HeadConvention | None, channel_factory: ChannelFactory) -> None:
        """Attach it to the engine, of which it then is a part: what it raises breaks the engine.

        Args:
            convention: as for `needs`, where that was not asked.

        Raises:
            Exception: it cannot be loaded, or cannot answer; then nothing of it is left.
        """
        try:
            if self.worker is None:
                self.needs(convention, engine.loaded)
            attach(engine, self.worker, channel_factory, self._answer)
        except BaseException:
            self.worker = None
            raise

    def _answer(self) -> bool:
        try:
            return self.worker.run_once()
        except Exception as error:
            raise InnerDrafterFailed(f"the drafter failed: {type(error).__name__}: {error}") from error

    def _lender(self, loaded: "LoadedModel") -> Lender:
        settings = self._settings
        if loaded.device.type != "cuda" or settings.engine_dir is not None:
            return {}.get
        weights = lendable(loaded, settings.dtype)
        return {name: weight for name, weight in weights.items() if isinstance(weight, torch.Tensor)}.get

    def _load_own(self, lender: Lender) -> DraftWorker | None:
        drafter = drafter_of_pair(self._settings, self._device, lender)
        return None if drafter is None else DraftWorker(drafter)


def attach(
    engine: "Engine",
    worker: DraftWorker,
    channel_factory: ChannelFactory,
    answer: Callable[[], object] | None = None,
) -> LocalChannel:
    """Attach what drafts in this thread to an engine.

    Args:
        answer: answers the rounds that wait; None is the worker's own.
    """
    channel = channel_factory(engine.channel_spec)
    worker.attach("local", channel.drafter_end)
    channel.pump = answer or worker.run_once
    engine.attach_drafter(channel.verifier_end)
    return channel
