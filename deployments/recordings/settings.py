"""Settings for recording live traffic (`recording_dir` and others)."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from wingbeat.deployments.options.panel_titles import LEARNING

if TYPE_CHECKING:
    from wingbeat.deployments.app_config import AppConfig

_PANEL = {"panel": LEARNING}
_FOLDER = "Folder in which tokens and hidden states of live requests are stored, to train drafters on. Off by default."
_SHARE, _MOST = (
    ("Fraction of the requests that is recorded."),
    "Maximum bytes of all recordings in recording_dir together.",
)
SETTINGS = {
    "recording_dir": (Path | None, Field(None, description=_FOLDER, json_schema_extra=_PANEL)),
    "recording_share": (float, Field(0.01, gt=0, le=1, description=_SHARE, json_schema_extra=_PANEL)),
    "recording_max_bytes": (int, Field(10 * 10**9, ge=1, description=_MOST, json_schema_extra=_PANEL)),
}


def check_settings(config: "AppConfig") -> None:
    """Raise ValueError if the path is not a folder, or if acceptance is forced, because no drafter can be trained on
    texts that were drawn by forced acceptance.
    """
    folder = config.recording_dir
    if folder is None:
        return
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"recording_dir is {str(folder)!r}: must be a directory, or not exist yet")
    if config.forced_acceptance is not None:
        raise ValueError("recording_dir and forced_acceptance are both given: drawn text teaches no drafter")


def check_before_start(config: "AppConfig") -> None:
    """Raise ValueError if the folder cannot be written to. A folder that does not exist is created by the first
    replica.
    """
    folder = config.recording_dir
    if folder is None:
        return
    there = next((path for path in (folder, *folder.resolve().parents) if path.exists()), Path("/"))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"recording_dir is {str(folder)!r}: {there} cannot be written to")
