"""Hooks that Serve calls on a running verifier replica: the health check, and changes of settings at run time."""

import asyncio
import logging
from typing import Any

from wingbeat.deployments.log import level_at_start, set_log_level
from wingbeat.deployments.options.live_options import LiveLogOptions
from wingbeat.deployments.replica.engine_client import EngineFailed
from wingbeat.deployments.replica.engine_supervisor import EngineSupervisor

logger = logging.getLogger(__name__)

TOLD_S = 20.0
"""Maximum seconds to wait until the engine has applied a change, which it does between two rounds. Serve waits for the
replica meanwhile.
"""


class LiveReplica:
    """Base class of a replica whose engine is replaced when it dies."""

    log_level = level_at_start()
    """Log level of the replica, of its engine, and of engines that replace the engine."""
    _engines: EngineSupervisor
    _is_up = False

    def check_health(self) -> None:
        """Serve's hook: raises once engines have died too often, so that Serve replaces this replica."""
        if self._engines.failure is not None:
            raise self._engines.failure
        self._is_up = True

    async def reconfigure(self, user_config: Any) -> None:
        """Serve's hook, called at the replica's start and for each new `user_config`; see `Router.reconfigure`.

        Raises:
            ValueError: `user_config` is invalid at the start; the message is one line that names the field. Later, an
                invalid `user_config` is only logged.
        """
        try:
            self.log_level = LiveLogOptions.of(user_config).log_level
        except ValueError as error:
            if not self._is_up:
                raise
            logger.error("%s. This replica goes on as it was.", error)
            return
        set_log_level(self.log_level)
        # The error is only logged, because Serve would stop a replica that raises here, together with its requests.
        # Even if the running engine has not applied the new level, the next engine starts with it.
        try:
            async with asyncio.timeout(TOLD_S):
                client = await self._engines.ready()
                await client.call("set_log_level", self.log_level)
        except (EngineFailed, TimeoutError) as error:
            logger.warning("The engine that runs now keeps its log level: %s", error or f"no answer in {TOLD_S:g} s")
