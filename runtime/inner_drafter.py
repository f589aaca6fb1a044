"""A drafter in its engine's process: one thread runs drafter and engine, which share a private in-memory channel."""

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
from wingbeat.runtime.parts import first_result
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
    """A drafter that is loaded after the engine's verifier and attached after the engine is built.

    Args:
        device: device of the drafter: the verifier's, or the CPU.
        load: builds the worker from the verifier's weights; None loads the drafter named in the settings.
    """

    def __init__(
        self, settings: PairSettings, device: str, load: Callable[[Lender], DraftWorker | None] | None = None
    ) -> None:
        self.worker: DraftWorker | None = None
        """Worker of the drafter; None before the drafter is loaded, and without a drafter."""
        self._settings, self._device = settings, device
        self._load = load or self._load_own

    def needs(self, convention: HeadConvention | None, loaded: "LoadedModel") -> DrafterNeeds:
        """Loads the drafter and returns the drafter's requirements on the verifier.

        Args:
            convention: convention by which the drafter's head is interpreted; None if the head's files define the
                convention.
            loaded: the verifier, whose embedding and output head the drafter shares if both are on the drafter's
                device.

        Raises:
            ValueError, FileNotFoundError: the drafter's checkpoint cannot be used; the message is one line that names
                the tensor or field.
        """
        self.worker = self._load(self._lender(loaded))
        if self.worker is None:
            return DrafterNeeds()
        drafter = self.worker.drafter
        if convention is not None:
            drafter.read_as(convention)
        if (place := first_result("rows_of", loaded)) is not None:
            first_result("follow_rows", place, self.worker)
        return drafter.needs._replace(in_engine=drafter.device.type == "cuda")

    def take(self, engine: "Engine", convention: HeadConvention | None, channel_factory: ChannelFactory) -> None:
        """Attaches the drafter to the engine. If the drafter raises in a later round, the engine breaks.

        Args:
            convention: see `needs`; used only if `needs` was not called before.

        Raises:
            Exception: the drafter cannot be loaded or cannot answer; this object then holds no drafter.
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
    """Attaches a draft worker that runs in this thread to an engine.

    Args:
        answer: function that answers the pending rounds; None uses `DraftWorker.run_once`.
    """
    channel = channel_factory(engine.channel_spec)
    worker.attach("local", channel.drafter_end)
    channel.pump = answer or worker.run_once
    engine.attach_drafter(channel.verifier_end)
    engine.runner.whole = first_result("whole_rounds", engine.runner, worker, channel.drafter_end)
    return channel
