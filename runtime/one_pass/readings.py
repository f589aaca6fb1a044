"""Readings of a head that drafts in one pass, which its files leave open."""

from pathlib import Path

from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.heads.families import OnePassFamily
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.one_pass.load import read_one_pass_checkpoint
from wingbeat.runtime.one_pass.parallel_eagle import parallel_conventions


def one_pass_readings(path: str | Path, target: TargetDescription, num_drafted: int) -> tuple[HeadConvention, ...]:
    """Readings of a head, the likeliest first; one where nothing is ambiguous.

    Args:
        num_drafted: tokens that each reading must draft; a block that is too short for that is read in one way.

    Raises:
        CheckpointError: the folder is unreadable, unsupported, or does not fit the target.
    """
    checkpoint = read_one_pass_checkpoint(path)
    if checkpoint.family is OnePassFamily.PEAGLE:
        return parallel_conventions(checkpoint, target.hidden_size, target.num_layers)
    readings = checkpoint.conventions(target.hidden_size, target.num_layers)
    shortest = checkpoint.config(target.hidden_size, target.num_layers).block_size - 1
    return readings if shortest >= num_drafted else readings[:1]
