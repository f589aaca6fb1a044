"""Conventions under which a one-pass head may be read."""

from pathlib import Path

from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.heads.load import check_vocabulary
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.one_pass.families import OnePassFamily
from wingbeat.runtime.one_pass.load import read_one_pass_checkpoint
from wingbeat.runtime.one_pass.parallel_eagle import parallel_conventions, read_parallel_config


def one_pass_readings(path: str | Path, target: TargetDescription, num_drafted: int) -> tuple[HeadConvention, ...]:
    """Conventions of a head, most likely first; a single convention if nothing is ambiguous.

    Args:
        path: folder or hub name.
        target: the verifier.
        num_drafted: number of tokens that each convention must be able to draft; if the block is too short for that,
            only the likeliest convention is returned.

    Raises:
        CheckpointError: the folder is unreadable, unsupported, or does not fit the target.
    """
    checkpoint, sizes = read_one_pass_checkpoint(path), (target.hidden_size, target.num_layers)
    if checkpoint.family is OnePassFamily.PEAGLE:
        check_vocabulary(read_parallel_config(checkpoint, *sizes)[0], target)
        return parallel_conventions(checkpoint, *sizes)
    config, readings = checkpoint.config(*sizes), checkpoint.conventions(*sizes)
    check_vocabulary(config, target)
    return readings if config.block_size > num_drafted else readings[:1]
