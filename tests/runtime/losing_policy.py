"""A policy by which drafting never pays, as on a machine that is busy with other work."""

from wingbeat.runtime.speculation.policy import SpeculationPolicy

POLICY = "wingbeat.runtime.engine.measured.SpeculationPolicy"
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
