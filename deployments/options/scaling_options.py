"""What an operator can set about the number of processes, and how it follows the load."""

import difflib
from typing import Any

from pydantic import BaseModel, Field, ValidationError, field_validator

from wingbeat.deployments.limits import MOST_PROCESSES
from wingbeat.deployments.options.model_options import ModelOptions
from wingbeat.deployments.options.words import object_of_json
from wingbeat.runtime.refusals import Feature


class ScalingOptions(ModelOptions):
    """The part of `AppConfig` that says how many pairs and routers there are."""

    num_replicas: int | None = Field(
        None, ge=1, le=MOST_PROCESSES, description="Verifier + drafter pairs; 1 where nothing is given."
    )
    autoscaling_config: dict[str, Any] | None = Field(
        None, description="Ray Serve's autoscaling config for the pairs, in place of num_replicas."
    )
    num_router_replicas: int = Field(1, ge=1, le=MOST_PROCESSES, description="HTTP router replicas.")
    router_autoscaling_config: dict[str, Any] | None = Field(
        None, description="Ray Serve's autoscaling config for the routers, in place of num_router_replicas."
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
                raise ValueError(f"{name} is {number}: at least 1, nothing would wake a router")
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
        """Verifiers that there are at the least, while there are any."""
        if self.autoscaling_config is not None:
            return max(1, self.autoscaling_config.get("min_replicas", 1))
        return self.num_replicas or 1

    def may_sleep(self) -> bool:
        """Whether there may be no pair at all while nobody asks for anything."""
        return self.autoscaling_config is not None and self.autoscaling_config.get("min_replicas", 1) == 0


def check_autoscaling(fields: dict[str, Any]) -> None:
    """Hold an object to Serve's own model of it, which passes over what it does not know.

    Raises:
        ValueError: names the field.
    """
    # Takes a second or more, and most servers have a fixed number.
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
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise ValueError(f"{name!r} is no field of it: {hint}")
