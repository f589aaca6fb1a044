"""Keeps a drafter at the version of its head that a ledger says is served: it reads the file, and nobody tells it.

Another version is read and checked by a thread of its own while the drafter drafts, and taken between two rounds. What
the drafter keeps of contexts (its KV, and each sequence's last hidden state) was made by the version before, and stays:
the pairs that follow are the new version's, and computing the others again would cost a pass over every context.
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
"""Between two looks at the ledger."""
TAKEN_S = 5.0
"""For the round that runs to end: others of the fleet wait so long for their turn. An idle engine takes it later."""


class HeadFollower:
    """Of one drafter.

    Args:
        ledger: shared with all drafters of the same head.
    """

    def __init__(self, ledger: HeadLedger, worker: DraftWorker) -> None:
        self._ledger, self._worker = ledger, worker
        self._offered = self._noted = worker.head_version
        """The version that was offered last, and the version that the ledger holds as taken by this drafter."""
        self._unreadable = False

    def start(self) -> None:
        """Take the version that is served, and follow from then on; whatever is wrong with it is logged.

        The thread ends with its process.
        """
        self._follow(first=True)
        threading.Thread(target=self._run, name="wingbeat-heads", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(LOOK_S)
            self._follow()

    def _follow(self, first: bool = False) -> None:
        """Draft with the version that is served, once it is this drafter's turn; a first one waits for nobody."""
        try:
            if first:
                while self.look() and not self._take():
                    logger.error("the drafter starts with the version before")
            elif self._served() != self._offered:
                with self._ledger.turn() as is_own:
                    if is_own and self.look():
                        self._wait()
            self._note_taken()
        except (LedgerError, OSError) as error:  # such as a full disk: the drafter goes on, and tries again
            logger.error("the ledger of heads cannot be written: %s", error)

    def look(self) -> bool:
        """Offer the version that is served where it is another one; whether that was done."""
        version = self._served()
        if version == self._offered or not self._ledger.begin(version):
            return False
        try:
            began = time.monotonic()
            head = self._worker.drafter.prepare_head(str(self._ledger.checked_folder(version)))
        except Exception as error:  # of any kind: what a file can hold must not end a drafter that is well
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
        """Refuse a version that raised when it was taken: the drafter may end by that, and must not take it again."""
        try:
            self._refuse(version, error)
        except (LedgerError, OSError) as unwritten:
            logger.error("the ledger of heads cannot be written: %s", unwritten)

    def _take(self) -> bool:
        """Swap now, before the first round; False where the swap raises, for which the version is refused."""
        try:
            return self._worker.take_offered_head()
        except Exception:
            logger.exception("version %d of the head cannot be taken", self._offered)
            return False

    def _note_taken(self) -> None:
        """Write down the version that drafts, once the swap is over: one that ends its drafter there is not taken."""
        version = self._worker.head_version
        if version != self._noted:
            self._ledger.took(version)
            self._noted = version

    def _served(self) -> int:
        """By the ledger; the version that drafts where nobody can read it, which is said once."""
        try:
            served, self._unreadable = self._ledger.read().served, False
        except LedgerError as error:
            if not self._unreadable:
                logger.error("%s: the drafter stays at version %d of its head", error, self._offered)
            self._unreadable, served = True, self._offered
        return served

    def _wait(self) -> None:
        """Until the version that was offered drafts, or for as long as others may be kept waiting."""
        deadline = time.monotonic() + TAKEN_S
        while self._worker.head_version != self._offered and time.monotonic() < deadline:
            time.sleep(LOOK_S / 10)
