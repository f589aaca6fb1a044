"""Starts whose checkpoints have been found right: they are checked again once they or the settings have changed.

The check takes the imports of torch and transformers: seconds, and hundreds of megabytes of another process. It
tells early what the engine's own loading would tell later: a start that is wrongly taken for known fails there.
"""

import hashlib
from importlib.metadata import version
from pathlib import Path

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.cli.apart import check_apart
from wingbeat.kernels.disk_cache import cache_dir, keep
from wingbeat.runtime.drafters.choice import USER

_PACKAGES = ("torch", "transformers", "wingbeat")


def check_unless_known(config: AppConfig, here: bool) -> None:
    """Refuse checkpoints that an engine could not start with.

    Args:
        here: as `preflight.is_here`.

    Raises:
        ValueError, OSError: one line that names the setting, the file or the tensor.
    """
    known = cache_dir() / f"start-{_key(config, here)}.json"
    if _is_told_by_files(config) and known.exists():
        return
    check_apart(config, here)
    keep(known, {"model": str(config.model_dir()), "drafter": config.choice().label})


def _is_told_by_files(config: AppConfig) -> bool:
    """Whether nothing but files and settings decides; modules of the user's do where there are some."""
    return config.engine_factory is None and config.drafter_factory is None and config.choice().kind != USER


def _key(config: AppConfig, here: bool) -> str:
    folders = [config.model_dir(), config.engine_dir, Path(str(config.choice().source))]
    files = [_files(folder) for folder in folders if folder is not None]
    parts = ([version(name) for name in _PACKAGES], here, config.model_dump_json(), files)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def _files(folder: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of change of every file below."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
