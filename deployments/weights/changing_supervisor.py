"""Supervisor of an engine that can be replaced by an engine with other weights."""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from wingbeat.deployments.replica.engine_supervisor import EngineSupervisor, Life


class _Change(NamedTuple):
    """A requested replacement of the engine."""

    launch: Callable[[], Life]
    done: "asyncio.Future[None]"


class ChangingSupervisor(EngineSupervisor):
    """`EngineSupervisor` with the method `change`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._change: _Change | None = None

    async def change(self, launch: Callable[[], Life]) -> None:
        """End the running engine and start an engine with `launch`; later restarts use `launch` too.

        Raises:
            EngineFailed: no further engine will start in this replica.
            Exception: the error that prevented the start; an engine with the former settings has been started instead.
        """
        if self.failure is not None:
            raise self.failure
        self._change = change = _Change(launch, asyncio.get_running_loop().create_future())
        await self._life.end()
        await change.done

    async def _took_change(self) -> bool:
        if self._change is None:
            return False
        (launch, done), self._change = self._change, None
        self._launch, before, self._started_at = launch, self._launch, None
        try:
            await self._life.end()
            self._life = self._launch()
            await self._life.start()
        except Exception as error:
            # Any exception is caught here, because the caller of `change` gets it.
            await self._life.end()
            self._launch = before
            await self._replace()
            if not done.done():
                done.set_exception(error)
            return True
        self._begin()
        if not done.done():
            done.set_result(None)
        return True

    def _give_up(self, reason: str) -> None:
        super()._give_up(reason)
        if self._change is not None and not self._change.done.done():
            self._change.done.set_exception(self.failure)
