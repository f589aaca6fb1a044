"""Measurements that are kept on disk, so that a start need not repeat those of the last one. Never a reason to fail."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from wingbeat.kernels.replaced_file import replacing

logger = logging.getLogger(__name__)
Kept = TypeVar("Kept")


def cache_dir() -> Path:
    """Folder of kept measurements: $WINGBEAT_CACHE_DIR, or wingbeat under the user's cache folder."""
    own = os.environ.get("WINGBEAT_CACHE_DIR")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "wingbeat"


def compiler_env() -> dict[str, str]:
    """What a process that compiles kernels is told by its environment: Triton keeps them below `cache_dir` too, so that
    one volume of a container holds all that a first start has made; nothing where the environment names a folder."""
    return {} if os.environ.get("TRITON_CACHE_DIR") else {"TRITON_CACHE_DIR": str(cache_dir() / "triton")}


def recall(path: Path, read: Callable[[dict[str, Any]], Kept]) -> Kept | None:
    """What was kept there; None where there is nothing, or nothing that can be read, which is warned of.

    Args:
        read: makes it from the file's JSON; may raise ValueError, KeyError or TypeError.
    """
    try:
        return read(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("cannot read %s (%s): measuring again", path, error)
        return None


def keep(path: Path, fields: dict[str, Any]) -> bool:
    """Write JSON for `recall`, whole or not at all; False, with a warning, where the disk refuses."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(fields))
    except OSError as error:
        logger.warning("cannot keep measurements in %s: %s", path, error)
        return False
    return True
