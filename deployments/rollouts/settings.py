"""Settings of a server whose weights change while it runs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from wingbeat.deployments.options.panel_titles import LEARNING
from wingbeat.runtime.refusals import Feature, Refusal

if TYPE_CHECKING:
    from wingbeat.deployments.app_config import AppConfig

ROLLOUTS = "`rollouts`"
PREFIX_DIR = "`prefix_dir`"
"""Name of a feature that conflicts with rollouts and that another optional part defines."""
_OLD = "stored data would belong to weights that change"
REFUSED = (
    Refusal(ROLLOUTS, Feature.ENGINE_DIR, "its engines hold the weights that they were built with"),
    Refusal(ROLLOUTS, Feature.OWN_ENGINE, "a user's engine manages its own weights"),
    Refusal(ROLLOUTS, PREFIX_DIR, _OLD),
)


class WeightTransfer(BaseModel):
    """vLLM's `weight_transfer_config`."""

    model_config = ConfigDict(extra="forbid")

    backend: Literal["gloo", "nccl", "disk", "ray"] = Field(
        "ray",
        description="How trainers send weights: with 'gloo' and 'nccl' they broadcast tensors in a process group; "
        "with 'disk' they name files; with 'ray' they pass object references over a Serve handle. Files and "
        "references work with every backend.",
    )


def _from_text(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None


_PANEL = {"panel": LEARNING}
SETTINGS = {
    "rollouts": (
        bool,
        Field(
            False,
            description="Serve /pause, /sleep, /update_weights and related paths, for operators who sample from a "
            "policy that is being trained.",
            json_schema_extra=_PANEL,
        ),
    ),
    "rollouts_journal": (
        bool,
        Field(
            False,
            description="Keep overwritten weights in host memory until an update is finished; if the update is not "
            "finished, the engine restores the old weights. Needs rollouts.",
            json_schema_extra=_PANEL,
        ),
    ),
    "rollouts_dir": (
        Path | None,
        Field(
            None,
            description="Folder, on each replica's machine, for draft heads that arrive by /start_draft_weight_update; "
            "it holds the last two and must not be shared with another server. Needs rollouts.",
            json_schema_extra=_PANEL,
        ),
    ),
    "weight_transfer_config": (
        Annotated[WeightTransfer | None, BeforeValidator(_from_text)],
        Field(
            None,
            description='vLLM\'s setting, as JSON such as {"backend": "gloo"}: how trainers send weights (gloo, '
            "nccl, disk, ray). Implies rollouts.",
            json_schema_extra=_PANEL,
        ),
    ),
}


def changes_weights(config: "AppConfig") -> bool | None:
    """Return True if the settings allow weights to change while they are served, else None."""
    return True if config.rollouts or config.weight_transfer_config is not None else None


def engine_limits(config: "AppConfig") -> dict[str, bool]:
    """Return whether weights change, and the engine's memory on a GPU must be able to be given back."""
    return {"frees_memory": bool(changes_weights(config))}


def asked(config: "AppConfig") -> dict[str, tuple[bool, str]]:
    """Return whether the settings turn this part on, and words that name the setting."""
    said = "rollouts is True" if config.rollouts else "weight_transfer_config is given"
    return {ROLLOUTS: (bool(changes_weights(config)), said)}


def check_settings(config: "AppConfig") -> None:
    """Raise ValueError if settings that need rollouts are given without rollouts, or if a recording is to be made while
    weights can change.
    """
    if not changes_weights(config):
        for name in ("rollouts_journal", "rollouts_dir"):
            if getattr(config, name):
                raise ValueError(f"{name} is given: give rollouts as well")
    elif getattr(config, "recording_dir", None) is not None:
        raise ValueError(f"rollouts and recording_dir are both given: {_OLD}; leave one out")
