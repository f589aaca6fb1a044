"""Runs the learner. All replicas that share a folder have a single learner, which is kept running by the replica that
holds the folder's lock.
"""

import asyncio
import json
import logging
import os
import time

from wingbeat.cluster.child_process import ChildProcess
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.learning.folder import learning_root, ledger_of
from wingbeat.deployments.replica.drafters.back_off import BackOff
from wingbeat.kernels.disk_cache import compiler_env

logger = logging.getLogger(__name__)
MODULE = "wingbeat.deployments.learning.learner_process"
LOCK = "learner.lock"
LOOK_S = 5.0
"""Seconds between two attempts to get the lock. The lock becomes free when the replica that ran the learner is gone."""
CORES_BUSY = 2.0
"""Default of the load average per core at which the learner pauses."""


class LearnerHost:
    """Starts the learner's process, and restarts it when it has ended."""

    def __init__(self, config: AppConfig) -> None:
        self._config, self._ledger = config, ledger_of(config)
        self._child: ChildProcess | None = None

    @property
    def pid(self) -> int:
        """Process id of the learner; 0 if another replica runs it or no learner runs."""
        return 0 if self._child is None else self._child.pid

    async def run(self) -> None:
        """Keep the learner running for ever; cancelling the task ends the learner's process."""
        while True:
            try:
                with self._ledger.turn(LOCK) as is_own:
                    if is_own:
                        await self._keep()
            except OSError as error:  # for example a full disk, or no memory for a process
                logger.error("the learner cannot be started: %s", error)
            await asyncio.sleep(LOOK_S)

    async def _keep(self) -> None:
        back_off = BackOff(1.0)
        while True:
            await asyncio.sleep(back_off.next_pause())
            began = time.monotonic()
            try:
                self._child = self._start()
                code = await self._child.wait()
            finally:
                if self._child is not None:
                    self._child.kill()
                    self._child = None
            logger.error("the learner's process has ended (%d); another one takes over", code)
            back_off.lasted(time.monotonic() - began)

    def _start(self) -> ChildProcess:
        options, config = self._config.learn, self._config
        settings = {
            "root": str(learning_root(config)),
            "verifier": str(config.model_dir()),
            "verifier_name": config.model_name(),
            "configured_head": str(config.choice().source),
            "max_bytes": options.max_bytes,
            "expire_s": options.expire_s,
            "core_share": options.core_share,
            "max_load": options.max_load or CORES_BUSY * len(os.sched_getaffinity(0)),
            "margin": options.margin,
        }
        return start_learner(settings)


def start_learner(settings: dict) -> ChildProcess:
    """Start a learner's process with the fields of `LearnerSettings`."""
    read, write = os.pipe()
    try:
        # The write does not block until the child reads, because the settings are shorter than a pipe's 64 KiB.
        os.write(write, json.dumps(settings).encode())
        os.close(write)
        env = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **compiler_env()}
        return ChildProcess(MODULE, [read], env)
    finally:
        os.close(read)
