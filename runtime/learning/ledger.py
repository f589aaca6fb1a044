"""Data model of a ledger of heads: versions, the served version, roll-back targets, and decisions."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

LONGEST_WAY = 16
"""Maximum number of versions to which roll-backs can lead."""

State = Literal["configured", "waiting", "promoted", "rejected", "rolled_back", "refused"]
"""State of a version.

`refused` means that the version's files cannot be served; `rejected` means that the version was measured and was not
better.
"""


class LedgerError(ValueError):
    """An operation on a ledger failed; the message is one line with the reason."""


class HeadVersion(BaseModel):
    """Version of the head."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    folder: str
    state: State
    reason: str = ""
    made_at: float = 0.0
    source: Literal["configured", "learner", "operator"] = "learner"
    taken: bool = False
    """Whether a drafter has swapped its head to this version."""
    tries: int = 0
    """Number of drafters that began to read the version before any drafter had swapped to it."""
    promotions: int = 0
    """Number of promotions of the version; acceptance counts restart at 0 with each promotion."""
    digest: str = ""
    """SHA-256 of the version's files; empty for the configured head."""


class Decision(BaseModel):
    """Decision about a version, with the time (seconds since 1970) and the reason."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at: float
    number: int
    what: State
    served: int
    """The version that is served after the decision."""
    reason: str


class Ledger(BaseModel):
    """Content of a ledger's file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    verifier: str
    served: int = 0
    previous: int | None = None
    """Version to which the next roll-back leads."""
    earlier: tuple[int, ...] = ()
    """Versions to which the roll-backs after the next roll-back lead. The roll-back that follows the next leads to the
    last entry.
    """
    versions: tuple[HeadVersion, ...]
    counts: dict[str, int] = {}
    """Number of decisions, by state."""
    num_tests: int = 0
    """Number of candidates that were compared with the served head so far; with each test, the next test becomes
    stricter.
    """
    decisions: tuple[Decision, ...] = ()

    def version(self, number: int) -> HeadVersion:
        """The version with this number.

        Raises:
            LedgerError: there is no such version.
        """
        for version in self.versions:
            if version.number == number:
                return version
        raise LedgerError(f"there is no version {number} of the head: there are {self._numbers()}")

    @property
    def settled(self) -> int:
        """Latest version that a drafter runs or has run, among the served version and its roll-back targets.

        A newer version may still be refused.
        """
        return next((n for n in (self.served, *reversed(self.way_back)) if n == 0 or self.version(n).taken), 0)

    @property
    def way_back(self) -> tuple[int, ...]:
        """Versions to which roll-backs lead; the last entry is the target of the next roll-back."""
        return self.earlier if self.previous is None else (*self.earlier, self.previous)

    def promoted(self, number: int) -> "Ledger":
        """Returns a ledger that serves another version and has the current version as roll-back target."""
        again = self.version(number).promotions + 1
        return self.updated(number, promotions=again)._serving(number, (*self.way_back, self.served)[-LONGEST_WAY:])

    def back(self) -> "Ledger":
        """Returns a ledger that serves the previous version and has that version's roll-back targets. The configured
        head has no roll-back targets.
        """
        *way, served = self.way_back or (0,)
        return self._serving(served, tuple(way) or ((0,) if served else ()))

    def without_way_to(self, number: int) -> "Ledger":
        """Returns a ledger in which no roll-back leads to version `number`."""
        return self._serving(self.served, tuple(each for each in self.way_back if each != number))

    def updated(self, number: int, **fields: Any) -> "Ledger":
        """Returns a ledger with changed fields of a version."""
        versions = (each.model_copy(update=fields) if each.number == number else each for each in self.versions)
        return self.model_copy(update={"versions": tuple(versions)})

    def _serving(self, number: int, way_back: tuple[int, ...]) -> "Ledger":
        *earlier, previous = way_back or (None,)
        return self.model_copy(update={"served": number, "previous": previous, "earlier": tuple(earlier)})

    def _numbers(self) -> str:
        return ", ".join(str(version.number) for version in self.versions)
