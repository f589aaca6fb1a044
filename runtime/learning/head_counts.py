"""Acceptance counts of head versions on disk, summed over all engines of a ledger. An engine's own counts restart at 0
with its process.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

from wingbeat.kernels.replaced_file import replacing
from wingbeat.runtime.file_lock import locked
from wingbeat.runtime.learning.ledger import Ledger
from wingbeat.runtime.recordings.stored_files import make_private_folder

COUNTS_FILE, LOCK_FILE = "accepted.json", "accepted.lock"


class Accepted(NamedTuple):
    """Counts of the verified drafts of one head version, in one engine or in all engines."""

    rounds: int = 0
    """Number of verified trees, counted per sequence."""
    drafted: int = 0
    accepted: int = 0
    squares: int = 0
    """Sum, over all rounds, of the square of the number of accepted tokens."""

    @property
    def length(self) -> float:
        """Acceptance length: mean tokens per round, the bonus token included."""
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


LEAST_ROUNDS, SIGMAS = 256, 3.0
"""Number of rounds that a version needs before its acceptance is compared; and the number of standard errors by which
its acceptance length must be below that of the previous version for a roll-back.
"""


def fell_below(new: Accepted, old: Accepted) -> str | None:
    """Reason for rolling a version back; None if there is no reason.

    A version is rolled back if length_new - length_old < -3 sqrt(error_new^2 + error_old^2) and both versions have at
    least 256 rounds.
    """
    if min(new.rounds, old.rounds) < LEAST_ROUNDS:
        return None
    bound = SIGMAS * math.hypot(new.error, old.error)
    if new.length - old.length >= -bound:
        return None
    return f"{new.length:.3f} tokens per round over {new.rounds} rounds, {old.length:.3f} before it (bound {bound:.3f})"


class HeadCounts:
    """Counts of one ledger; any number of processes may add counts.

    Args:
        folder: folder of the ledger.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, more: dict[int, Accepted], ledger: Ledger, weights: str = "") -> dict[int, Accepted]:
        """Adds counts by version and returns the totals since each version's last promotion.

        Args:
            weights: digest of the verifier's weights; counts on disk that belong to other weights are dropped.

        Raises:
            OSError: the folder cannot be read or written, or another process holds the folder's lock for too long.
        """
        promotions = {version.number: version.promotions for version in ledger.versions}
        make_private_folder(self._folder)
        with locked(self._folder / LOCK_FILE):
            found = self._read(weights)
            counted = {number: one for number, (times, one) in found.items() if promotions.get(number) == times}
            if not more and len(counted) == len(found):
                return counted
            for number in more.keys() & promotions.keys():
                counted[number] = counted.get(number, Accepted()) + more[number]
            self._write(weights, {number: (promotions[number], one) for number, one in counted.items()})
        return counted

    def _read(self, weights: str) -> dict[int, tuple[int, Accepted]]:
        """Number of promotions and counts, by version; empty if the file is missing, invalid, or for other weights."""
        try:
            found = json.loads((self._folder / COUNTS_FILE).read_text(encoding="utf-8"))
            if found["weights"] != weights:
                return {}
            return {int(key): (int(times), Accepted(*map(int, one))) for key, (times, one) in found["versions"].items()}
        except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
            return {}

    def _write(self, weights: str, counted: dict[int, tuple[int, Accepted]]) -> None:
        with replacing(self._folder / COUNTS_FILE) as temporary:
            temporary.touch(0o600)
            temporary.write_text(json.dumps({"weights": weights, "versions": counted}) + "\n", encoding="utf-8")


class CountedSince:
    """Computes an engine's counts since the previous call. The engine's counts restart at 0 if its process is
    replaced.
    """

    def __init__(self) -> None:
        self._pid = 0
        self._before: dict[int, Accepted] = {}

    def since_last_call(self, pid: int, by_head: dict[int, tuple[int, ...]]) -> dict[int, Accepted]:
        """Counts since the previous call, by version; versions without new rounds are left out."""
        now = {number: Accepted(*counts) for number, counts in by_head.items()}
        before = self._before if pid == self._pid else {}
        self._pid, self._before = pid, now
        return {number: new for number, one in now.items() if (new := _since(one, before.get(number))).rounds}


def _since(now: Accepted, before: Accepted | None) -> Accepted:
    """Difference of two counts; `now` if the counter restarted in between."""
    if before is None or now.rounds < before.rounds:
        return now
    return Accepted(*(one - other for one, other in zip(now, before, strict=True)))
