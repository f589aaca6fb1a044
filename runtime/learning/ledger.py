"""A ledger of heads: versions, the one that is served, where a roll-back leads, and what was decided."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

LONGEST_WAY = 16
"""Versions that roll-backs lead to, at most."""

State = Literal["configured", "waiting", "promoted", "rejected", "rolled_back", "refused"]
"""refused: its files do not fit; rejected: it was measured, and not found better."""


class LedgerError(ValueError):
    """A ledger cannot do what is asked of it; one line that says why."""


class HeadVersion(BaseModel):
    """A version of the head."""

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
    promotions: int = 0
    """Times it was promoted: what is measured of it counts from the last one on."""
    digest: str = ""
    """SHA-256 of its files; empty for the configured head."""


class Decision(BaseModel):
    """A decision about a version, its time and its reason."""

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
    earlier: tuple[int, ...] = ()
    """Where further roll-backs lead, the next one last."""
    versions: tuple[HeadVersion, ...]
    counts: dict[str, int] = {}
    """Of decisions, by state."""
    num_tests: int = 0
    """Candidates that were compared with the served head so far; the next test is the stricter for it."""
    decisions: tuple[Decision, ...] = ()

    def version(self, number: int) -> HeadVersion:
        """The version of a number.

        Raises:
            LedgerError: there is none of this number.
        """
        for version in self.versions:
            if version.number == number:
                return version
        raise LedgerError(f"there is no version {number} of the head: there are {self._numbers()}")

    @property
    def settled(self) -> int:
        """The latest version on the way to the served one that a drafter has taken: a newer one may yet be refused."""
        return next((n for n in (self.served, *reversed(self.way_back)) if n == 0 or self.version(n).taken), 0)

    @property
    def way_back(self) -> tuple[int, ...]:
        """Versions that roll-backs lead to, the next one last."""
        return self.earlier if self.previous is None else (*self.earlier, self.previous)

    def promoted(self, number: int) -> "Ledger":
        """With another version served, and a way back to the one before."""
        again = self.version(number).promotions + 1
        return self.updated(number, promotions=again)._serving(number, (*self.way_back, self.served)[-LONGEST_WAY:])

    def back(self) -> "Ledger":
        """With the version before served, and the way back that it had: from the configured head there is none."""
        *way, served = self.way_back or (0,)
        return self._serving(served, tuple(way) or ((0,) if served else ()))

    def without_way_to(self, number: int) -> "Ledger":
        """No roll-back leads to a version."""
        return self._serving(self.served, tuple(each for each in self.way_back if each != number))

    def updated(self, number: int, **fields: Any) -> "Ledger":
        """With other fields of a version."""
        versions = (each.model_copy(update=fields) if each.number == number else each for each in self.versions)
        return self.model_copy(update={"versions": tuple(versions)})

    def _serving(self, number: int, way_back: tuple[int, ...]) -> "Ledger":
        *earlier, previous = way_back or (None,)
        return self.model_copy(update={"served": number, "previous": previous, "earlier": tuple(earlier)})

    def _numbers(self) -> str:
        return ", ".join(str(version.number) for version in self.versions)
