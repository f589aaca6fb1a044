"""Makes a drafter load its head again whenever its verifier's embedding or output matrix has changed."""

import logging
import os.path
import struct
import threading
import time

from torch import Tensor

from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.head_swaps.head_swaps import HeadSwaps
from wingbeat.runtime.rollouts.current_rows import STATE, Place, read_rows
from wingbeat.runtime.rollouts.head_update import LOOK_S

logger = logging.getLogger(__name__)
_TRIES = 3


class RowsFollower:
    """Makes one drafter use a verifier's current rows.

    Raises:
        OSError: the verifier's process is gone, or on another machine.
    """

    def __init__(self, place: Place, worker: DraftWorker) -> None:
        self._folder, self._swaps = os.path.dirname(place.path), HeadSwaps.of(worker)
        self._state = os.open(place.path, os.O_RDONLY)
        if self._told()[0] != place.mark:
            raise OSError(f"{place.path} is not the verifier's file: the verifier is on another machine")
        self._seen = 0

    def run(self) -> None:
        """Polls for new rows until the process ends."""
        while True:
            time.sleep(LOOK_S)
            self.look()

    def look(self) -> bool:
        """Loads the head with the current rows if these are new; returns whether the drafter will use such a head."""
        version = self._seen
        try:
            version = self._told()[1]
            if version == self._seen:
                return False
            rows, self._seen = self._rows()
            return self._swaps.renew(rows)
        # any exception is caught, because a problem with rows must not end a healthy drafter
        except Exception as error:
            self._seen = version
            logger.error("the drafter keeps older rows of the verifier: %s: %s", type(error).__name__, error)
            return False

    def _rows(self) -> tuple[dict[str, Tensor], int]:
        """Returns the current rows and their version."""
        for _ in range(_TRIES):
            _, version, file = self._told()
            rows = read_rows(f"{self._folder}/{file}")
            if self._told()[1] == version:  # the engine closes a file after it has named the next one
                return rows, version
        raise OSError(f"the rows in {self._folder} change all the time")

    def _told(self) -> tuple[bytes, int, int]:
        return STATE.unpack(os.pread(self._state, STATE.size, 0))


def follow_rows(place: Place, worker: DraftWorker) -> None:
    """Makes a drafter use a verifier's current rows, now and after each update, by a thread that ends with its process.

    If the rows cannot be reached, the drafter keeps those of the checkpoint, and the log says so.
    """
    try:
        follower = RowsFollower(place, worker)
    except (OSError, struct.error) as error:
        logger.warning("the drafter keeps the checkpoint's embedding and output matrix after updates: %s", error)
        return
    follower.look()
    threading.Thread(target=follower.run, name="wingbeat-rows", daemon=True).start()
