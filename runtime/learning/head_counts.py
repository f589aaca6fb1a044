"""What all engines of a ledger have counted of its versions, on disk: an engine that starts anew begins at 0."""

import json
from pathlib import Path

from wingbeat.kernels.replaced_file import replacing
from wingbeat.runtime.file_lock import locked
from wingbeat.runtime.learning.head_versions import Accepted, Ledger

COUNTS_FILE, LOCK_FILE = "accepted.json", "accepted.lock"


class HeadCounts:
    """The counts of one ledger; any number of processes may add to them.

    Args:
        folder: of the ledger.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, more: dict[int, Accepted], ledger: Ledger, weights: str = "") -> dict[int, Accepted]:
        """By version, what is known with this; the version that was promoted last counts from its promotion on.

        Args:
            weights: of the verifier, by their digest; with others nothing is known of any version.

        Raises:
            OSError: the folder cannot be read or written, or another process holds its lock for long.
        """
        promotions = ledger.counts.get("promoted", 0)
        with locked(self._folder / LOCK_FILE):
            before, counted_by, counted = self._read()
            if counted_by != weights:
                counted = {}
            if before != promotions:
                counted.pop(ledger.served, None)
            elif not more and counted_by == weights:
                return counted
            numbers = {version.number for version in ledger.versions}
            for number, one in more.items():
                counted[number] = counted.get(number, Accepted()) + one
            counted = {number: one for number, one in counted.items() if number in numbers}
            self._write(promotions, weights, counted)
        return counted

    def _read(self) -> tuple[int, str, dict[int, Accepted]]:
        """What was counted up to so many promotions by which weights; a file that is none counts for nothing."""
        try:
            found = json.loads((self._folder / COUNTS_FILE).read_text(encoding="utf-8"))
            by_version = {int(number): Accepted(*map(int, counts)) for number, counts in found["by_version"].items()}
            return int(found["promotions"]), str(found.get("weights", "")), by_version
        except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
            return 0, "", {}

    def _write(self, promotions: int, weights: str, counted: dict[int, Accepted]) -> None:
        path = self._folder / COUNTS_FILE
        fields = {"promotions": promotions, "weights": weights, "by_version": counted}
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(fields) + "\n", encoding="utf-8")


class CountedSince:
    """What an engine has counted since it was asked last; it counts from 0 where it is another process."""

    def __init__(self) -> None:
        self._pid = 0
        self._before: dict[int, Accepted] = {}

    def take(self, pid: int, by_head: dict[int, tuple[int, ...]]) -> dict[int, Accepted]:
        """By version, those with something new alone."""
        now = {number: Accepted(*counts) for number, counts in by_head.items()}
        before = self._before if pid == self._pid else {}
        self._pid, self._before = pid, now
        return {number: new for number, one in now.items() if (new := _since(one, before.get(number))).rounds}


def _since(now: Accepted, before: Accepted | None) -> Accepted:
    """The counts may have been set back meanwhile."""
    if before is None or now.rounds < before.rounds:
        return now
    return Accepted(*(one - other for one, other in zip(now, before, strict=True)))
