"""Groups options in a command's help, as typer's panels: the most used options come first, all other options are
grouped by subject.
"""

import inspect
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel
from typer.core import TyperCommand

from wingbeat.deployments.options.panel_titles import (
    API,
    CLUSTER,
    DRAFTING,
    LIMITS,
    MEASURING,
    MEMORY,
    MODEL,
    TITLES,
)

MOST_USED = (
    *("model", "drafter", "host", "port", "api_key", "served_model_name", "max_model_len", "max_num_seqs"),
    *("dtype", "num_replicas"),
)
"""Options that are shown first, in this order, in the help of `wingbeat serve` and of other commands that have them."""

_OF_CLASS = {
    "LoadOptions": MODEL,
    "ModelFolder": MODEL,
    "ModelOptions": DRAFTING,
    "AppConfig": MEMORY,
    "BenchmarkOptions": MEASURING,
    "WaitOptions": LIMITS,
    "SurfaceOptions": API,
    "DrafterPlaceOptions": CLUSTER,
    "ScalingOptions": CLUSTER,
}
"""Panel of each class of settings; options of classes that are not listed are in the first panel."""

OF_FIELD = {
    **dict.fromkeys(("kv_cache_dtype", "kernels", "deterministic", "engine_dir", "cuda_graphs"), MODEL),
    **dict.fromkeys(("max_queued_requests", "max_ongoing_requests", "engine_wait_s", "shutdown_timeout_s"), LIMITS),
    **dict.fromkeys(("drafter_timeout_s", "drafter_back_off_s", "stream_interval_ms"), LIMITS),
    **dict.fromkeys(("num_gpus_per_verifier", "num_gpus_per_drafter", "num_cpus_per_verifier", "channel"), CLUSTER),
    **dict.fromkeys(("engine_factory", "drafter_factory", "verifier_resources"), CLUSTER),
    "served_model_name": API,
}
"""Panels of the settings that do not belong in the panel of the rest of their class; the keys are the settings' names.
"""


def panel_of(config_class: type[BaseModel]) -> Callable[[str], str | None]:
    """Returns a function from the name of a field to the title of the field's panel; None stands for the first panel.

    Args:
        config_class: class whose fields are the options.
    """

    def panel(name: str) -> str | None:
        if name in MOST_USED:
            return None
        more = config_class.model_fields[name].json_schema_extra
        if isinstance(more, dict) and "panel" in more:
            return more["panel"]
        return OF_FIELD.get(name) or _OF_CLASS.get(_owner(config_class, name))

    return panel


def _owner(config_class: type[BaseModel], name: str) -> str:
    """Returns the name of the class that declares a field."""
    return [kind for kind in config_class.__mro__ if name in inspect.get_annotations(kind)][-1].__name__


def place(option: inspect.Parameter) -> tuple[int, int]:
    """Returns the sort key of an option: the most used options come first, then the other options of the first panel,
    then the options of other panels.
    """
    title = getattr(getattr(option.annotation, "__metadata__", [None])[0], "rich_help_panel", None)
    first = MOST_USED.index(option.name) if option.name in MOST_USED else len(MOST_USED)
    return (0, first) if title is None else (1 + TITLES.index(title), 0)


class GroupedCommand(TyperCommand):
    """Command whose help has a heading for each panel."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the arguments, then the options panel by panel; panels are in the order of their first options."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            title = "Arguments" if parameter.param_type_name == "argument" else None
            title = title or getattr(parameter, "rich_help_panel", None) or "Options"
            if record is not None:
                groups.setdefault(title, []).append(record)
        for title, records in groups.items():
            if not records:
                continue
            with formatter.section(title):
                formatter.write_dl(records)
