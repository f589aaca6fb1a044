"""Settings for the number of replicas and for autoscaling."""

import difflib
from typing import Any

from pydantic import BaseModel, Field, ValidationError, field_validator

from wingbeat.deployments.limits import MOST_PROCESSES
from wingbeat.deployments.options.model_options import ModelOptions
from wingbeat.deployments.options.words import object_of_json
from wingbeat.runtime.refusals import Feature


class ScalingOptions(ModelOptions):
    """Settings of `AppConfig` for the number of verifier and drafter pairs and of routers."""

    num_replicas: int | None = Field(
        None,
        ge=1,
        le=MOST_PROCESSES,
        description="Number of replicas, each a verifier with its drafter. 1 if neither this nor autoscaling_config "
        "is given.",
    )
    autoscaling_config: dict[str, Any] | None = Field(
        None,
        description='Ray Serve\'s autoscaling config for the replicas as JSON, such as {"min_replicas": 1, '
        '"max_replicas": 4}, in place of num_replicas. Fields that Serve does not have are refused.',
    )
    num_router_replicas: int = Field(1, ge=1, le=MOST_PROCESSES, description="Number of HTTP router replicas.")
    router_autoscaling_config: dict[str, Any] | None = Field(
        None,
        description="Ray Serve's autoscaling config for the routers as JSON, in place of num_router_replicas. "
        "min_replicas must be at least 1, because without a router no request arrives that could start one.",
    )

    @field_validator("autoscaling_config", "router_autoscaling_config", mode="before")
    @classmethod
    def _json_by_word(cls, value: Any) -> Any:
        return object_of_json(value, '{"min_replicas": 1}')

    @field_validator("router_autoscaling_config")
    @classmethod
    def _never_down_to_zero(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in ("min_replicas", "initial_replicas"):
            number = (value or {}).get(name)
            if isinstance(number, int | float) and number < 1:
                raise ValueError(f"{name} is {number}: use at least 1, because no request could wake a router")
        return value

    @field_validator("autoscaling_config", "router_autoscaling_config")
    @classmethod
    def _as_serve_reads_it(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None:
            check_autoscaling(value)
        return value

    def asked(self) -> dict[str, tuple[bool, str]]:
        return super().asked() | {
            Feature.AUTOSCALING: (self.autoscaling_config is not None, "autoscaling_config is given"),
            Feature.NUM_REPLICAS: (self.num_replicas is not None, f"num_replicas is {self.num_replicas}"),
            Feature.SLEEP: (self.may_sleep(), "min_replicas is 0"),
        }

    def min_pairs(self) -> int:
        """Returns the minimum number of verifiers while there are requests. The number is at least 1, even if
        autoscaling may remove all verifiers while there are no requests.
        """
        if self.autoscaling_config is not None:
            return max(1, self.autoscaling_config.get("min_replicas", 1))
        return self.num_replicas or 1

    def may_sleep(self) -> bool:
        """Whether autoscaling may remove every pair while there are no requests (min_replicas 0)."""
        return self.autoscaling_config is not None and self.autoscaling_config.get("min_replicas", 1) == 0


def check_autoscaling(fields: dict[str, Any]) -> None:
    """Checks an autoscaling config by means of Ray Serve's own pydantic model; also refuses unknown fields, which
    Serve's model ignores.

    Raises:
        ValueError: a field is unknown or invalid; the message names the field.
    """
    # Serve's model is imported here, because the import takes a second or more and most servers have a fixed number of
    # replicas.
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    _check_names(fields, AutoscalingConfig)
    policy = fields.get("policy")
    if isinstance(policy, dict):
        _check_names(policy, AutoscalingPolicy)
    try:
        AutoscalingConfig(**fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place}: {first['msg']}" if place else first["msg"]) from None
    for name in ("min_replicas", "initial_replicas", "max_replicas"):
        number = fields.get(name)
        if isinstance(number, bool) or (isinstance(number, int) and number > MOST_PROCESSES):
            raise ValueError(f"{name} is {number}: use a whole number, at most {MOST_PROCESSES}")


def _check_names(fields: dict[str, Any], model: type[BaseModel]) -> None:
    known = [name for name in model.model_fields if not name.startswith("_")]
    for name in fields:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"its fields are {', '.join(known)}"
            raise ValueError(f"{name!r} is not a field of Ray Serve's: {hint}")
