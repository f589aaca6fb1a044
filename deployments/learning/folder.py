"""Folders in which a learning configuration stores rounds and heads, and the message that names them."""

import hashlib
from functools import cache
from pathlib import Path

from wingbeat.deployments.app_config import AppConfig
from wingbeat.kernels.disk_cache import cache_dir
from wingbeat.runtime.heads.fingerprint import checkpoint_fingerprint
from wingbeat.runtime.learning.head_versions import HeadLedger


def learning_root(config: AppConfig) -> Path:
    """Return the folder for this pair of verifier and draft head; each pair has a different folder.

    Raises:
        FileNotFoundError: the verifier or the head has no config.json or no weights.
    """
    told = config.learn.dir or cache_dir() / "learning"
    return told / _identity(config.named_dir(), Path(config.choice().source))


@cache
def _identity(verifier: Path, head: Path) -> str:
    both = f"{checkpoint_fingerprint(verifier)} {checkpoint_fingerprint(head)}"
    return hashlib.sha256(both.encode()).hexdigest()[:16]


def ledger_of(config: AppConfig) -> HeadLedger:
    """Return the ledger of the versions of this configuration's head; raises the errors of `learning_root`."""
    return HeadLedger(learning_root(config), Path(config.choice().source), config.model_name())


def said_at_start(config: AppConfig) -> str:
    """Return the line, printed for the operator when a server starts, that states which data is stored and where."""
    options = config.learn
    if not options.trains:
        return f"versions of the draft head are followed from {learning_root(config)}; nothing is stored of requests"
    return (
        f"the draft head learns: tokens and hidden states of {options.share:.0%} of the requests are stored in "
        f"{learning_root(config)}, at most {options.max_bytes / 1e9:g} GB and {options.expire_s / 86400:g} days; those "
        'with a cache_salt or "speculation": {"learn": false} are not'
    )
