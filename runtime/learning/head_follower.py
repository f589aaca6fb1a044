"""Keeps a drafter at the version of its head that the ledger lists as served, by polling the ledger's file.

If the ledger lists another version, a separate thread reads and checks that version while the drafter drafts; the swap
happens between two rounds. The drafter's context (its KV cache and each sequence's last hidden state) was computed by
the previous version. That context is kept, because computing it again would need a pass over all sequences. The new
version computes the pairs after the swap.
"""

import logging
import threading
import time
from functools import partial

from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.head_swaps.head_swaps import HeadSwaps
from wingbeat.runtime.learning.head_versions import HeadLedger
from wingbeat.runtime.learning.ledger import LedgerError

logger = logging.getLogger(__name__)
LOOK_S = 0.5
"""Seconds between two reads of the ledger."""
TAKEN_S = 5.0
"""Seconds to wait for the swap, which happens when the running round ends. Other drafters wait for their turn during
that time. If the engine is idle, the wait ends without a swap, and the swap happens later.
"""


class HeadFollower:
    """Follows the ledger for one drafter.

    Args:
        ledger: ledger that all drafters of the same head share.
    """

    def __init__(self, ledger: HeadLedger, worker: DraftWorker) -> None:
        self._ledger, self.swaps = ledger, HeadSwaps.of(worker)
        self._offered = self._noted = self.swaps.version
        """Version that was last offered to the drafter; and version of the last swap that this object recorded in the
        ledger.
        """
        self._unreadable = False

    def start(self) -> None:
        """Swaps in the served version and starts the thread that follows the ledger; problems with a version are
        logged.

        The thread runs until the process ends.
        """
        self._follow(first=True)
        threading.Thread(target=self._run, name="wingbeat-heads", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(LOOK_S)
            self._follow()

    def _follow(self, first: bool = False) -> None:
        """Switches to the served version when it is this drafter's turn. The first switch does not wait for a turn."""
        try:
            if first:
                while self.look() and not self._take():
                    logger.error("the drafter starts with the previous version of its head")
            elif self._served() != self._offered:
                with self._ledger.turn() as is_own:
                    if is_own and self.look():
                        self._wait()
            self._note_taken()
        # for example, the disk is full; the drafter continues, and the next poll tries again
        except (LedgerError, OSError) as error:
            logger.error("the ledger of heads cannot be written: %s", error)

    def look(self) -> bool:
        """Reads the number of the served version. If it differs from the version offered last, offers the served
        version to the drafter. Returns whether a version was offered.
        """
        version = self._served()
        if version == self._offered or not self._ledger.begin(version):
            return False
        try:
            began = time.monotonic()
            head = self.swaps.prepare(str(self._ledger.checked_folder(version)))
        except Exception as error:  # any exception, because the content of a file must not end a healthy drafter
            self._refuse(version, error)
            if version == 0:
                self._offered = 0
            return False
        self.swaps.offer(version, head, partial(self._failed, version))
        self._offered = version
        logger.info("version %d of the head was read in %.1f s", version, time.monotonic() - began)
        return True

    def _refuse(self, version: int, error: Exception) -> None:
        logger.error("version %d of the head is not served: %s: %s", version, type(error).__name__, error)
        self._ledger.refuse(version, f"{type(error).__name__}: {error}")

    def _failed(self, version: int, error: Exception) -> None:
        """Marks a version as refused after its swap raised an error. The error may end the drafter, and the restarted
        drafter must not swap to that version again.
        """
        try:
            self._refuse(version, error)
        except (LedgerError, OSError) as unwritten:
            logger.error("the ledger of heads cannot be written: %s", unwritten)

    def _take(self) -> bool:
        """Swaps now, before the first round. If the swap raises an error, marks the version as refused and returns
        False.
        """
        try:
            return self.swaps.take()
        except Exception:
            logger.exception("version %d of the head cannot be taken", self._offered)
            return False

    def _note_taken(self) -> None:
        """Records in the ledger which version the drafter runs. This happens after the swap, so a swap that ends the
        drafter's process is not recorded.
        """
        version = self.swaps.version
        if version != self._noted:
            self._ledger.took(version)
            self._noted = version

    def _served(self) -> int:
        """Version that the ledger lists as served; the current version if the ledger cannot be read (logged once)."""
        try:
            served, self._unreadable = self._ledger.read().served, False
        except LedgerError as error:
            if not self._unreadable:
                logger.error("%s: the drafter stays at version %d of its head", error, self._offered)
            self._unreadable, served = True, self._offered
        return served

    def _wait(self) -> None:
        """Waits until the drafter has swapped to the offered version, for at most `TAKEN_S` seconds."""
        deadline = time.monotonic() + TAKEN_S
        while self.swaps.version != self._offered and time.monotonic() < deadline:
            time.sleep(LOOK_S / 10)
