"""What a replica may ask of its engine between two rounds; results and errors travel back to it."""

import itertools
import os
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.replica.engine.engine_setup import EngineSetup
from wingbeat.runtime.prefixes.saved_prefix import SavedPrefix

if TYPE_CHECKING:
    from concurrent.futures import Future

    from wingbeat.cluster.channels.tcp.remote_address import ChannelName
    from wingbeat.deployments.replica.engine.live_recording import TrafficRecording
    from wingbeat.deployments.replica.engine.pair_channel import PairChannel
    from wingbeat.runtime.engine.round_clock import RoundTrace
    from wingbeat.runtime.prefixes.prefix_keeper import Refusal


class EngineFigures(NamedTuple):
    """An engine's figures, copied between two rounds: the next one changes them."""

    stats: dict[str, Any]
    drafter_state: str
    recording: dict[str, Any] | None
    """What was written of live traffic; None where nothing is recorded."""
    pid: int


class EngineCalls:
    """Methods that `EngineClient.call` names; the engine's thread runs them.

    Args:
        channel: to its drafters; None where there is none.
    """

    def __init__(
        self, setup: EngineSetup, config: AppConfig, engine_id: str, channel: "PairChannel | None" = None
    ) -> None:
        self._engine = setup.engine
        self._check_drafter = setup.check_drafter
        self._adapters = setup.adapters
        self._served_adapters = setup.info.adapters
        self._prefixes = setup.prefixes
        self._config = config
        self._engine_id = engine_id
        self._channel = channel
        self._recording: TrafficRecording | None = None
        self._traces: dict[int, RoundTrace] = {}
        self._numbers = itertools.count()

    def figures(self) -> EngineFigures:
        """The figures of now."""
        stats = self._engine.stats()
        recording = None if self._recording is None else asdict(self._recording.writer.stats)
        fields = asdict(stats) if is_dataclass(stats) else stats._asdict()
        return EngineFigures(fields, str(self._engine.drafter_state), recording, os.getpid())

    def check_integrity(self) -> None:
        """Prove that the KV blocks add up; raises the engine's own error, naming the mismatch."""
        self._engine.check_integrity()

    def reset_prefix_cache(self) -> None:
        """Forget the prefixes that are cached."""
        self._engine.reset_prefix_cache()

    def load_adapter(self, name: str, path: str) -> tuple[tuple | None, str]:
        """Read and check an adapter below `lora_update_dir`: its fields, or None and why it is not served."""
        root = self._config.lora_update_dir
        if self._adapters is None or root is None:
            return None, "this engine loads none; lora_update_dir says whether and from where"
        try:
            if not (root / path).resolve().is_relative_to(root.resolve()):
                return None, f"{path} is not below lora_update_dir"
            adapter = self._adapters.inspect(name, root / path)
            self._adapters.resident.warm(adapter)
        except (ValueError, OSError, RuntimeError) as error:  # whatever a path can lead to, such as a circle of links
            return None, str(error)
        return tuple(adapter), ""

    def unload_adapter(self, digest: str) -> None:
        """Free an adapter's place once no sequence runs with it."""
        if self._adapters is not None:
            self._adapters.resident.unload(digest)

    def open_prefixes(self, entries: tuple[tuple, ...]) -> tuple[tuple, ...]:
        """Pin what is kept on disk, and what the replica knows; returns the former as `Catalog.changes` would."""
        if self._prefixes is None:
            return ()
        found = self._prefixes.open(self._served_adapters)
        self.keep_prefixes(entries)
        return tuple((prefix.name, prefix.version, prefix.fields()) for prefix in found)

    def save_prefix(self, fields: tuple) -> "Future[Refusal | None] | tuple[str, str]":
        """Pin a prefix, once it is computed: None, or code and reason where it cannot be."""
        if self._prefixes is None:
            return "invalid_value", "cannot be kept: this engine keeps no prefixes"
        return self._prefixes.save(SavedPrefix.of_fields(fields))

    def drop_prefix(self, name: str, version: int) -> None:
        """Let go of one that is not to be kept."""
        if self._prefixes is not None:
            self._prefixes.drop(name, version)

    def keep_prefixes(self, entries: tuple[tuple, ...]) -> "Future[None] | None":
        """Have the prefixes that `Catalog.changes` says; ends once those that are pinned are written."""
        if self._prefixes is None:
            return None
        return self._prefixes.keep(
            (name, version, None if fields is None else SavedPrefix.of_fields(fields))
            for name, version, fields in entries
        )

    def stored_prefix(self, name: str) -> tuple | None:
        """Fields of the prefix that has this name on disk."""
        found = None if self._prefixes is None else self._prefixes.stored(name)
        return None if found is None else found.fields()

    def describe_prefixes(self) -> dict[str, Any]:
        """What is pinned."""
        if self._prefixes is None:
            return {"pinned_tokens": 0, "max_pinned_tokens": 0, "prefixes": []}
        return self._prefixes.describe()

    def attach_drafter(self) -> None:
        """Draft from the next round on, with the drafter that has attached to the channel.

        Raises:
            ChannelError: what it writes does not arrive here.
        """
        self._channel.try_drafter()
        self._engine.attach_drafter(self._channel.verifier_end)

    def fall_back(self, reason: str) -> "ChannelName | None":
        """Where drafters are to attach now that the channel does not carry; None where they have no other."""
        return self._channel.fall_back(reason)

    def drafter_is_lost(self) -> bool:
        """Whether there is no drafter; an idle engine exchanges no rounds and learns of its death here."""
        if self._engine.drafter_state == "attached" and not self._channel.verifier_end.peer_alive():
            self._engine.detach_drafter()
        return self._engine.drafter_state != "attached"

    def check_drafter(self) -> dict[str, Any] | None:
        """Try the drafter on short texts: the results, where they are of Wingbeat's own test.

        Raises:
            Exception: it is unfit.
        """
        found = self._check_drafter(self._engine)
        from wingbeat.runtime.checks.self_test import SelfTest

        return found.as_dict() if isinstance(found, SelfTest) else None

    def start_recording(self) -> None:
        """Write what is served from now on, as the configuration has it.

        Raises:
            ValueError: the engine is not Wingbeat's own, or the folder cannot be written to.
        """
        from wingbeat.deployments.replica.engine.live_recording import start_recording

        self._recording = start_recording(self._config, self._engine, self._engine_id)
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
        if self._prefixes is not None:
            self._prefixes.close()
        if self._recording is not None:
            self._recording.writer.close()
