"""Hook that Serve calls on a running router: changes of settings."""

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from wingbeat.deployments.api.served_models import ServedModels
from wingbeat.deployments.live_settings.live_options import LiveOptions
from wingbeat.deployments.log import set_log_level
from wingbeat.deployments.model_front import ModelFront
from wingbeat.deployments.parts import hooks

logger = logging.getLogger(__name__)


class LiveRouter:
    """Base class of a router whose settings an operator can change."""

    _fronts: Sequence[ModelFront]
    _models: ServedModels
    _is_up: bool

    @cached_property
    def _followers(self) -> list[Any]:
        return [follower(self._fronts) for follower in hooks("follow_live")]

    async def reconfigure(self, user_config: Any) -> None:
        """Serve's hook, called after a start and for each new `user_config`: applies the live settings.

        A running replica logs an invalid `user_config` and keeps its settings, because Serve would stop a replica that
        raises and start another replica, which would raise too.

        Raises:
            ValueError: `user_config` is invalid at the start; the message is one line that names the field.
        """
        try:
            live = LiveOptions.of(user_config)
            for follower in self._followers:
                await follower.apply(live)
        except ValueError as error:
            if not self._is_up:
                raise
            logger.error("%s. This replica keeps its settings.", error)
            return
        for front in self._fronts:
            _apply_limits(front, live)
        for service in self._models:
            service.speculates = live.speculation
        set_log_level(live.log_level)


def _apply_limits(front: ModelFront, live: LiveOptions) -> None:
    """Applies the limits of admission; a setting that is absent gets its value in the front's settings again."""
    queued, wait_s = live.max_queued_requests, live.engine_wait_s
    front.pool.limit(
        front.config.max_queued_requests if queued is None else queued,
        front.config.engine_wait_s if wait_s is None else wait_s,
    )
