"""JSON files of measurements, kept on disk so that a later start need not measure again.

Failures are logged, never raised.
"""

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
    """Folder of the stored measurements: $WINGBEAT_CACHE_DIR, or `wingbeat` in the user's cache folder."""
    own = os.environ.get("WINGBEAT_CACHE_DIR")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "wingbeat"


def compiler_env() -> dict[str, str]:
    """Environment variables for processes that compile kernels.

    Triton's cache goes below `cache_dir`, so that one container volume holds everything that a first start compiled or
    measured. Empty if the environment already sets TRITON_CACHE_DIR.
    """
    return {} if os.environ.get("TRITON_CACHE_DIR") else {"TRITON_CACHE_DIR": str(cache_dir() / "triton")}


def recall(path: Path, read: Callable[[dict[str, Any]], Kept]) -> Kept | None:
    """Returns the value kept in a file, or None if the file is absent or unreadable (logged as a warning).

    Args:
        read: builds the value from the file's JSON; may raise ValueError, KeyError or TypeError.
    """
    try:
        return read(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("cannot read %s (%s): measuring again", path, error)
        return None


def keep(path: Path, fields: dict[str, Any]) -> bool:
    """Writes JSON for `recall`, atomically. Returns False, and logs a warning, if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(fields))
    except OSError as error:
        logger.warning("cannot keep measurements in %s: %s", path, error)
        return False
    return True
