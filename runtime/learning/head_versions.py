"""Versions of a draft head on disk: which version is served, and the state of each version with the reason for it.

A ledger is one folder for one verifier and one configured head. The ledger's file is replaced as a whole, under a lock.
Drafters, replicas, routers and the learner therefore agree on the served version, even if any of them is killed at any
moment. Drafters poll the file; a restarted drafter starts with the served version.
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
"""Name of the learner's own folder, and of the learner's status file."""
MOST_DECISIONS = 64
"""Number of the latest decisions that are kept; the counts cover all decisions."""
MOST_TRIES = 8
"""A version is refused after this number of drafters have begun to read the version and have ended before swapping to
it.
"""
MOST_EARLIER = 2
"""Number of roll-back targets that are kept in addition to the previous version. Older targets are dropped as soon as a
drafter has swapped to the served version.
"""
MOST_UNUSED = 4
"""Number of versions that are kept although no roll-back leads to them; also the number of refused versions that are
kept. Older versions are removed.
"""


class HeadLedger:
    """Reads and writes one ledger; several processes may have an object for the same folder.

    Args:
        folder: created if missing.
        configured: folder of the head named in the settings, which is version 0.
        verifier: display name of the verifier.
    """

    def __init__(self, folder: Path, configured: Path, verifier: str) -> None:
        self.folder, self._configured, self._verifier = folder, configured, verifier
        self._by_copy = False
        """Whether the last read had to use the copy of the file. With this flag, the use of the copy is logged only
        once.
        """

    def read(self) -> Ledger:
        """Reads the ledger from its file, or from the file's copy if the file is damaged.

        If there is no file, returns a ledger that serves the configured head.

        Raises:
            LedgerError: file and copy are damaged.
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
            logger.error("%s; reading its copy", problem)
        self._by_copy = True
        return found

    def _first(self) -> Ledger:
        first = HeadVersion(number=0, folder=str(self._configured), state="configured", source="configured")
        return Ledger(verifier=self._verifier, versions=(first,))

    def repair(self, served: int = 0) -> None:
        """Begins a new ledger with the heads on disk, if neither the file nor its copy can be read.

        Args:
            served: version that drafters run. If that version is not on disk, the configured head is served.

        Raises:
            LedgerError: the ledger can be read.
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
        """Folder of a version's files; raises the errors of `Ledger.version`."""
        return self._configured if number == 0 else self.folder / HEADS / self.read().version(number).folder

    def checked_folder(self, number: int) -> Path:
        """Folder of a version; before returning, compares the files with the digest taken when the version was added.

        Raises:
            LedgerError: the files differ, or there is no such version.
        """
        folder, digest = self.folder_of(number), self.read().version(number).digest
        if digest and digest_of(folder) != digest:
            raise LedgerError(
                f"the files of version {number} of the head are damaged: their checksum differs from the ledger's"
            )
        return folder

    def add(
        self, write: Callable[[Path], object], source: Literal["learner", "operator"], reason: str, serve: bool = False
    ) -> int:
        """Adds a version, and returns its number.

        Args:
            write: fills a folder with the head's files.
            serve: whether to promote the version at once; if False, the version waits.

        Raises:
            Exception: any exception that `write` raised; the files written so far are removed.
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
                # Old versions are removed before the new version is added, so that the new version, which may still be
                # refused, does not displace an old version.
                ledger = self._pruned(self.read())
                number = max(version.number for version in ledger.versions) + 1
                name = f"{number:05d}"
                # A process that was killed before it wrote the ledger may have left a folder with this name.
                shutil.rmtree(self.folder / HEADS / name, ignore_errors=True)
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
        """Serves a version from now on. Raises the errors of `Ledger.version`, or LedgerError if the version was
        refused.

        Args:
            over: if given and not the served version, do nothing and return False.
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
        """Serves the previous version; returns the version that was rolled back, or None if `only` is not served any
        more.

        Args:
            only: if given and not the served version, do nothing.

        Raises:
            LedgerError: there is no previous version.
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
        """Records that a drafter begins to read a version.

        If `MOST_TRIES` drafters ended after they began to read the version, marks the version as refused and returns
        False.
        """
        with self._locked():
            ledger = self.read()
            version = ledger.version(number)
            if not number or version.taken:
                return True
            if version.tries < MOST_TRIES:
                self._write(ledger.updated(number, tries=version.tries + 1))
                return True
        self.refuse(number, f"{MOST_TRIES} drafters began to read it, and none of them finished")
        return False

    def took(self, number: int) -> None:
        """Records that a drafter has swapped its head to a version."""
        with self._locked():
            ledger = self.read()
            if number and not ledger.version(number).taken:
                self._write(self._pruned(ledger.updated(number, taken=True)))

    def refuse(self, number: int, reason: str) -> None:
        """Marks a version as refused, because it cannot be served. If it is the served version, the previous version is
        served again.

        Roll-backs no longer lead to the refused version, and its files are removed; its number and the reason stay in
        the ledger.
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
        """Records that a candidate was measured and will not be served.

        A candidate has no files and no version number in the ledger.
        """
        with self._locked():
            ledger = self.read()
            self._decide(ledger, ledger.served, "rejected", reason, marks=False)

    def count_test(self) -> int:
        """Records the beginning of a candidate's test; returns its number among all tests, from 1 on."""
        with self._locked():
            ledger = self.read()
            self._write(ledger.model_copy(update={"num_tests": ledger.num_tests + 1}))
            return ledger.num_tests + 1

    @contextmanager
    def turn(self, name: str = "swap.lock") -> Iterator[bool]:
        """Tries to take a lock, such as the turn to swap heads, without waiting; yields whether the lock was taken."""
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
        """Returns the ledger without versions to which no roll-back leads, and removes the files of these versions. Of
        them, the latest `MOST_UNUSED` refused versions and the latest `MOST_UNUSED` other versions are kept.
        """
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
        """Removes the folders of versions that killed processes left half written. The lock of such a folder is free,
        whereas the lock of a folder that is being written is held.
        """
        for folder in (self.folder / HEADS).glob("new.*.tmp"):
            with ExitStack() as held:
                try:
                    held.enter_context(locked(folder, 0.0))
                except (TimeoutError, OSError):  # the version is being written, or its writer has ended just now
                    continue
                shutil.rmtree(folder, ignore_errors=True)

    def _locked(self) -> AbstractContextManager[None]:
        make_private_folder(self.folder)
        return locked(self.folder / LOCK_FILE)

    def _write(self, ledger: Ledger) -> None:
        """Writes the copy first and then the file. The copy is read only if the file is damaged, and is then at least
        as new as the file.
        """
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
    """Status of the learner in a ledger's folder; None if no learner has run there."""
    try:
        return json.loads((folder / LEARNER / FIGURES_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
