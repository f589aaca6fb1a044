"""Weights of the engines of one replica: the weights that its settings name, or weights that were pushed later."""

import asyncio
import json
import logging
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.parts import first_result
from wingbeat.deployments.refused_models.cluster_memory import ClusterMemory
from wingbeat.deployments.refused_models.remembering_engines import RememberingEngines
from wingbeat.deployments.replica.drafters.supervisor import root_cause
from wingbeat.deployments.replica.engine_client import ANSWER_S, EngineClient, EngineFailed
from wingbeat.deployments.replica.engine_supervisor import Life
from wingbeat.deployments.weights.changing_supervisor import ChangingSupervisor
from wingbeat.deployments.weights.push import Refusal, Weights
from wingbeat.runtime.interpreter import module_command, module_environment
from wingbeat.runtime.successor import MODULE, Inspected

logger = logging.getLogger(__name__)
PUSHED = b"wingbeat weights"
POLL_S = 0.02


class ReplicaWeights(RememberingEngines):
    """Engines of one replica whose weights can be replaced by pushed weights."""

    def __init__(self, config: AppConfig, memory: ClusterMemory, new_life: Callable[[AppConfig, str], Life]) -> None:
        super().__init__(config, memory, new_life)
        self.engines: ChangingSupervisor = ChangingSupervisor(self._launch)
        self._served = Weights()
        self._state = "serves"
        self._taking = asyncio.Lock()

    async def start(self) -> None:
        """See `ReplicaEngines.start`; the engine serves the latest pushed weights, even if they were pushed during the
        start.
        """
        pushed = await self._kept()
        while True:
            self._served = pushed
            if pushed.digest:
                logger.warning("the pushed weights in %s are served instead of those of the settings", pushed.folder)
            await self._start_engine(pushed.digest)
            pushed = await self._kept()
            if pushed.digest == self._served.digest:
                return
            await self.engines.stop()

    async def _kept(self) -> Weights:
        """Return the latest pushed weights; if no weights were pushed, the weights that the settings name."""
        found = await self._memory.read(PUSHED)
        return Weights() if found is None else Weights(*json.loads(found))

    def operations(self) -> Mapping[str, Callable[..., Awaitable[Any]]]:
        """See `ReplicaEngines.operations`."""
        return {"weights": self.card, "inspect_weights": self.inspect, "take_weights": self.replace_engine}

    async def card(self) -> dict[str, Any]:
        """Return a description of the served weights, and of a replacement that is in progress."""
        served = self._served
        return {
            "weights": served.digest or None,
            "folder": served.folder or str(self._config.model_dir(with_weights=False)),
            "pushed_at": served.version / 1e9 if served.version else None,
            "state": self._state,
        }

    async def inspect(self, folder: str) -> tuple[Weights, str | None]:
        """Return the weights in a folder, and the reason why this replica cannot serve them, or None."""
        problem = refused_by(self._config)
        if problem is not None:
            return Weights(), problem
        return await asyncio.to_thread(self._inspect, folder)

    async def replace_engine(self, weights: Weights, drain_s: float) -> Refusal | None:
        """Replace the engine by an engine with other weights; returns None on success.

        Args:
            drain_s: maximum seconds that running requests have to finish; meanwhile no other requests begin.
        """
        if self._taking.locked():
            return Refusal("another push of weights is running")
        async with self._taking:
            if weights.version < self._served.version:
                return Refusal("other weights were pushed later")
            if weights.digest != self._served.digest:
                refusal = await self._replace(weights, drain_s)
                if refusal is not None:
                    return refusal
            self._served = weights
            try:
                await self._memory.write(PUSHED, json.dumps(weights))
            except Exception as error:  # calls of the cluster may raise any exception
                return Refusal(
                    f"this engine serves them, but they are not stored for other replicas: {root_cause(error)}"
                )
            return None

    async def _replace(self, pushed: Weights, drain_s: float) -> Refusal | None:
        try:
            client = self.engines.client
        except EngineFailed as error:
            return Refusal(str(error))
        client.hold()
        try:
            self._state = "drains"
            if (refusal := await _drained(client, drain_s)) is not None:
                return refusal
            self._state = "starts"
            await self.engines.change(partial(self._life_of, pushed))
        except Exception as error:  # any exception may prevent an engine's start
            logger.warning("No engine starts with the weights in %s: %s", pushed.folder, root_cause(error))
            again = "is served again" if self.engines.life is not None else "is tried again"
            return Refusal(
                f"no engine starts with it: {root_cause(error)}; the former checkpoint {again}", is_of_folder=True
            )
        finally:
            self._state = "serves"
            client.release()
        return None

    def _launch(self) -> Life:
        return self._life_of(self._served)

    def _life_of(self, weights: Weights) -> Life:
        return self._new_life(self._config_of(weights), weights.digest)

    def _config_of(self, weights: Weights) -> AppConfig:
        return self._config.with_weights(Path(weights.folder)) if weights.digest else self._config

    def _inspect(self, name: str) -> tuple[Weights, str | None]:
        config = self._config_of(self._served)
        served = config.model_dir()
        try:
            folder = Path(name).resolve()  # a symbolic link is resolved now, because the link may change later
            if not Path(name).is_absolute():
                return Weights(), f"{name} must be an absolute path"
            found = inspected(folder, served)
        except (ValueError, OSError, RuntimeError, subprocess.SubprocessError) as error:
            return Weights(), f"{name} cannot be read: {error}"
        if found.problem is not None:
            return Weights(), found.problem
        if folder == served.resolve() and found.digest != self._served.digest:
            return Weights(), f"{folder} is the folder that is served: write other weights to another folder"
        others = self._config.with_weights(folder)
        if (others.resolved_dtype(), others.tries_bfloat16()) != (config.resolved_dtype(), config.tries_bfloat16()):
            return Weights(), f"{folder} holds {others.resolved_dtype()}, another dtype than is served: set dtype"
        return Weights(found.digest, str(folder)), None


def refused_by(config: AppConfig) -> str | None:
    """Return the reason why these settings cannot be combined with pushed weights; None if there is no such reason."""
    if config.engine_dir is not None:
        return (
            "engine_dir is given, whose engines contain the weights: build engines of the new weights and serve those"
        )
    return first_result("refuses_weights", config)


async def _drained(client: EngineClient, drain_s: float) -> Refusal | None:
    """Wait until all requests of an engine that is held have finished; returns a refusal if they have not finished
    within `drain_s`.
    """
    try:
        async with asyncio.timeout(drain_s):
            while client.num_requests:
                client.check_alive()
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        return Refusal(f"{client.num_requests} requests have not ended within {drain_s:g} s")
    except EngineFailed as error:
        return Refusal(str(error))
    return None


def inspected(folder: Path, served: Path) -> Inspected:
    """Inspect a folder in a separate process and compare it with the served checkpoint; returns the result."""
    env = module_environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    command = module_command(MODULE, folder, served)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Inspected(problem=f"{folder} cannot be inspected: {last}")
    return Inspected(*json.loads(done.stdout.strip().splitlines()[-1]))


def replica_weights(
    config: AppConfig, store_key: str | None, new_life: Callable[[AppConfig, str], Life]
) -> ReplicaWeights:
    """Return the engines of a replica; `store_key` is the key of `ClusterMemory`."""
    return ReplicaWeights(config, ClusterMemory(store_key), new_life)
