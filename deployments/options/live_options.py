"""What an operator can change while routers run: the `user_config` of the deployment `Router`."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from wingbeat.deployments.options.problems import first_problem


class LiveOptions(BaseModel):
    """What is not given is as the settings say.

    Raises:
        pydantic.ValidationError: a field is unknown, of the wrong type, or outside what is allowed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    max_queued_requests: int | None = Field(None, ge=0, lt=2**31)
    """As the setting, and so the next one."""
    engine_wait_s: float | None = Field(None, ge=0, le=1e7)
    speculation: bool = True
    """Whether requests are drafted for that do not say themselves whether they are; texts are the same either way."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Of Wingbeat's own lines in routers, those of the access log too."""

    @classmethod
    def of(cls, user_config: Any) -> "LiveOptions":
        """Those of a `user_config`.

        Raises:
            ValueError: it is wrong; one line that names the field.
        """
        try:
            return cls.model_validate(user_config)
        except ValidationError as error:
            problem = first_problem(error, cls, lambda name: f"user_config.{name}")
            raise ValueError(problem if "user_config" in problem else f"user_config: {problem}") from None
