"""The setting `models`: several models behind one endpoint."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from wingbeat.deployments.options.panel_titles import MODEL
from wingbeat.deployments.options.problems import first_problem
from wingbeat.deployments.options.words import object_of_json

if TYPE_CHECKING:
    from wingbeat.deployments.app_config import AppConfig

OF_ONE_MODEL = (
    *("model", "served_model_name", "drafter", "engine_dir", "lora_modules"),
    *("lora_update_dir", "prefix_dir", "recording_dir"),
)
"""Settings of a single model, which may be given only in an entry of `models`."""
OF_ROUTER = (
    *("models", "api_key", "operator_key", "allowed_hosts", "allowed_origins", "unknown_fields", "access_log"),
    *("otlp_traces_endpoint", "max_body_bytes", "max_answer_bytes", "max_ongoing_requests", "shutdown_timeout_s"),
    *("num_router_replicas", "router_autoscaling_config"),
)
"""Settings of all models, which may be given only outside of `models`."""
_EXAMPLE = '[{"model": "org/one"}, {"model": "org/two", "drafter": "ngram"}]'


def _from_command_line(value: Any) -> Any:
    if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        value = ",".join(value)
    value = object_of_json(value, _EXAMPLE)
    if value is None or (isinstance(value, list | tuple) and value and all(isinstance(one, dict) for one in value)):
        return value
    raise ValueError(f"must be a list of objects such as {_EXAMPLE}")


Models = Annotated[tuple[dict[str, Any], ...] | None, BeforeValidator(_from_command_line)]
"""Type of the setting `models`: a list with the settings of each model; on the command line, JSON of the list."""
_DESCRIPTION = (
    "Several models behind one endpoint; a request's `model` chooses one. A list of the settings of each model, such "
    f"as {_EXAMPLE}; settings given beside it apply to all models."
)
SETTINGS = {"models": (Models, Field(None, description=_DESCRIPTION, json_schema_extra={"panel": MODEL}))}


def check_settings(config: "AppConfig") -> None:
    """Raise ValueError if an entry is wrong; the message names the entry's index in the list and the field."""
    names = [name for one in config.served() for name in one.all_names()] if config.models is not None else []
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"models: two models have the name {twice!r}; give one of them another served_model_name")


def served(config: "AppConfig") -> "tuple[AppConfig, ...] | None":
    """Return the complete settings of each model; None if the setting `models` is not given.

    Raises:
        ValueError: a setting is wrong, or in the wrong place.
    """
    if config.models is None:
        return None
    misplaced = next((name for name in OF_ONE_MODEL if name in config.model_fields_set), None)
    if misplaced is not None:
        raise ValueError(f"{misplaced} is given beside models: put it into the entry of its model")
    common = {"threads": 1, **_beside(config)}  # by default, each model would use all CPU threads
    return tuple(_one(config, index, common, entry) for index, entry in enumerate(config.models))


def _beside(config: "AppConfig") -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.model_fields_set - {"models"}}


def _one(config: "AppConfig", index: int, common: dict[str, Any], entry: dict[str, Any]) -> "AppConfig":
    misplaced = next((name for name in OF_ROUTER if name in entry), None)
    if misplaced is not None:
        raise ValueError(f"models[{index}].{misplaced}: all models share it; put it beside models")
    try:
        return type(config)(**common | entry)
    except ValidationError as error:
        place = f"models[{index}]"
        problem = first_problem(error, type(config), lambda name: f"{place}.{name}")
        raise ValueError(problem if place in problem else f"{place}: {problem}") from None


def with_served(config: "AppConfig", served: "tuple[AppConfig, ...]", names: tuple[str, ...]) -> "AppConfig":
    """Return the settings of several models; in each model's entry, the fields `names` are set to their values in
    `served`.
    """
    entries = tuple(
        entry | {name: getattr(one, name) for name in names} for entry, one in zip(config.models, served, strict=True)
    )
    return type(config)(**_beside(config), models=entries)
