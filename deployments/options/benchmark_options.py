"""Settings that are for measuring alone, and refused elsewhere."""

import os
from typing import Any, ClassVar

from pydantic import Field, field_validator

from wingbeat.deployments.options.model_options import ModelOptions
from wingbeat.deployments.options.words import listed
from wingbeat.runtime.config import BENCHMARK_VARIABLE, EngineConfig, ForcedAcceptance
from wingbeat.runtime.refusals import Feature

FORCED_HEADER = "X-Wingbeat-Forced-Acceptance"
"""Of every answer of a server whose text is not the model's: the rates."""


class BenchmarkOptions(ModelOptions):
    """The part of a command's settings by which speed is measured with weights that agree on nothing."""

    measures: ClassVar[bool] = False
    """Whether the command is a benchmark: others need the variable."""

    forced_acceptance: tuple[float, ...] | None = Field(
        None,
        description="For benchmarks: draw how much of a draft is accepted, so that the text is not the model's: the "
        "probability of each level, such as 0.8 or 0.9,0.8,0.7, whose last one holds for all deeper ones. Refused "
        f"by servers unless the environment has {BENCHMARK_VARIABLE}=1.",
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
            raise ValueError(f"its text is not the model's, so it is for benchmarks only; set {BENCHMARK_VARIABLE}=1")
        ForcedAcceptance(value)
        return value

    def asked(self) -> dict[str, tuple[bool, str]]:
        """As for every model, with what is drawn."""
        return super().asked() | {
            Feature.FORCED_ACCEPTANCE: (self.forced_acceptance is not None, "forced_acceptance is given"),
            Feature.NO_DRAFTER: (not self.choice().drafts, "drafter is none"),
        }

    def _engine_config(self, **given: Any) -> EngineConfig:
        forced = None if self.forced_acceptance is None else ForcedAcceptance(self.forced_acceptance)
        return super()._engine_config(forced_acceptance=forced, **given)

    def answer_marks(self) -> dict[str, str]:
        """Headers of every HTTP answer."""
        rates = self.forced_acceptance
        return {} if rates is None else {FORCED_HEADER: ",".join(f"{rate:g}" for rate in rates)}

    def environment(self) -> dict[str, str]:
        """What processes of an engine must find in their environment, so as to let it draw."""
        return {} if self.forced_acceptance is None else {BENCHMARK_VARIABLE: "1"}
