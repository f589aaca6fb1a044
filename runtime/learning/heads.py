"""A head that is served, as it can be measured and trained further: by its files alone."""

from pathlib import Path
from typing import Any

import torch

from wingbeat.runtime.heads.families import OnePassFamily, one_pass_family
from wingbeat.runtime.heads.files import read_config, read_shapes
from wingbeat.runtime.heads.layouts import Family as EagleFamily
from wingbeat.runtime.heads.load import load_eagle_head, read_checkpoint
from wingbeat.runtime.heads.one_pass.head import OnePassHead
from wingbeat.runtime.heads.one_pass.load import load_one_pass_head, read_one_pass_checkpoint
from wingbeat.runtime.heads.one_pass.parallel_eagle import load_parallel_head
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.learning.settings import LearnerSettings
from wingbeat.runtime.training.drafter_config import TrainDrafterConfig
from wingbeat.runtime.training.family import TrainedHead
from wingbeat.runtime.training.one_pass_init import for_training
from wingbeat.runtime.verifier.loading.cpu_dtype import has_bfloat16_units

_ONE_PASS = {
    OnePassFamily.DFLASH: "dflash",
    OnePassFamily.DFLASH2: "dflash2",
    OnePassFamily.DSPARK: "dspark",
    OnePassFamily.JETSPEC: "jetspec",
    OnePassFamily.PEAGLE: "p-eagle",
}


def family_name(folder: Path) -> str:
    """The family of a head as `TrainDrafterConfig.family` names it.

    Raises:
        CheckpointError: the folder holds no head that can be read.
    """
    one_pass = one_pass_family(read_config(folder), read_shapes(folder))
    if one_pass is not None:
        return _ONE_PASS[one_pass]
    return "eagle1" if read_checkpoint(folder).layout.family is EagleFamily.EAGLE1 else "eagle3"


def load_head(folder: Path, target: TargetDescription) -> TrainedHead:
    """A head in float32, as its drafter loads it; what is the verifier's is taken from there.

    Raises:
        CheckpointError: it cannot be read, or is of another verifier.
    """
    if one_pass_family(read_config(folder), read_shapes(folder)) is None:
        return load_eagle_head(
            folder,
            target_hidden_size=target.hidden_size,
            target_num_layers=target.num_layers,
            target_vocab_size=target.vocab_size,
            target_embedding=lambda: _own(target.embedding()),
            target_lm_head=lambda: _own(target.lm_head()),
        )
    checkpoint = read_one_pass_checkpoint(folder)
    load: Any = load_parallel_head if checkpoint.family is OnePassFamily.PEAGLE else load_one_pass_head
    return load(checkpoint, target, torch.float32, "cpu")


def _own(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.float().clone()


def free_to_learn(head: TrainedHead, family: str) -> TrainedHead:
    """The head with its weights free to change, but for those that stay the verifier's."""
    if isinstance(head, OnePassHead):
        return for_training(head)
    head.requires_grad_(True).embed_tokens.weight.requires_grad_(False)
    head.lm_head.weight.requires_grad_(family != "eagle1")
    return head.train()


def training_config(settings: LearnerSettings, family: str, head: TrainedHead) -> TrainDrafterConfig:
    """What the families' losses and files go by."""
    own: dict[str, Any] = {}
    if isinstance(head, OnePassHead):
        own["block_size"] = head.config.block_size
        if head.config.markov is not None:
            own["confidence_weight"] = float(head.config.markov.has_confidence)
    return TrainDrafterConfig(
        verifier=str(settings.verifier),
        family=family,
        output=settings.work,
        batch_size=settings.batch_size,
        sequence_length=settings.sequence_length,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        precision="bfloat16" if has_bfloat16_units() else "float32",
        **own,
    )
