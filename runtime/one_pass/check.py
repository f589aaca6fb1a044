"""Whether a head that drafts in one pass fits a verifier, told from names and shapes alone."""

from pathlib import Path

import torch

from wingbeat.runtime.heads.families import OnePassFamily
from wingbeat.runtime.heads.files import CheckpointError, read_named
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.one_pass.load import fit_one_pass_head, read_one_pass_checkpoint
from wingbeat.runtime.one_pass.parallel_eagle import fit_parallel_head

_TOKEN_MAPS = ("d2t", "t2d", "model.d2t", "model.t2d")


def check_one_pass_drafter(source: str, target: TargetDescription) -> int:
    """Refuse a head that could not be loaded beside a verifier; values per position that it taps.

    Raises:
        CheckpointError: as `check_one_pass_head`, with the folder.
    """
    try:
        lent = {"lends_embedding": target.holds_embedding, "lends_lm_head": target.holds_lm_head}
        return len(check_one_pass_head(source, target, **lent)) * target.hidden_size
    except CheckpointError as error:
        raise CheckpointError(f"drafter {source}: {error}") from error


def check_one_pass_head(
    path: str | Path, target: TargetDescription, lends_embedding: bool = True, lends_lm_head: bool = True
) -> tuple[int, ...]:
    """Everything that loading a head checks; the layers whose inputs it taps.

    Args:
        lends_embedding: whether the target has an embedding to lend.
        lends_lm_head: whether it has an output matrix to lend.

    Raises:
        CheckpointError: an unsupported family, a bad config, or a missing, unexpected or mis-shaped tensor.
    """
    checkpoint = read_one_pass_checkpoint(path)
    tensors = {name: torch.empty(shape, device="meta") for name, shape in checkpoint.shapes.items()}
    tensors |= checkpoint.canonical(read_named(checkpoint.folder, _TOKEN_MAPS))
    lent = torch.empty(target.vocab_size, target.hidden_size, device="meta")
    embedding, lm_head = lent if lends_embedding else None, lent if lends_lm_head else None
    if checkpoint.family is OnePassFamily.PEAGLE:
        return fit_parallel_head(checkpoint, tensors, target, embedding, lm_head)[0].tap_layers
    config = checkpoint.config(target.hidden_size, target.num_layers)
    fit_one_pass_head(config, tensors, target.vocab_size, embedding, lm_head)
    return config.tap_layers
