"""Settings of several models behind one endpoint."""

from abc import abstractmethod
from typing import Any, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from wingbeat.deployments.options.model_options import ModelOptions
from wingbeat.deployments.options.problems import first_problem
from wingbeat.deployments.options.words import object_of_json

OF_ONE_MODEL = (
    *("model", "served_model_name", "drafter", "engine_dir", "lora_modules"),
    *("lora_update_dir", "prefix_dir", "recording_dir"),
)
"""Settings that stand in an entry of `models`, never beside it."""
OF_ROUTER = (
    *("models", "api_key", "operator_key", "allowed_hosts", "allowed_origins", "unknown_fields", "access_log"),
    *("otlp_traces_endpoint", "max_body_bytes", "max_answer_bytes", "max_ongoing_requests", "shutdown_timeout_s"),
    *("num_router_replicas", "router_autoscaling_config"),
)
"""Settings that stand beside `models`, never in an entry."""
_EXAMPLE = '[{"model": "org/one"}, {"model": "org/two", "drafter": "ngram"}]'


class SeveralModels(ModelOptions):
    """The part of `AppConfig` that says which models one endpoint has.

    Raises:
        pydantic.ValidationError: an entry is wrong; names its place in the list and the field.
    """

    models: tuple[dict[str, Any], ...] | None = Field(
        None,
        description="Several models behind one endpoint, of which a request's `model` chooses one: the settings of "
        f"each, such as {_EXAMPLE}; what stands beside it is for all of them.",
    )

    @field_validator("models", mode="before")
    @classmethod
    def _models_as_json(cls, value: Any) -> Any:
        if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
            value = ",".join(value)
        value = object_of_json(value, _EXAMPLE)
        if value is None or (isinstance(value, list | tuple) and value and all(isinstance(one, dict) for one in value)):
            return value
        raise ValueError(f"must be a list of objects such as {_EXAMPLE}")

    @model_validator(mode="after")
    def _models_agree(self) -> Self:
        names = [name for one in self.served() for name in one.all_names()] if self.models is not None else []
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"models: two of them have the name {twice!r}")
        return self

    @abstractmethod
    def all_names(self) -> tuple[str, ...]:
        """What requests may give as `model`, adapters included."""

    def served(self) -> tuple[Self, ...]:
        """The settings of each model, complete; of one model, these.

        Raises:
            ValueError: a setting stands where it does not belong, or is wrong.
        """
        if self.models is None:
            return (self,)
        misplaced = next((name for name in OF_ONE_MODEL if name in self.model_fields_set), None)
        if misplaced is not None:
            raise ValueError(f"{misplaced} is given beside models: put it into the entry of its model")
        given = {name: getattr(self, name) for name in self.model_fields_set - {"models"}}
        common = {"threads": 1, **given}  # each would take what all of them have
        return tuple(self._one(index, common, entry) for index, entry in enumerate(self.models))

    def _one(self, index: int, common: dict[str, Any], entry: dict[str, Any]) -> Self:
        misplaced = next((name for name in OF_ROUTER if name in entry), None)
        if misplaced is not None:
            raise ValueError(f"models[{index}].{misplaced}: all models have the same; put it beside models")
        try:
            return type(self)(**common | entry)
        except ValidationError as error:
            place = f"models[{index}]"
            problem = first_problem(error, type(self), lambda name: f"{place}.{name}")
            raise ValueError(problem if place in problem else f"{place}: {problem}") from None

    def with_served(self, served: "tuple[Self, ...]", names: tuple[str, ...]) -> Self:
        """The same settings, of whose models `names` are as in `served`.

        Raises:
            pydantic.ValidationError: they do not go with the others.
        """
        if self.models is None:
            return served[0]
        entries = tuple(
            entry | {name: getattr(one, name) for name in names} for entry, one in zip(self.models, served, strict=True)
        )
        given = {name: getattr(self, name) for name in self.model_fields_set - {"models"}}
        return type(self)(**given, models=entries)
