"""Versions of a draft head on disk: which one is served, what became of the others, and why.

A ledger is one folder for one verifier and one configured head. Its file is replaced as a whole under a lock, so that
drafters, replicas, routers and the learner, each killed at any moment, agree on the version that is served. Drafters
follow the file: none is told anything, and one that starts anew comes back with the version that is served.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from wingbeat.kernels.replaced_file import replacing, unused_name
from wingbeat.runtime.file_lock import locked

LEDGER_FILE, LOCK_FILE, HEADS = "ledger.json", "ledger.lock", "heads"
LEARNER, FIGURES_FILE = "learner", "figures.json"
"""The learner's own folder, and what it says of itself."""
MOST_DECISIONS = 64
"""The latest of them are kept; counts go on."""
MOST_TRIES = 8
"""Drafters that may begin to read a version and end before they have taken it: then it is refused."""
LEFT_S = 24 * 3600.0
"""Since the last write to a version's temporary folder: its writer was killed, and the folder is removed."""
MOST_UNUSED = 4
"""Folders of versions that are neither served nor the one before; older ones are removed."""

State = Literal["configured", "waiting", "promoted", "rejected", "rolled_back", "refused"]
"""refused: its files do not fit; rejected: it was measured, and not found better."""


class LedgerError(ValueError):
    """What is asked of a ledger cannot be done; one line that says why."""


class HeadVersion(BaseModel):
    """One head."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    folder: str
    state: State
    reason: str = ""
    made_at: float = 0.0
    source: Literal["configured", "learner", "operator"] = "learner"
    taken: bool = False
    """Whether a drafter has swapped its head for it."""
    tries: int = 0
    """Drafters that began to read it, until one has taken it."""


class Decision(BaseModel):
    """What was decided of a version, when and why."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at: float
    number: int
    what: State
    served: int
    """The version that is served from then on."""
    reason: str


class Ledger(BaseModel):
    """The whole file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    verifier: str
    served: int = 0
    previous: int | None = None
    """Where a roll-back leads."""
    versions: tuple[HeadVersion, ...]
    counts: dict[str, int] = {}
    """Of decisions, by state."""
    num_tests: int = 0
    """Candidates that were compared with the served head so far; the next test is the stricter for it."""
    decisions: tuple[Decision, ...] = ()

    def version(self, number: int) -> HeadVersion:
        """One of them.

        Raises:
            LedgerError: there is none of this number.
        """
        for version in self.versions:
            if version.number == number:
                return version
        raise LedgerError(f"there is no version {number} of the head: there are {self._numbers()}")

    def _numbers(self) -> str:
        return ", ".join(str(version.number) for version in self.versions)


class HeadLedger:
    """Reads and writes one ledger; any number of processes may hold one of the same folder.

    Args:
        folder: made where it is not there.
        configured: folder of the head that the settings name: version 0.
        verifier: name of the verifier, for people.
    """

    def __init__(self, folder: Path, configured: Path, verifier: str, clock: Callable[[], float] = time.time) -> None:
        self.folder, self._configured, self._verifier, self._clock = folder, configured, verifier, clock

    def read(self) -> Ledger:
        """What the file says; of a folder without one, that the configured head is served.

        Raises:
            LedgerError: the file is none.
        """
        path = self.folder / LEDGER_FILE
        try:
            return Ledger.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            first = HeadVersion(number=0, folder=str(self._configured), state="configured", source="configured")
            return Ledger(verifier=self._verifier, versions=(first,))
        except (OSError, ValidationError) as error:
            raise LedgerError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error

    def folder_of(self, number: int) -> Path:
        """Of the files of a version; raises as `Ledger.version`."""
        return self._configured if number == 0 else self.folder / HEADS / self.read().version(number).folder

    def add(self, write: Callable[[Path], object], source: Literal["learner", "operator"], reason: str) -> int:
        """A version more, which waits; its number.

        Args:
            write: fills a folder with the head's files.

        Raises:
            Exception: what `write` raises; then nothing is left of it.
        """
        self._sweep()
        temporary = unused_name(self.folder / HEADS / "new")
        temporary.mkdir(parents=True)
        try:
            write(temporary)
            with self._locked():
                ledger = self.read()
                number = max(version.number for version in ledger.versions) + 1
                name = f"{number:05d}"
                shutil.rmtree(self.folder / HEADS / name, ignore_errors=True)  # of a process that was killed below
                temporary.replace(self.folder / HEADS / name)
                new = HeadVersion(
                    number=number, folder=name, state="waiting", reason=reason, made_at=self._clock(), source=source
                )
                self._write(self._pruned(ledger.model_copy(update={"versions": (*ledger.versions, new)})))
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return number

    def promote(self, number: int, reason: str) -> None:
        """Serve a version from now on; raises as `Ledger.version`."""
        with self._locked():
            ledger = self.read()
            version = ledger.version(number)
            if ledger.served == number:
                return
            if version.state == "refused":
                raise LedgerError(f"version {number} of the head was refused: {version.reason}")
            update = {"served": number, "previous": ledger.served}
            self._decide(ledger.model_copy(update=update), number, "promoted", reason)

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
            self._back(ledger, "rolled_back", reason)
            return ledger.served

    def begin(self, number: int) -> bool:
        """A drafter begins to read a version; False where as many as may have ended over it, and it is refused."""
        with self._locked():
            ledger = self.read()
            version = ledger.version(number)
            if not number or version.taken:
                return True
            if version.tries < MOST_TRIES:
                tries = version.tries + 1
                self._write(ledger.model_copy(update={"versions": _updated(ledger.versions, number, tries=tries)}))
                return True
        self.refuse(number, f"{MOST_TRIES} drafters began to read it, and none was heard of again")
        return False

    def took(self, number: int) -> None:
        """A drafter has swapped its head for a version, and drafts with it from its next round on."""
        with self._locked():
            ledger = self.read()
            if number and not ledger.version(number).taken:
                self._write(ledger.model_copy(update={"versions": _updated(ledger.versions, number, taken=True)}))

    def refuse(self, number: int, reason: str) -> None:
        """A version cannot be served; where it is to be, the one before is again."""
        with self._locked():
            ledger = self.read()
            if ledger.version(number).state == "refused" or number == 0:
                return
            if ledger.served == number:
                self._back(ledger, "refused", reason)
            else:
                self._decide(ledger, number, "refused", reason)

    def reject(self, reason: str, number: int | None = None) -> None:
        """A candidate was measured and is not served; one that never had files has no number."""
        with self._locked():
            ledger = self.read()
            told = ledger.served if number is None else number
            self._decide(ledger, told, "rejected", reason, marks=number is not None)

    def count_test(self) -> int:
        """Begin to compare a candidate with the served head; its number among all, from 1 on."""
        with self._locked():
            ledger = self.read()
            self._write(ledger.model_copy(update={"num_tests": ledger.num_tests + 1}))
            return ledger.num_tests + 1

    @contextmanager
    def turn(self, name: str = "swap.lock") -> Iterator[bool]:
        """One holder at a time, such as a drafter that swaps; whether this is it. Never waits."""
        with ExitStack() as held:
            try:
                held.enter_context(locked(self.folder / name, 0.0))
            except TimeoutError:
                yield False
                return
            yield True

    def _back(self, ledger: Ledger, what: State, reason: str) -> None:
        served = 0 if ledger.previous is None else ledger.previous
        # From the configured head there is no way back.
        update = {"served": served, "previous": 0 if served else None}
        self._decide(ledger.model_copy(update=update), ledger.served, what, reason)

    def _decide(self, ledger: Ledger, number: int, what: State, reason: str, marks: bool = True) -> None:
        decision = Decision(at=self._clock(), number=number, what=what, served=ledger.served, reason=reason)
        versions = ledger.versions
        if marks and number:
            versions = _updated(versions, number, state=what, reason=reason)
        counts = ledger.counts | {what: ledger.counts.get(what, 0) + 1}
        decisions = (*ledger.decisions, decision)[-MOST_DECISIONS:]
        self._write(ledger.model_copy(update={"versions": versions, "counts": counts, "decisions": decisions}))

    def _pruned(self, ledger: Ledger) -> Ledger:
        """Without the versions that nobody can go back to, but for the latest."""
        kept = {0, ledger.served, ledger.previous}
        others = [version.number for version in ledger.versions if version.number not in kept]
        gone = set(others[:-MOST_UNUSED])
        for version in ledger.versions:
            if version.number in gone:
                shutil.rmtree(self.folder / HEADS / version.folder, ignore_errors=True)
        return ledger.model_copy(update={"versions": tuple(v for v in ledger.versions if v.number not in gone)})

    def _sweep(self) -> None:
        """Remove what killed processes have left of versions that they were writing."""
        for folder in (self.folder / HEADS).glob("new.*.tmp"):
            with suppress(FileNotFoundError):  # its writer has ended just now
                if time.time() - folder.stat().st_mtime > LEFT_S:
                    shutil.rmtree(folder, ignore_errors=True)

    def _locked(self) -> AbstractContextManager[None]:
        return locked(self.folder / LOCK_FILE)

    def _write(self, ledger: Ledger) -> None:
        with replacing(self.folder / LEDGER_FILE) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.write(ledger.model_dump_json(indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _updated(versions: tuple[HeadVersion, ...], number: int, **fields: Any) -> tuple[HeadVersion, ...]:
    return tuple(each.model_copy(update=fields) if each.number == number else each for each in versions)


class Accepted(NamedTuple):
    """Drafts of one version that were verified, in one engine or in all."""

    rounds: int = 0
    """Sequences' rounds with a tree."""
    drafted: int = 0
    accepted: int = 0
    squares: int = 0
    """Of the accepted tokens of each round."""

    @property
    def length(self) -> float:
        """Tokens per round: the accepted ones and the next one."""
        return 1 + self.accepted / self.rounds if self.rounds else math.nan

    @property
    def error(self) -> float:
        """Standard error of `length`."""
        if self.rounds < 2:
            return math.inf
        mean = self.accepted / self.rounds
        return math.sqrt(max(self.squares / self.rounds - mean**2, 0.0) / (self.rounds - 1))

    def __add__(self, other: tuple) -> "Accepted":  # pyright: ignore[reportIncompatibleMethodOverride]
        return Accepted(*(own + others for own, others in zip(self, other, strict=True)))


def learner_figures(folder: Path) -> dict[str, Any] | None:
    """What the learner of a ledger's folder says of itself; None where none has run."""
    try:
        return json.loads((folder / LEARNER / FIGURES_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


LEAST_ROUNDS, SIGMAS = 256, 3.0
"""Of a version before it is judged, and how many standard errors below the one before it has to be."""


def fell_below(new: Accepted, old: Accepted) -> str | None:
    """Why a version is to be rolled back; None where it is not.

    It is where length_new - length_old < -3 sqrt(error_new^2 + error_old^2), each over at least 256 rounds.
    """
    if min(new.rounds, old.rounds) < LEAST_ROUNDS:
        return None
    bound = SIGMAS * math.hypot(new.error, old.error)
    if new.length - old.length >= -bound:
        return None
    return f"{new.length:.3f} tokens per round over {new.rounds} rounds, {old.length:.3f} before it (bound {bound:.3f})"
