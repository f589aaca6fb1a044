"""Policies by which drafting never pays, as on a machine that is busy with other work, and costs that are known."""

from wingbeat.runtime.adaptive.curves import DraftCurve, Overhead, PassCurve
from wingbeat.runtime.adaptive.policy import SpeculationPolicy, TextWorth

POLICY = "wingbeat.runtime.adaptive.measured.SpeculationPolicy"
"""Where an engine that measures its costs finds its policy's class."""


class LosingPolicy(SpeculationPolicy):
    """Plain decoding is faster than anything by far; rounds are still tried now and then."""

    def rates(self, num_reqs, num_drafting, mean_context):
        """Tokens per second, as in the base class."""
        rates = super().rates(num_reqs, num_drafting, mean_context)
        rates[0] += 1e9
        return rates


class SwitchedPolicy(SpeculationPolicy):
    """Drafting always pays, or never, as the class says at the moment."""

    wins = False

    def rates(self, num_reqs, num_drafting, mean_context):
        """Tokens per second, as in the base class."""
        rates = super().rates(num_reqs, num_drafting, mean_context)
        rates[0] *= 1e-6 if self.wins else 1e6
        return rates


def know_costs(monkeypatch, passes: PassCurve) -> None:
    """Passes take what this curve says, and drafts little."""
    drafts = DraftCurve((1, 8), (2e-4, 2e-4), (1e-4, 1e-4))
    monkeypatch.setattr("wingbeat.runtime.adaptive.measured.pass_curve", lambda *args: passes)
    monkeypatch.setattr("wingbeat.runtime.adaptive.measured.draft_curve", lambda *args: drafts)
    monkeypatch.setattr(Overhead, "observe", lambda *args: None)
    monkeypatch.setattr(TextWorth, "observe", lambda *args: None)
