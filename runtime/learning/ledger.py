"""Data model of a ledger of heads: versions, the served version, roll-back targets, and decisions."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

LONGEST_WAY = 16
"""Most versions that roll-backs can lead to."""

State = Literal["configured", "waiting", "promoted", "rejected", "rolled_back", "refused"]
"""State of a version. refused: its files cannot be served; rejected: it was measured and not found better."""


class LedgerError(ValueError):
    """A request to a ledger failed; the message is one line with the reason."""


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
    """Whether a drafter has swapped its head for this version."""
    tries: int = 0
    """Drafters that began to read the version, until one has taken it."""
    promotions: int = 0
    """Number of promotions; acceptance counts start at the last one."""
    digest: str = ""
    """SHA-256 of the version's files; empty for the configured head."""


class Decision(BaseModel):
    """Decision about a version, with its time (seconds since 1970) and reason."""

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
    """Version to which a roll-back leads."""
    earlier: tuple[int, ...] = ()
    """Versions to which further roll-backs lead, the next one last."""
    versions: tuple[HeadVersion, ...]
    counts: dict[str, int] = {}
    """Number of decisions, by state."""
    num_tests: int = 0
    """Candidates compared with the served head so far; each further test is stricter."""
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
        """Latest version among the served one and its roll-back targets that a drafter has taken.

        A newer one may yet be refused.
        """
        return next((n for n in (self.served, *reversed(self.way_back)) if n == 0 or self.version(n).taken), 0)

    @property
    def way_back(self) -> tuple[int, ...]:
        """Versions to which roll-backs lead, the next one last."""
        return self.earlier if self.previous is None else (*self.earlier, self.previous)

    def promoted(self, number: int) -> "Ledger":
        """Ledger that serves another version, with the current one as roll-back target."""
        again = self.version(number).promotions + 1
        return self.updated(number, promotions=again)._serving(number, (*self.way_back, self.served)[-LONGEST_WAY:])

    def back(self) -> "Ledger":
        """Ledger that serves the previous version and keeps its roll-back targets; the configured head has none."""
        *way, served = self.way_back or (0,)
        return self._serving(served, tuple(way) or ((0,) if served else ()))

    def without_way_to(self, number: int) -> "Ledger":
        """Ledger in which no roll-back leads to a version."""
        return self._serving(self.served, tuple(each for each in self.way_back if each != number))

    def updated(self, number: int, **fields: Any) -> "Ledger":
        """Ledger with changed fields of a version."""
        versions = (each.model_copy(update=fields) if each.number == number else each for each in self.versions)
        return self.model_copy(update={"versions": tuple(versions)})

    def _serving(self, number: int, way_back: tuple[int, ...]) -> "Ledger":
        *earlier, previous = way_back or (None,)
        return self.model_copy(update={"served": number, "previous": previous, "earlier": tuple(earlier)})

    def _numbers(self) -> str:
        return ", ".join(str(version.number) for version in self.versions)
