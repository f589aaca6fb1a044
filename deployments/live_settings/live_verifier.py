"""Hook that Serve calls on a running verifier replica: changes of settings."""

import asyncio
import logging
from typing import Any

from wingbeat.deployments.live_settings.live_options import LiveLogOptions
from wingbeat.deployments.log import set_log_level
from wingbeat.deployments.replica.engine_client import EngineFailed
from wingbeat.deployments.replica.engine_supervisor import EngineSupervisor

logger = logging.getLogger(__name__)

TOLD_S = 20.0
"""Maximum seconds to wait until the engine has applied a change, which it does between two rounds. Serve waits for the
replica meanwhile.
"""


class LiveVerifier:
    """Base class of a verifier whose log level an operator can change."""

    log_level: str
    _engines: EngineSupervisor
    _is_up: bool

    async def reconfigure(self, user_config: Any) -> None:
        """Serve's hook, called at the replica's start and for each new `user_config`; see `LiveRouter.reconfigure`.

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
