"""Methods of an engine that its replica calls between two rounds; their results and errors are sent to the replica."""

import logging
import os
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.catalog import CatalogEntry
from wingbeat.deployments.log import set_log_level
from wingbeat.deployments.parts import first_result, merged
from wingbeat.deployments.replica.engine.engine_setup import EngineSetup

if TYPE_CHECKING:
    from concurrent.futures import Future

    from wingbeat.cluster.channels.header import ChannelName
    from wingbeat.deployments.replica.engine.pair_channel import PairChannel

logger = logging.getLogger(__name__)


def operations_of(setup: EngineSetup) -> dict[str, Callable[..., Any]]:
    """Return all operations by name. Their arguments and results must be picklable, because they cross processes."""
    of_parts = merged("operations", setup.keepers) | merged("engine_operations", setup.engine)
    return {"reset_prefix_cache": setup.engine.reset_prefix_cache} | of_parts


class EngineFigures(NamedTuple):
    """Copy of an engine's figures, made between two rounds, because the figures change during a round."""

    stats: dict[str, Any]
    drafter_state: str
    recording: dict[str, Any] | None
    """Statistics of the recording of live traffic; None if the traffic is not recorded."""
    pid: int
    weights: str = ""
    """Digest of the pushed weights in use; empty if the engine uses the weights that the settings name."""


class EngineCalls:
    """Methods that `EngineClient.call` names; the engine's thread runs them.

    Args:
        channel: channel to the drafter; None if the engine has no drafter.
        weights: as in `EngineFigures`.
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

    def set_log_level(self, level: str) -> None:
        """Set the log level of the engine's process."""
        set_log_level(level)

    def figures(self) -> EngineFigures:
        """Return the current figures."""
        stats = self._engine.stats()
        recording = None if self._recording is None else asdict(self._recording.writer.stats)
        fields = asdict(stats) if is_dataclass(stats) else stats._asdict()
        return EngineFigures(fields, str(self._engine.drafter_state), recording, os.getpid(), self._weights)

    def check_integrity(self) -> None:
        """Check that the KV block counts are consistent; if not, raises the engine's error, which names the
        mismatch.
        """
        self._engine.check_integrity()

    def operate(self, operation: str, arguments: tuple[Any, ...]) -> Any:
        """Run an operation that a router has requested.

        Raises:
            ValueError: there is no operation of that name.
        """
        if operation not in self._operations:
            raise ValueError(f"{operation} is no operation of an engine: {', '.join(sorted(self._operations))}")
        return self._operations[operation](*arguments)

    def open_names(self, kind: str, entries: tuple[CatalogEntry[Any], ...]) -> tuple[CatalogEntry[Any], ...]:
        """Restore the named objects of a kind that are on disk, then apply `entries`, which come from the replica.

        Returns the objects that were found on disk, as entries in the form of `Catalog.changes`.
        """
        if kind not in self._keepers:
            return ()
        found = self._keepers[kind].open(self._variants)
        self.keep_names(kind, entries)
        return tuple(CatalogEntry(thing.name, thing.version, thing) for thing in found)

    def keep_names(self, kind: str, entries: tuple[CatalogEntry[Any], ...]) -> "Future[None] | None":
        """Apply entries as returned by `Catalog.changes`; the future completes once the entries are written to disk."""
        return self._keepers[kind].keep(entries) if kind in self._keepers else None

    def attach_drafter(self) -> bool:
        """From the next round on, use the drafter that has attached to the channel.

        Returns:
            True if the engine uses the drafter from now on; False if test data from the drafter has not arrived in this
            process yet. After False, the method must be called again.

        Raises:
            ChannelError: data from the drafter cannot arrive in this process.
        """
        reached = self._channel.try_drafter()
        if reached:
            self._engine.attach_drafter(self._channel.verifier_end)
        return reached

    def fall_back(self, reason: str) -> "ChannelName | None":
        """Replace a channel in GPU memory that does not work by a channel in host memory.

        Returns the new channel's name, or None if the channel cannot be replaced.
        """
        return self._channel.fall_back(reason)

    def take_drafter_in(self, reason: str) -> None:
        """Load the drafter in this process, because its own process cannot be reached, and log one warning.

        Args:
            reason: why the drafter's process could not be reached.

        Raises:
            Exception: the drafter cannot be loaded here, for example because memory is short.
        """
        from wingbeat.deployments.replica.engine.pair_channel import own_memory

        self._take_drafter_in(own_memory(self._config))
        self._channel.verifier_end.close()
        logger.warning(
            "GPU memory does not carry rounds between two processes: %s; the drafter runs within the engine's "
            "(set drafter_place to engine to avoid this warning, or to actor to keep the drafter in its own process)",
            reason,
        )

    def drafter_is_lost(self) -> bool:
        """Return whether the engine has no living drafter, and detach a drafter that has died.

        An idle engine sends no rounds to its drafter, so only this call notices that the drafter has died.

        A drafter whose answer is late counts as alive until the engine's time limit for the answer has passed.
        """
        if self._engine.drafter_state == "late":
            self._engine.look_for_late_drafter()
        has_drafter = self._engine.drafter_state in ("attached", "late")
        if has_drafter and not self._channel.verifier_end.peer_alive():
            self._engine.detach_drafter()
            return True
        return not has_drafter

    def check_drafter(self) -> dict[str, Any] | None:
        """Run the drafter's self-test on short texts.

        Returns:
            The results if the test is Wingbeat's own; None for a test of a user's engine.

        Raises:
            Exception: the drafter is unfit.
        """
        as_dict = getattr(self._check_drafter(self._engine), "as_dict", None)
        return None if as_dict is None else as_dict()

    def observe(self) -> None:
        """Record the requests served from now on, if the configuration asks for a recording.

        Raises:
            ValueError: the engine is not Wingbeat's own, or the folder cannot be written to.
        """
        # A recording holds the hidden states of one set of verifier weights, so a separate recording is made for pushed
        # weights.
        name = f"{self._engine_id}-{self._weights[:8]}" if self._weights else self._engine_id
        own = getattr(self._engine, "inner", self._engine)  # an optional part may have wrapped the engine
        self._recording = first_result("observe", self._config, own, name)
        if self._recording is not None:
            self._engine.observe(self._recording.rounds)

    def close(self) -> None:
        """Finish all files that are being written; must be the last call."""
        for keeper in self._keepers.values():
            keeper.close()
        if self._recording is not None:
            self._recording.writer.close()
