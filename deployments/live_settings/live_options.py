"""Settings that an operator can change while replicas run: `user_config` of the deployments `Router` and `Verifier`."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from wingbeat.deployments.log import LogLevel, level_at_start
from wingbeat.deployments.options.problems import first_problem
from wingbeat.deployments.parts import merged


class LiveLogOptions(BaseModel):
    """Settings that routers and verifiers take from `user_config`. A setting that is absent from a new `user_config` is
    reset to the value that it had when the process started.

    Raises:
        pydantic.ValidationError: a field is unknown, of the wrong type, or outside what is allowed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    log_level: LogLevel = Field(default_factory=level_at_start)
    """Lowest level of Wingbeat's log lines that the replica's processes write; in routers the level also applies to the
    access log.
    """

    @classmethod
    def of(cls, user_config: Any) -> Self:
        """Reads a `user_config`.

        Raises:
            ValueError: a field is unknown, of the wrong type or out of range; the message is one line that names the
                field.
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
"""Live settings, including settings that the installed parts add."""


class LiveOptions(PartOptions):
    """Settings that a running router takes from `user_config`; a setting that is absent has its value in
    `AppConfig`.
    """

    max_queued_requests: int | None = Field(None, ge=0, lt=2**31)
    """Replaces the setting `max_queued_requests`; with None, the setting applies."""
    engine_wait_s: float | None = Field(None, ge=0, le=1e7)
    """Replaces the setting `engine_wait_s`, in seconds; with None, the setting applies."""
    speculation: bool = True
    """Whether drafts are made for requests without a field `speculation`.

    Texts are the same with and without drafts.
    """
