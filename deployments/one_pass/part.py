"""Part that lets `wingbeat inspect` read one-pass heads."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wingbeat.runtime.heads.target import TargetDescription


def head_findings(folder: Path, target: "TargetDescription | None") -> tuple[dict[str, Any], int, int] | None:
    """See `one_pass_findings`; None for other folders."""
    from wingbeat.deployments.one_pass.inspect_one_pass import drafts_in_one_pass, one_pass_findings

    return one_pass_findings(folder, target) if drafts_in_one_pass(folder) else None
