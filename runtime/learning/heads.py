"""Loads a served head, from its files alone, to measure or train it."""

from pathlib import Path

from wingbeat.runtime.heads.layouts import Family as EagleFamily
from wingbeat.runtime.heads.load import read_checkpoint
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.learning.settings import LearnerSettings
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.training.drafter_config import TrainDrafterConfig
from wingbeat.runtime.training.families import FAMILIES
from wingbeat.runtime.training.family import TrainedHead


def family_name(folder: Path) -> str:
    """Family of a head, as in `TrainDrafterConfig.family`.

    Raises:
        CheckpointError: the folder holds no head that can be read.
    """
    if (found := first_result("family_of_head", folder)) is not None:
        return found
    return "eagle1" if read_checkpoint(folder).layout.family is EagleFamily.EAGLE1 else "eagle3"


def load_head(folder: Path, target: TargetDescription) -> TrainedHead:
    """Loads a head by its family, see `training.family.Family.load`."""
    return FAMILIES[family_name(folder)].load(folder, target)


def training_config(settings: LearnerSettings, family: str, head: TrainedHead) -> TrainDrafterConfig:
    """Settings for the family's losses and file formats."""
    return TrainDrafterConfig(
        verifier=str(settings.verifier),
        family=family,
        output=settings.work,
        batch_size=settings.batch_size,
        sequence_length=settings.sequence_length,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        **FAMILIES[family].settings_of(head),
    )
