"""Settings of saved prefixes (`prefix_dir`, `max_pinned_tokens`)."""

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from wingbeat.deployments.options.panel_titles import FEATURES
from wingbeat.runtime.refusals import Refusal

if TYPE_CHECKING:
    from wingbeat.deployments.app_config import AppConfig

PREFIX_DIR, NO_PREFIX_CACHE = "`prefix_dir`", "`enable_prefix_caching` false"
_MOST_TOKENS = 2**31 - 1
_FOLDER = Field(
    None,
    description="Folder in which each engine stores saved prefixes, such as system prompts (/v1/prefixes), and "
    "from which it reads them when it starts. By default prefixes are kept in memory only.",
    json_schema_extra={"panel": FEATURES},
)
_TOKENS = Field(
    None,
    ge=0,
    description="Maximum tokens of saved prefixes that an engine holds. By default a quarter of its KV blocks.",
    json_schema_extra={"panel": FEATURES},
)
SETTINGS = {"prefix_dir": (Path | None, _FOLDER), "max_pinned_tokens": (int | None, _TOKENS)}
REFUSED = (Refusal(PREFIX_DIR, NO_PREFIX_CACHE, "no prefixes are kept then", "leave out prefix_dir"),)


def check_settings(config: "AppConfig") -> None:
    """Raise ValueError, with a message of one line, if a path is not a folder, or if a number exceeds the capacity of
    any machine.
    """
    if config.prefix_dir is not None and config.prefix_dir.exists() and not config.prefix_dir.is_dir():
        raise ValueError(f"prefix_dir is {str(config.prefix_dir)!r}: must be a directory, or not exist yet")
    if (config.max_pinned_tokens or 0) > _MOST_TOKENS:
        raise ValueError(f"max_pinned_tokens is {config.max_pinned_tokens}: use at most {_MOST_TOKENS}")


def asked(config: "AppConfig") -> dict[str, tuple[bool, str]]:
    """Return a pair for each of two features, a folder for prefixes and prefix caching turned off: whether the settings
    use the feature, and a phrase that names the setting in error messages.
    """
    return {
        PREFIX_DIR: (config.prefix_dir is not None, "prefix_dir is given"),
        NO_PREFIX_CACHE: (not config.enable_prefix_caching, "enable_prefix_caching is False"),
    }
