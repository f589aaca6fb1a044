"""Engine directories of tiny pairs, exported for tests."""

from pathlib import Path
from typing import NamedTuple

import torch

from tests.runtime.models import random_head, random_model
from tests.runtime.tensorrt.engine_world import LIMITS
from wingbeat.runtime.heads.load import save_eagle_head
from wingbeat.runtime.tensorrt.build import BuildPlan, export_directory
from wingbeat.runtime.tensorrt.engine_directory import EngineDirectory
from wingbeat.runtime.verifier.loader import LoadedModel, load_model, prepare_model


class ExportedPair(NamedTuple):
    """Checkpoints and what was exported of them."""

    model: Path
    head: Path | None
    directory: EngineDirectory

    def loaded(self) -> LoadedModel:
        """The verifier under torch."""
        return load_model(self.model, torch.float32, torch.device("cpu"))


def exported_pair(
    folder: Path, name: str = "llama", with_head: bool = True, opset: int = 24, dtype: str = "float32", **config
) -> ExportedPair:
    """A random verifier of `tests.runtime.models`, its random head, and their engine directory.

    Args:
        config: fields in place of the verifier's.
    """
    model, head = folder / "model", folder / "head" if with_head else None
    verifier = random_model(name, **config)
    verifier.save_pretrained(model)
    if head is not None:
        save_eagle_head(random_head(prepare_model(verifier, name)), head)
    plan = BuildPlan(model, head, folder / "engines", getattr(torch, dtype), LIMITS, opset)
    return ExportedPair(model, head, export_directory(plan))
