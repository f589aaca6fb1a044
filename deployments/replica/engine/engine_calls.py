"""What a replica may ask of its engine between two rounds; results and errors travel back to it."""

import itertools
import logging
import os
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.catalog import CatalogEntry
from wingbeat.deployments.log import set_log_level
from wingbeat.deployments.parts import first
from wingbeat.deployments.replica.engine.engine_operations import operations_of
from wingbeat.deployments.replica.engine.engine_setup import EngineSetup, own_engine

if TYPE_CHECKING:
    from concurrent.futures import Future

    from wingbeat.cluster.channels.header import ChannelName
    from wingbeat.deployments.replica.engine.pair_channel import PairChannel
    from wingbeat.runtime.engine.clocks import RoundTrace

logger = logging.getLogger(__name__)


class EngineFigures(NamedTuple):
    """An engine's figures, copied between two rounds: the next one changes them."""

    stats: dict[str, Any]
    drafter_state: str
    recording: dict[str, Any] | None
    """What was written of live traffic; None where nothing is recorded."""
    pid: int
    weights: str = ""
    """Digest of those that were pushed; empty for what the settings name."""


class EngineCalls:
    """Methods that `EngineClient.call` names; the engine's thread runs them.

    Args:
        channel: to its drafters; None where there is none.
        weights: of `EngineFigures`.
    """

    def __init__(
        self,
        setup: EngineSetup,
        config: AppConfig,
        engine_id: str,
        channel: "PairChannel | None" = None,
        weights: str = "",
    ) -> None:
        self._engine = setup.engine
        self._check_drafter = setup.check_drafter
        self._operations = operations_of(setup)
        self._variants = setup.info.variants
        self._keepers = setup.keepers
        self._config = config
        self._engine_id = engine_id
        self._channel = channel
        self._weights = weights
        self._take_drafter_in = setup.take_drafter_in
        self._recording: Any = None
        self._traces: dict[int, RoundTrace] = {}
        self._numbers = itertools.count()

    def set_log_level(self, level: str) -> None:
        """Of this process."""
        set_log_level(level)

    def figures(self) -> EngineFigures:
        """The figures of now."""
        stats = self._engine.stats()
        recording = None if self._recording is None else asdict(self._recording.writer.stats)
        fields = asdict(stats) if is_dataclass(stats) else stats._asdict()
        return EngineFigures(fields, str(self._engine.drafter_state), recording, os.getpid(), self._weights)

    def check_integrity(self) -> None:
        """Prove that the KV blocks add up; raises the engine's own error, naming the mismatch."""
        self._engine.check_integrity()

    def operate(self, operation: str, arguments: tuple[Any, ...]) -> Any:
        """What a router asks for.

        Raises:
            ValueError: there is no such operation.
        """
        if operation not in self._operations:
            raise ValueError(f"{operation} is no operation of an engine: {', '.join(sorted(self._operations))}")
        return self._operations[operation](*arguments)

    def open_names(self, kind: str, entries: tuple[CatalogEntry[Any], ...]) -> tuple[CatalogEntry[Any], ...]:
        """Keep what is on disk, and what the replica knows; returns the former as `Catalog.changes` would."""
        if kind not in self._keepers:
            return ()
        found = self._keepers[kind].open(self._variants)
        self.keep_names(kind, entries)
        return tuple(CatalogEntry(thing.name, thing.version, thing) for thing in found)

    def keep_names(self, kind: str, entries: tuple[CatalogEntry[Any], ...]) -> "Future[None] | None":
        """Keep what names stand for, as `Catalog.changes` says; ends once what is there is written."""
        return self._keepers[kind].keep(entries) if kind in self._keepers else None

    def attach_drafter(self) -> bool:
        """Draft from the next round on, with the drafter that has attached to the channel.

        Returns:
            False where what it writes has not arrived here yet: call again.

        Raises:
            ChannelError: it does not arrive here.
        """
        reached = self._channel.try_drafter()
        if reached:
            self._engine.attach_drafter(self._channel.verifier_end)
        return reached

    def fall_back(self, reason: str) -> "ChannelName | None":
        """Where drafters are to attach now that the channel does not carry; None where they have no other."""
        return self._channel.fall_back(reason)

    def take_drafter_in(self, reason: str) -> None:
        """Load the drafter in this process, in the place of the one that could not be reached, with one warning.

        Args:
            reason: why it could not.

        Raises:
            Exception: it cannot be loaded here, such as for want of memory.
        """
        from wingbeat.deployments.replica.engine.pair_channel import own_memory

        self._take_drafter_in(own_memory(self._config))
        self._channel.verifier_end.close()
        logger.warning(
            "GPU memory does not carry rounds between two processes: %s; the drafter runs within the engine's "
            "(drafter_place engine says so without this line, drafter_place actor keeps it apart)",
            reason,
        )

    def drafter_is_lost(self) -> bool:
        """Whether there is no drafter; an idle engine exchanges no rounds and learns of its death here.

        One that is late is there, until its patience is over.
        """
        if self._engine.drafter_state == "late":
            self._engine.look_for_late_drafter()
        has_drafter = self._engine.drafter_state in ("attached", "late")
        if has_drafter and not self._channel.verifier_end.peer_alive():
            self._engine.detach_drafter()
            return True
        return not has_drafter

    def check_drafter(self) -> dict[str, Any] | None:
        """Try the drafter on short texts: the results, where they are of Wingbeat's own test.

        Raises:
            Exception: it is unfit.
        """
        found = self._check_drafter(self._engine)
        from wingbeat.runtime.checks.self_test import SelfTest

        return found.as_dict() if isinstance(found, SelfTest) else None

    def observe(self) -> None:
        """Have what is served from now on written, where the configuration asks for it.

        Raises:
            ValueError: the engine is not Wingbeat's own, or the folder cannot be written to.
        """
        # A recording is of one verifier.
        name = f"{self._engine_id}-{self._weights[:8]}" if self._weights else self._engine_id
        self._recording = first("observe", self._config, own_engine(self._engine), name)
        if self._recording is not None:
            self._engine.observe(self._recording.rounds)

    def start_trace(self) -> int:
        """Record what the rounds do; returns the recording's number."""
        number = next(self._numbers)
        self._traces[number] = self._engine.clock.record()
        return number

    def stop_trace(self, number: int) -> list[tuple]:
        """End a recording; its `TraceEvent`s."""
        trace = self._traces.pop(number)
        self._engine.clock.stop(trace)
        return list(map(tuple, trace.events))

    def close(self) -> None:
        """Finish what is being written; the last call."""
        for keeper in self._keepers.values():
            keeper.close()
        if self._recording is not None:
            self._recording.writer.close()
