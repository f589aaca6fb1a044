"""Settings that an operator can change while replicas run: `user_config` of the deployments `Router` and `Verifier`."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from wingbeat.deployments.log import LogLevel, level_at_start
from wingbeat.deployments.options.problems import first_problem
from wingbeat.deployments.parts import merged


class LiveLogOptions(BaseModel):
    """Settings that every replica, router or verifier, takes from `user_config`; absent ones return to their value at
    the start.

    Raises:
        pydantic.ValidationError: a field is unknown, of the wrong type, or outside what is allowed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    log_level: LogLevel = Field(default_factory=level_at_start)
    """Lowest level of Wingbeat's log lines in the replica's processes; in routers also of the access log."""

    @classmethod
    def of(cls, user_config: Any) -> Self:
        """Reads a `user_config`.

        Raises:
            ValueError: a field is unknown, of the wrong type or out of range; one line that names the field.
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
"""Live settings including those of the installed parts."""


class LiveOptions(PartOptions):
    """Settings that a running router takes from `user_config`; absent ones keep `AppConfig`'s value."""

    max_queued_requests: int | None = Field(None, ge=0, lt=2**31)
    """Replaces the setting `max_queued_requests`; None keeps it."""
    engine_wait_s: float | None = Field(None, ge=0, le=1e7)
    """Replaces the setting `engine_wait_s`, seconds; None keeps it."""
    speculation: bool = True
    """Whether requests without a `speculation` field are drafted for. Texts are the same either way."""
