"""The drafter's own process: its actor calls, and one thread drafts."""

import logging
import os
import pickle
import signal
from multiprocessing.connection import Connection

import transformers.modeling_utils  # noqa: F401 - every head's loading imports it late; here it is imported before a fork

from wingbeat.cluster.channels.header import ChannelName
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.log import show_log
from wingbeat.deployments.replica.drafters.drafter_thread import DrafterThread
from wingbeat.deployments.replica.engine.engine_messages import portable

logger = logging.getLogger(__name__)


class DrafterCalls:
    """What the actor may call, by name.

    Args:
        core: CPU core its thread shares with the verifier's; None leaves it free.
        terms: pickled `DrafterTerms`, where they are settled already.

    Raises:
        Exception: whatever the drafter's factory raises, such as a checkpoint error that names the tensor.
    """

    def __init__(self, config: AppConfig, core: int | None, terms: bytes | None) -> None:
        logger.info("loading the drafter %s of %s", config.choice().label, config.model_name())
        self._config, self._thread = config, DrafterThread(config, core)
        if terms is not None:
            self.needs(terms)

    def needs(self, terms: bytes) -> bytes:
        """What this drafter needs of its verifier, pickled.

        Args:
            terms: pickled `DrafterTerms`.

        Raises:
            ValueError: its head cannot be read so.
        """
        return pickle.dumps(self._thread.needs(pickle.loads(terms)))

    def attach(self, name: ChannelName, incarnation: int) -> int:
        """Serve the channel `name` from now on; this process's id.

        Raises:
            ChannelError: there is no such channel, a later incarnation holds it, or this GPU cannot reach its memory.
        """
        self._thread.attach(name, incarnation)
        return os.getpid()

    def status(self) -> tuple[tuple[ChannelName, ...], float]:
        """Whom it serves, and for how many seconds its thread has not looked for a round."""
        return tuple(self._thread.channels()), self._thread.silent_s

    def rest(self) -> None:
        """Draft no more, and wait for what the device was given."""
        self._thread.rest()


def serve(connection: Connection, make: type[DrafterCalls] = DrafterCalls) -> None:
    """Load a drafter as the first message says, and answer calls until the other end is gone or SIGTERM comes.

    It then leaves its GPU with nothing under way, which clients of CUDA's multi-process service owe each other.

    A drafter that cannot be loaded answers every call with the reason.
    """
    show_log()
    # Here and below for ever: the actor closes its end when it is done, and this process ends with its fork server.
    config, core, terms = connection.recv()
    calls, problem = None, None
    signal.signal(signal.SIGTERM, _asked_to_end)
    try:
        try:
            calls = make(config, core, terms)
        except Exception as error:
            problem = portable(error)
        while True:
            name, arguments = connection.recv()
            connection.send((None, problem) if calls is None else _answer(calls, name, arguments))
    except (EOFError, _Asked):
        if calls is not None:
            calls.rest()


class _Asked(BaseException):
    """SIGTERM has come; nothing but `serve` is to catch it."""


def _asked_to_end(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise _Asked


def _answer(calls: DrafterCalls, name: str, arguments: tuple) -> tuple[object, Exception | None]:
    try:
        return getattr(calls, name)(*arguments), None
    except Exception as error:
        return None, portable(error)
