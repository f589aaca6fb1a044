"""Timeouts after which a process of the application counts as stuck and is replaced."""

from pydantic import Field

from wingbeat.deployments.options.model_options import ModelOptions

STUCK_AFTER_S = 30.0
SLOW_STUCK_AFTER_S = 120.0
"""Default of `engine_stuck_after_s` on GPUs and with several ranks, in seconds. The value is high, because a drafter's
first answer may take a minute while kernels are compiled, and because ranks may wait that long for each other.
"""
DRAFTER_TIMEOUTS = 3.0
"""A round may always take this multiple of the drafter's timeout. A round that waits for its drafter until the timeout
must not count as stuck.
"""


class WaitOptions(ModelOptions):
    """Settings of `AppConfig` that define when an engine or a drafter counts as stuck."""

    engine_stuck_after_s: float | None = Field(
        None,
        gt=0,
        description="Seconds that one round may take before the engine counts as stuck and is killed and replaced. "
        "If the slowest earlier round of the same size took more than a tenth of this limit, the limit is 10 times "
        "the duration of that round. By default 30 on CPUs, and 120 on GPUs or with several ranks.",
    )
    engine_start_timeout_s: float = Field(
        1800.0,
        gt=0,
        description="Seconds that an engine may take to start, with its drafter, before it is killed and started "
        "again. At the first start of a replica the timeout ends the replica.",
    )
    drafter_start_timeout_s: float = Field(
        300.0,
        gt=0,
        description="Seconds that a drafter may take to start, or to answer a call, before it is killed and replaced.",
    )

    def patience_s(self, slow: bool, drafter_timeout_s: float) -> float:
        """Returns how many seconds a single round may take before the engine counts as stuck.

        Args:
            slow: whether a round may have to wait for the compilation of kernels or for other ranks.
        """
        if self.engine_stuck_after_s is not None:
            return self.engine_stuck_after_s
        return max(SLOW_STUCK_AFTER_S if slow else STUCK_AFTER_S, DRAFTER_TIMEOUTS * drafter_timeout_s)
