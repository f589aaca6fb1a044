"""Versions of a draft head on disk: which one is served, what became of the others, and why.

A ledger is one folder for one verifier and one configured head. Its file is replaced as a whole under a lock, so that
drafters, replicas, routers and the learner, each killed at any moment, agree on the version that is served. Drafters
follow the file: none is told anything, and one that starts anew comes back with the version that is served.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from wingbeat.kernels.replaced_file import replacing, unused_name
from wingbeat.runtime.file_lock import locked
from wingbeat.runtime.learning.ledger import Decision, HeadVersion, Ledger, LedgerError, State
from wingbeat.runtime.recordings.stored_files import digest_of, make_private, make_private_folder

logger = logging.getLogger(__name__)
LEDGER_FILE, COPY_FILE, LOCK_FILE, HEADS = "ledger.json", "ledger.copy.json", "ledger.lock", "heads"
LEARNER, FIGURES_FILE = "learner", "figures.json"
"""The learner's own folder, and what it says of itself."""
MOST_DECISIONS = 64
"""The latest of them are kept; counts go on."""
MOST_TRIES = 8
"""Drafters that may begin to read a version and end before they have taken it: then it is refused."""
MOST_EARLIER = 2
"""Versions before the previous one that a roll-back can still lead to, once the one that is served is taken."""
MOST_UNUSED = 4
"""Versions that no roll-back leads to, and refused ones; older ones are removed."""


class HeadLedger:
    """Reads and writes one ledger; any number of processes may hold one of the same folder.

    Args:
        folder: made where it is not there.
        configured: folder of the head that the settings name: version 0.
        verifier: name of the verifier, for people.
    """

    def __init__(self, folder: Path, configured: Path, verifier: str) -> None:
        self.folder, self._configured, self._verifier = folder, configured, verifier
        self._by_copy = False
        """Whether the last look was at the copy, which is logged once."""

    def read(self) -> Ledger:
        """The ledger in the file, or else in its copy; a folder without a file serves the configured head.

        Raises:
            LedgerError: both are damaged.
        """
        path = self.folder / LEDGER_FILE
        try:
            found = _parsed(path)
        except FileNotFoundError:
            return self._first()
        except (OSError, ValueError) as error:
            return self._copied(f"{path} cannot be read: {str(error).splitlines()[0]}")
        self._by_copy = False
        return found

    def _copied(self, problem: str) -> Ledger:
        try:
            found = _parsed(self.folder / COPY_FILE)
        except (OSError, ValueError):
            raise LedgerError(f"{problem}; `wingbeat drafter repair` begins another ledger") from None
        if not self._by_copy:
            logger.error("%s; its copy is read", problem)
        self._by_copy = True
        return found

    def _first(self) -> Ledger:
        first = HeadVersion(number=0, folder=str(self._configured), state="configured", source="configured")
        return Ledger(verifier=self._verifier, versions=(first,))

    def repair(self, served: int = 0) -> None:
        """Begin another ledger, where neither the file nor its copy can be read, with the heads that are on disk.

        Args:
            served: the version that drafters have; where it is not on disk, the configured head is served.

        Raises:
            LedgerError: there is nothing to repair.
        """
        with self._locked():
            try:
                self.read()
            except LedgerError as error:
                logger.error("%s", error)
            else:
                raise LedgerError("the ledger of heads can be read: there is nothing to repair")
            found = tuple(
                HeadVersion(
                    number=int(folder.name),
                    folder=folder.name,
                    state="waiting",
                    reason="found when the ledger was repaired",
                    made_at=folder.stat().st_mtime,
                    digest=digest_of(folder),
                )
                for folder in sorted((self.folder / HEADS).glob("*"))
                if folder.name.isdigit()
            )
            first = self._first()
            ledger = first.model_copy(update={"versions": first.versions + found})
            if served in {version.number for version in found}:
                ledger = ledger.promoted(served).updated(served, state="promoted", taken=True)
            self._write(ledger)

    def folder_of(self, number: int) -> Path:
        """Of the files of a version; raises as `Ledger.version`."""
        return self._configured if number == 0 else self.folder / HEADS / self.read().version(number).folder

    def checked_folder(self, number: int) -> Path:
        """Folder of a version whose files are those that were added.

        Raises:
            LedgerError: they are not, or there is no such version.
        """
        folder, digest = self.folder_of(number), self.read().version(number).digest
        if digest and digest_of(folder) != digest:
            raise LedgerError(f"the files of version {number} of the head are damaged: their checksum is another one")
        return folder

    def add(
        self, write: Callable[[Path], object], source: Literal["learner", "operator"], reason: str, serve: bool = False
    ) -> int:
        """A version more; its number.

        Args:
            write: fills a folder with the head's files.
            serve: promote it at once; otherwise it waits.

        Raises:
            Exception: what `write` raises; then nothing is left of it.
        """
        temporary = unused_name(self.folder / HEADS / "new")
        with ExitStack() as writing:
            with self._locked():
                self._sweep()
                make_private_folder(temporary)
                writing.enter_context(locked(temporary))
            writing.callback(shutil.rmtree, temporary, ignore_errors=True)
            write(temporary)
            make_private(temporary)
            digest = digest_of(temporary)
            with self._locked():
                # Before the new one is counted, which may yet be refused.
                ledger = self._pruned(self.read())
                number = max(version.number for version in ledger.versions) + 1
                name = f"{number:05d}"
                shutil.rmtree(self.folder / HEADS / name, ignore_errors=True)  # of a process that was killed below
                temporary.replace(self.folder / HEADS / name)
                new = HeadVersion(
                    number=number,
                    folder=name,
                    state="waiting",
                    reason=reason,
                    made_at=time.time(),
                    source=source,
                    digest=digest,
                )
                ledger = ledger.model_copy(update={"versions": (*ledger.versions, new)})
                if serve:
                    self._decide(ledger.promoted(number), number, "promoted", reason)
                else:
                    self._write(ledger)
        return number

    def promote(self, number: int, reason: str, over: int | None = None) -> bool:
        """Serve a version from now on; raises as `Ledger.version`.

        Args:
            over: do nothing, and return False, where another version than this one is served.
        """
        with self._locked():
            ledger = self.read()
            version = ledger.version(number)
            if over is not None and ledger.served != over:
                return False
            if version.state == "refused":
                raise LedgerError(f"version {number} of the head was refused: {version.reason}")
            if ledger.served != number:
                self._decide(ledger.promoted(number), number, "promoted", reason)
        return True

    def roll_back(self, reason: str, only: int | None = None) -> int | None:
        """Serve the version before; the version that was rolled back, None where `only` is served no more.

        Args:
            only: do nothing where another version than this one is served.

        Raises:
            LedgerError: there is no version before.
        """
        with self._locked():
            ledger = self.read()
            if only is not None and ledger.served != only:
                return None
            if ledger.previous is None:
                raise LedgerError("there is no version before the one that is served")
            self._decide(ledger.back(), ledger.served, "rolled_back", reason)
            return ledger.served

    def begin(self, number: int) -> bool:
        """A drafter begins to read a version; False where as many as may have ended over it, and it is refused."""
        with self._locked():
            ledger = self.read()
            version = ledger.version(number)
            if not number or version.taken:
                return True
            if version.tries < MOST_TRIES:
                self._write(ledger.updated(number, tries=version.tries + 1))
                return True
        self.refuse(number, f"{MOST_TRIES} drafters began to read it, and none was heard of again")
        return False

    def took(self, number: int) -> None:
        """A drafter has swapped its head for a version, and drafts with it from its next round on."""
        with self._locked():
            ledger = self.read()
            if number and not ledger.version(number).taken:
                self._write(self._pruned(ledger.updated(number, taken=True)))

    def refuse(self, number: int, reason: str) -> None:
        """A version cannot be served: where it is to be, the one before is again, as if it had never been promoted.

        Its files are removed; its number and the reason stay, to be shown.
        """
        with self._locked():
            ledger = self.read()
            version = ledger.version(number)
            if version.state == "refused" or number == 0:
                return
            ledger = ledger.back() if ledger.served == number else ledger
            self._decide(ledger.without_way_to(number), number, "refused", reason)
            shutil.rmtree(self.folder / HEADS / version.folder, ignore_errors=True)

    def reject(self, reason: str) -> None:
        """A candidate was measured and is not served; it never had files, and has no number."""
        with self._locked():
            ledger = self.read()
            self._decide(ledger, ledger.served, "rejected", reason, marks=False)

    def count_test(self) -> int:
        """Begin to compare a candidate with the served head; its number among all, from 1 on."""
        with self._locked():
            ledger = self.read()
            self._write(ledger.model_copy(update={"num_tests": ledger.num_tests + 1}))
            return ledger.num_tests + 1

    @contextmanager
    def turn(self, name: str = "swap.lock") -> Iterator[bool]:
        """One holder at a time, such as a drafter that swaps; whether this is it. Never waits."""
        make_private_folder(self.folder)
        with ExitStack() as held:
            try:
                held.enter_context(locked(self.folder / name, 0.0))
            except TimeoutError:
                yield False
                return
            yield True

    def _decide(self, ledger: Ledger, number: int, what: State, reason: str, marks: bool = True) -> None:
        decision = Decision(at=time.time(), number=number, what=what, served=ledger.served, reason=reason)
        if marks and number:
            ledger = ledger.updated(number, state=what, reason=reason)
        counts = ledger.counts | {what: ledger.counts.get(what, 0) + 1}
        decisions = (*ledger.decisions, decision)[-MOST_DECISIONS:]
        self._write(ledger.model_copy(update={"counts": counts, "decisions": decisions}))

    def _pruned(self, ledger: Ledger) -> Ledger:
        """Without the versions that nobody can go back to, but for the latest."""
        if ledger.settled == ledger.served:
            ledger = ledger.model_copy(update={"earlier": ledger.earlier[-MOST_EARLIER:]})
        kept, gone = {0, ledger.served, *ledger.way_back}, set[int]()
        for refused in (False, True):
            others = [v for v in ledger.versions if v.number not in kept and (v.state == "refused") == refused]
            gone |= {version.number for version in others[:-MOST_UNUSED]}
        for version in ledger.versions:
            if version.number in gone:
                shutil.rmtree(self.folder / HEADS / version.folder, ignore_errors=True)
        return ledger.model_copy(update={"versions": tuple(v for v in ledger.versions if v.number not in gone)})

    def _sweep(self) -> None:
        """Remove what killed processes have left of versions that they were writing: their locks are free."""
        for folder in (self.folder / HEADS).glob("new.*.tmp"):
            with ExitStack() as held:
                try:
                    held.enter_context(locked(folder, 0.0))
                except (TimeoutError, OSError):  # it is being written, or its writer has ended just now
                    continue
                shutil.rmtree(folder, ignore_errors=True)

    def _locked(self) -> AbstractContextManager[None]:
        make_private_folder(self.folder)
        return locked(self.folder / LOCK_FILE)

    def _write(self, ledger: Ledger) -> None:
        """The copy first: it counts only where the file is damaged."""
        text = ledger.model_dump_json(indent=1) + "\n"
        for name in (COPY_FILE, LEDGER_FILE):
            with replacing(self.folder / name) as temporary:
                temporary.touch(0o600)
                with temporary.open("w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())


def _parsed(path: Path) -> Ledger:
    return Ledger.model_validate_json(path.read_text(encoding="utf-8"))


def learner_figures(folder: Path) -> dict[str, Any] | None:
    """What the learner of a ledger's folder says of itself; None where none has run."""
    try:
        return json.loads((folder / LEARNER / FIGURES_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
