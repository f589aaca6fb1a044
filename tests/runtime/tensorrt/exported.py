"""Engine directories of tiny pairs, exported for tests."""

from pathlib import Path
from typing import NamedTuple

import torch

from tests.runtime.models import DEMO_PAIR, random_head, random_model
from tests.runtime.tensorrt.engine_world import LIMITS
from wingbeat.runtime.heads.layer import DecoderHead
from wingbeat.runtime.heads.load import load_eagle_head
from wingbeat.runtime.heads.save import save_eagle_head
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.tensorrt.build import BuildPlan, export_directory
from wingbeat.runtime.tensorrt.engine_config import Limits
from wingbeat.runtime.tensorrt.engine_directory import EngineDirectory
from wingbeat.runtime.verifier.loading.loader import LoadedModel, load_model, prepare_model


class ExportedPair(NamedTuple):
    """Checkpoints and what was exported of them."""

    model: Path
    head: Path | None
    directory: EngineDirectory

    def loaded(self) -> LoadedModel:
        """The verifier under torch."""
        return load_model(self.model, torch.float32, torch.device("cpu"))


def exported_pair(
    folder: Path,
    name: str = "llama",
    with_head: bool = True,
    opset: int = 24,
    dtype: str = "float32",
    limits: Limits = LIMITS,
    **config,
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
    plan = BuildPlan(model, head, folder / "engines", getattr(torch, dtype), limits, opset)
    return ExportedPair(model, head, export_directory(plan))


def exported_demo(folder: Path, drafter: str = "drafter") -> ExportedPair:
    """The demo pair, or its verifier with another drafter, and its engine directory."""
    model, head = DEMO_PAIR / "verifier", DEMO_PAIR / drafter
    return ExportedPair(model, head, export_directory(BuildPlan(model, head, folder, torch.float32, LIMITS)))


def demo_head(dtype: torch.dtype) -> DecoderHead:
    """The demo pair's head."""
    target = TargetDescription.from_checkpoint(DEMO_PAIR / "verifier")
    head = load_eagle_head(DEMO_PAIR / "drafter", target, dtype)
    return head.eval().requires_grad_(False)
