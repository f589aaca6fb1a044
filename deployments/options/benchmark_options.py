"""Settings for measurements only. Servers refuse these settings unless an environment variable permits them."""

import os
from typing import Any, ClassVar

from pydantic import Field, field_validator

from wingbeat.deployments.options.model_options import ModelOptions
from wingbeat.deployments.options.words import listed
from wingbeat.runtime.config import BENCHMARK_VARIABLE, EngineConfig, ForcedAcceptance
from wingbeat.runtime.refusals import Feature

FORCED_HEADER = "X-Wingbeat-Forced-Acceptance"
"""Response header with the forced acceptance rates. The header warns that the text is then not what the model would
generate.
"""


class BenchmarkOptions(ModelOptions):
    """Settings that force an acceptance rate, so that speed can be measured even with weights for which the verifier
    never accepts a draft.
    """

    measures: ClassVar[bool] = False
    """Whether the command is a benchmark. Other commands accept these settings only if the variable
    `BENCHMARK_VARIABLE` is set.
    """

    forced_acceptance: tuple[float, ...] | None = Field(
        None,
        description="For benchmarks: draw at random how many drafted tokens are accepted, so that the text is not the"
        " model's. A value is the probability of acceptance at each tree level, such as 0.8 or "
        "0.9,0.8,0.7; the last value applies to all deeper levels. Servers refuse this setting unless "
        f"{BENCHMARK_VARIABLE}=1 is in the environment.",
    )

    @field_validator("forced_acceptance", mode="before")
    @classmethod
    def _rates_of_text(cls, value: Any) -> Any:
        if isinstance(value, int | float):
            return (value,)
        return listed(value)

    @field_validator("forced_acceptance")
    @classmethod
    def _only_in_benchmarks(cls, value: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if value is None:
            return None
        if not cls.measures and os.environ.get(BENCHMARK_VARIABLE) != "1":
            raise ValueError(f"the text is not the model's, so this is for benchmarks only; set {BENCHMARK_VARIABLE}=1")
        ForcedAcceptance(value)
        return value

    def asked(self) -> dict[str, tuple[bool, str]]:
        """See `ModelOptions.asked`; adds two features: forced acceptance, and the absence of a drafter."""
        return super().asked() | {
            Feature.FORCED_ACCEPTANCE: (self.forced_acceptance is not None, "forced_acceptance is given"),
            Feature.NO_DRAFTER: (not self.choice().drafts, "drafter is none"),
        }

    def _engine_config(self, **given: Any) -> EngineConfig:
        forced = None if self.forced_acceptance is None else ForcedAcceptance(self.forced_acceptance)
        return super()._engine_config(forced_acceptance=forced, **given)

    def answer_marks(self) -> dict[str, str]:
        """Returns the headers added to every HTTP answer: the forced acceptance rates, if there are any."""
        rates = self.forced_acceptance
        return {} if rates is None else {FORCED_HEADER: ",".join(f"{rate:g}" for rate in rates)}

    def environment(self) -> dict[str, str]:
        """Returns the environment variables that permit forced acceptance in an engine's processes."""
        return {} if self.forced_acceptance is None else {BENCHMARK_VARIABLE: "1"}
