"""Code of the drafter's own process, whose main thread answers calls of the actor while another thread drafts."""

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
    """Methods that the actor calls by name.

    Args:
        core: CPU core that the drafter's thread shares with the verifier's thread; None does not pin the thread.
        terms: pickled `DrafterTerms` if the verifier has already sent them, else None.

    Raises:
        Exception: whatever the drafter's factory raises, such as a checkpoint error that names the tensor.
    """

    def __init__(self, config: AppConfig, core: int | None, terms: bytes | None) -> None:
        logger.info("loading the drafter %s of %s", config.choice().label, config.model_name())
        self._config, self._thread = config, DrafterThread(config, core)
        if terms is not None:
            self.needs(terms)

    def needs(self, terms: bytes) -> bytes:
        """Return the pickled `DrafterNeeds` of this drafter.

        Args:
            terms: pickled `DrafterTerms`.

        Raises:
            ValueError: the draft head cannot be read by the convention in `terms`.
        """
        return pickle.dumps(self._thread.needs(pickle.loads(terms)))

    def attach(self, name: ChannelName, incarnation: int) -> int:
        """Serve the channel `name` from now on; returns this process's id.

        Raises:
            ChannelError: the channel does not exist, `incarnation` is not higher than the number of the last attached
                drafter, or the GPU of this process cannot access the channel's memory.
        """
        self._thread.attach(name, incarnation)
        return os.getpid()

    def status(self) -> tuple[tuple[ChannelName, ...], float]:
        """Return the served channels, and the seconds since the drafter's thread last checked whether a round is
        pending.
        """
        return tuple(self._thread.channels()), self._thread.silent_s

    def rest(self) -> None:
        """Begin no further pass of the drafter, and wait for the device to finish its work."""
        self._thread.rest()


def serve(connection: Connection, make: type[DrafterCalls] = DrafterCalls) -> None:
    """Load a drafter according to the first message, then answer calls until the connection closes or the process gets
    SIGTERM.

    The function returns only after the GPU has finished all work, because clients of CUDA's multi-process service must
    not exit while their kernels run. If the drafter cannot be loaded, every call is answered with the reason.
    """
    show_log()
    # `recv` needs no timeout, because the actor closes its end of the connection when it is done, and because this
    # process is ended if its fork server ends.
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
    """Raised when the process gets SIGTERM. The class derives from BaseException, so that handlers of Exception do not
    catch it.
    """


def _asked_to_end(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise _Asked


def _answer(calls: DrafterCalls, name: str, arguments: tuple) -> tuple[object, Exception | None]:
    try:
        return getattr(calls, name)(*arguments), None
    except Exception as error:
        return None, portable(error)
