"""Keeps a drafter at the version of its head that the ledger lists as served, by polling the ledger's file.

Another version is read and checked on a separate thread while the drafter drafts, and swapped in between two rounds.
The drafter's context (its KV cache and each sequence's last hidden state) was computed by the previous version and is
kept: recomputing it would cost a pass over every context. Pairs from the swap on are computed by the new version.
"""

import logging
import threading
import time
from functools import partial

from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.learning.head_versions import HeadLedger
from wingbeat.runtime.learning.ledger import LedgerError

logger = logging.getLogger(__name__)
LOOK_S = 0.5
"""Seconds between two looks at the ledger."""
TAKEN_S = 5.0
"""Seconds to wait for the running round to end and the swap to happen, while other drafters wait for their turn. An
idle engine swaps later."""


class HeadFollower:
    """Follows the ledger for one drafter.

    Args:
        ledger: shared with all drafters of the same head.
    """

    def __init__(self, ledger: HeadLedger, worker: DraftWorker) -> None:
        self._ledger, self._worker = ledger, worker
        self._offered = self._noted = worker.head_version
        """Version offered last, and version that the ledger lists as taken by this drafter."""
        self._unreadable = False

    def start(self) -> None:
        """Takes the served version and starts the thread that follows the ledger; problems with a version are logged.

        The thread ends with its process.
        """
        self._follow(first=True)
        threading.Thread(target=self._run, name="wingbeat-heads", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(LOOK_S)
            self._follow()

    def _follow(self, first: bool = False) -> None:
        """Switches to the served version, once it is this drafter's turn; the first switch does not wait for a turn."""
        try:
            if first:
                while self.look() and not self._take():
                    logger.error("the drafter starts with the previous version of its head")
            elif self._served() != self._offered:
                with self._ledger.turn() as is_own:
                    if is_own and self.look():
                        self._wait()
            self._note_taken()
        except (LedgerError, OSError) as error:  # such as a full disk; the drafter continues and tries again
            logger.error("the ledger of heads cannot be written: %s", error)

    def look(self) -> bool:
        """Reads and offers the served version if it is another one; returns whether it was offered."""
        version = self._served()
        if version == self._offered or not self._ledger.begin(version):
            return False
        try:
            began = time.monotonic()
            head = self._worker.drafter.prepare_head(str(self._ledger.checked_folder(version)))
        except Exception as error:  # any exception: the content of a file must not end a healthy drafter
            self._refuse(version, error)
            if version == 0:
                self._offered = 0
            return False
        self._worker.offer_head(version, head, partial(self._failed, version))
        self._offered = version
        logger.info("version %d of the head was read in %.1f s", version, time.monotonic() - began)
        return True

    def _refuse(self, version: int, error: Exception) -> None:
        logger.error("version %d of the head is not served: %s: %s", version, type(error).__name__, error)
        self._ledger.refuse(version, f"{type(error).__name__}: {error}")

    def _failed(self, version: int, error: Exception) -> None:
        """Refuses a version whose swap raised: the drafter may die of it and must not take it again."""
        try:
            self._refuse(version, error)
        except (LedgerError, OSError) as unwritten:
            logger.error("the ledger of heads cannot be written: %s", unwritten)

    def _take(self) -> bool:
        """Swaps now, before the first round; returns False if the swap raises, for which the version is refused."""
        try:
            return self._worker.take_offered_head()
        except Exception:
            logger.exception("version %d of the head cannot be taken", self._offered)
            return False

    def _note_taken(self) -> None:
        """Records in the ledger the version that drafts, once the swap is over.

        A version that kills its drafter is not recorded.
        """
        version = self._worker.head_version
        if version != self._noted:
            self._ledger.took(version)
            self._noted = version

    def _served(self) -> int:
        """The served version by the ledger; the current version if the ledger cannot be read, which is logged once."""
        try:
            served, self._unreadable = self._ledger.read().served, False
        except LedgerError as error:
            if not self._unreadable:
                logger.error("%s: the drafter stays at version %d of its head", error, self._offered)
            self._unreadable, served = True, self._offered
        return served

    def _wait(self) -> None:
        """Waits until the offered version drafts, for at most `TAKEN_S` seconds."""
        deadline = time.monotonic() + TAKEN_S
        while self._worker.head_version != self._offered and time.monotonic() < deadline:
            time.sleep(LOOK_S / 10)
