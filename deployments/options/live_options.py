"""What an operator can change while replicas run: the `user_config` of the deployments `Router` and `Verifier`."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from wingbeat.deployments.log import LogLevel, level_at_start
from wingbeat.deployments.options.problems import first_problem
from wingbeat.deployments.parts import merged


class LiveLogOptions(BaseModel):
    """Of a `Verifier`, and of every replica. What is not given is as at the start.

    Raises:
        pydantic.ValidationError: a field is unknown, of the wrong type, or outside what is allowed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    log_level: LogLevel = Field(default_factory=level_at_start)
    """Of Wingbeat's own lines in the replica's processes; in routers those of the access log too."""

    @classmethod
    def of(cls, user_config: Any) -> Self:
        """Those of a `user_config`.

        Raises:
            ValueError: it is wrong; one line that names the field.
        """
        try:
            return cls.model_validate(user_config)
        except ValidationError as error:
            problem = first_problem(error, cls, lambda name: f"user_config.{name}")
            raise ValueError(problem if "user_config" in problem else f"user_config: {problem}") from None


PartOptions = create_model(
    "PartOptions",
    __base__=LiveLogOptions,
    **merged("live_settings"),
)
"""Options of the parts that are there."""


class LiveOptions(PartOptions):
    """Of a `Router`. What is not given is as the settings say."""

    max_queued_requests: int | None = Field(None, ge=0, lt=2**31)
    """As the setting, and so the next one."""
    engine_wait_s: float | None = Field(None, ge=0, le=1e7)
    speculation: bool = True
    """Whether requests are drafted for that do not say themselves whether they are; texts are the same either way."""
