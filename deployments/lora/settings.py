"""Settings of LoRA adapters (`lora_modules` and others)."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from wingbeat.deployments.options.panel_titles import FEATURES
from wingbeat.runtime.lora.adapter import AdapterError
from wingbeat.runtime.lora.adapter_config import read_config
from wingbeat.runtime.lora.names import name_problem
from wingbeat.runtime.lora.settings import MOST_LORAS, MOST_RANK, RANK

if TYPE_CHECKING:
    from wingbeat.deployments.app_config import AppConfig


def _by_name(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f"is not JSON: {error}") from None
    pairs = [part.strip().partition("=") for part in value.split(",")]
    bad = [name for name, sign, folder in pairs if not (name and sign and folder)]
    if bad:
        raise ValueError(f"{bad[0]!r} must read name=folder")
    names = [name for name, _, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError("two adapters have the same name")
    return {name: folder for name, _, folder in pairs}


def _named(adapters: Any) -> Any:
    for name in adapters or ():
        if (problem := name_problem(name)) is not None:
            raise ValueError(f"the name {name!r} {problem}")
    return adapters


Folders = Annotated[dict[str, Path] | None, BeforeValidator(_by_name), AfterValidator(_named)]
"""Type of the setting `lora_modules`: a mapping from each adapter's name to its folder; on the command line, a text."""
_field = partial(Field, json_schema_extra={"panel": FEATURES})
_MODULES = _field(
    None,
    description="LoRA adapters by the name that requests pass as `model`: name=folder, several separated by commas, or "
    "a JSON object.",
)
_FOLDER = _field(
    None,
    description="Folder below which operators may load adapters while the server runs (/v1/load_lora_adapter). By "
    "default the path is not served.",
)
_NUMBER = _field(
    8,
    ge=1,
    le=MOST_LORAS,
    description="Adapters that an engine holds in memory; others are read from disk when needed.",
)
SETTINGS = {
    "lora_modules": (Folders, _MODULES),
    "lora_update_dir": (Path | None, _FOLDER),
    "max_loras": (int, _NUMBER),
    "max_lora_rank": (int, _field(RANK, ge=1, le=MOST_RANK, description="Maximum rank of an adapter.")),
}
LIVE_SETTINGS = {"lora_modules": (Annotated[dict[str, str], AfterValidator(_named)], {})}
"""Live setting: adapters in addition to the adapters of the settings, as a mapping from each adapter's name to its
folder below `lora_update_dir`.
"""


def check_settings(config: "AppConfig") -> None:
    """Raise ValueError, with a message of one line, if an adapter cannot be served or a path is not a folder."""
    for name, folder in (config.lora_modules or {}).items():
        if name in config.model_names():
            raise ValueError(f"lora_modules: the name {name!r} is that of the base model")
        try:
            read_config(folder)
        except AdapterError as error:
            raise ValueError(f"lora_modules: adapter {name!r}: {error}") from None
    if config.lora_update_dir is not None and not config.lora_update_dir.is_dir():
        raise ValueError(f"lora_update_dir is {str(config.lora_update_dir)!r}: must be a directory")


def variant_names(config: "AppConfig") -> tuple[str, ...]:
    """Return the names of the adapters in `lora_modules`."""
    return tuple(config.lora_modules or ())


def engine_limits(config: "AppConfig") -> dict[str, int]:
    """Return the limits of an engine that concern adapters. If the settings do not enable adapters, there are no slots
    for adapters.
    """
    return {} if _serves_adapters(config) else {"max_loras": 0}


def text_identity(config: "AppConfig") -> str:
    """Return the phrase for `AppConfig.text_identity` that states the maximum rank of adapters.

    Empty if no adapters are served.
    """
    return f" with adapters of rank {config.max_lora_rank}" if _serves_adapters(config) else ""


def _serves_adapters(config: "AppConfig") -> bool:
    return bool(config.lora_modules) or config.lora_update_dir is not None
