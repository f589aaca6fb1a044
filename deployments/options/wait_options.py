"""Settings of how long one process of an application waits for another, before it is ended and replaced."""

from pydantic import Field

from wingbeat.deployments.options.model_options import ModelOptions

STUCK_AFTER_S = 30.0
SLOW_STUCK_AFTER_S = 120.0
"""On GPUs, where a drafter's first answer may take a minute, and where ranks wait as long for each other."""
DRAFTER_TIMEOUTS = 3.0
"""A round waits for its drafter once, and no engine is stuck that does."""


class WaitOptions(ModelOptions):
    """The part of `AppConfig` that says when an engine or a drafter counts as stuck."""

    engine_stuck_after_s: float | None = Field(
        None,
        gt=0,
        description="Seconds in one round, without an end, after which an engine is killed and replaced; more where "
        "rounds of that size take over a tenth of them. None is 30 on CPUs, and 120 on GPUs or with several ranks.",
    )
    engine_start_timeout_s: float = Field(
        1800.0, gt=0, description="What an engine may take to start before it is killed and tried again."
    )
    drafter_start_timeout_s: float = Field(
        300.0, gt=0, description="What a drafter may take to start, or to answer, before it is killed and replaced."
    )

    def patience_s(self, slow: bool, drafter_timeout_s: float) -> float:
        """What any round may take.

        Args:
            slow: whether rounds may wait for a device's compiler, or for other ranks.
        """
        if self.engine_stuck_after_s is not None:
            return self.engine_stuck_after_s
        return max(SLOW_STUCK_AFTER_S if slow else STUCK_AFTER_S, DRAFTER_TIMEOUTS * drafter_timeout_s)
