"""Breakdown of round times: an engine's phase times between two snapshots, per round."""

from typing import Any, NamedTuple

from report import Table

DRAFT = "draft_wait_s"
MODEL_PHASES = frozenset({DRAFT, "verify_s", "forward_s"})
"""Phases dominated by a model's arithmetic; the hop to the drafter and back is subtracted."""
LABELS = {
    DRAFT: "draft, as far as the verifier waits",
    "verify_s": "verify and accept",
    "forward_s": "verify",
    "accept_s": "accept",
    "publish_s": "publish",
    "schedule_s": "host: schedule",
    "update_s": "host: update",
}


class RoundTimes(NamedTuple):
    """Milliseconds per round."""

    num_rounds: int
    phases_ms: dict[str, float]
    """Milliseconds by the engine's phase names; the hop is subtracted from the wait for the drafter."""
    hop_ms: float
    outside_ms: float
    """Time between rounds: delivery, new requests, and other delays before the engine's next round."""

    @property
    def round_ms(self) -> float:
        """Milliseconds of a round, without the time between rounds."""
        return sum(self.phases_ms.values()) + self.hop_ms

    @property
    def share_not_model(self) -> float:
        """Share of the round that is not drafting or verifying."""
        model = sum(ms for name, ms in self.phases_ms.items() if name in MODEL_PHASES)
        return 1.0 - model / self.round_ms if self.round_ms else 0.0


def between(before: dict[str, Any], after: dict[str, Any], elapsed_s: float, hop_s: float) -> RoundTimes:
    """Times of the rounds between two snapshots of an engine's `phases`.

    Args:
        elapsed_s: time between the snapshots, during which the engine always had work.
        hop_s: duration of an empty round trip to the drafter.
    """
    num_rounds = after["num_rounds"] - before["num_rounds"]
    names = [name for name in after if name.endswith("_s")]
    per_round = {name: (after[name] - before[name]) / max(1, num_rounds) for name in names}
    inside_s = sum(per_round.values())
    hop_s = min(hop_s, per_round.get(DRAFT, 0.0))
    if DRAFT in per_round:
        per_round[DRAFT] -= hop_s
    outside_s = max(0.0, elapsed_s / max(1, num_rounds) - inside_s)
    return RoundTimes(num_rounds, {name: 1e3 * s for name, s in per_round.items()}, 1e3 * hop_s, 1e3 * outside_s)


def round_table(columns: dict[str, RoundTimes], title: str) -> Table:
    """Table with one column per measurement and one row per phase."""
    times = list(columns.values())
    rows = [("rounds", *(str(one.num_rounds) for one in times))]
    for name in times[0].phases_ms:
        label = LABELS.get(name, name.removesuffix("_s"))
        if name == "verify_s" and "accept_s" in times[0].phases_ms:
            label = LABELS["forward_s"]
        rows.append((label, *(f"{one.phases_ms[name]:.3f}" for one in times)))
    rows.append(("hop to the drafter and back", *(f"{one.hop_ms:.3f}" for one in times)))
    rows.append(("a round", *(f"{one.round_ms:.3f}" for one in times)))
    rows.append(("between rounds", *(f"{one.outside_ms:.3f}" for one in times)))
    rows.append(("share of a round that is not model work", *(f"{one.share_not_model:.1%}" for one in times)))
    return Table(title, ("ms per round", *columns), rows)
