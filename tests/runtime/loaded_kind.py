"""A drafter, loaded as a user would name it, with a verifier that it drafts for."""

from dataclasses import dataclass
from pathlib import Path

import torch

from tests.runtime.models import Reference, greedy, random_prompts, reference
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import Drafter
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.verifier.loading.loader import load_model

NUM_TOKENS = 48
"""Number of tokens in the references of a kind's own verifier."""
PROMPT_LENS = (5, 17, 40, 3, 64, 9, 33, 21)


@dataclass
class Kind:
    """A verifier, what it writes plainly, and how its drafter is called."""

    ref: Reference
    target: TargetDescription
    source: str

    def drafter(self, speculation: SpeculationConfig) -> Drafter:
        """A new one."""
        return load_drafter(self.source, self.target, speculation)


def llama(folder: Path) -> tuple[Reference, TargetDescription]:
    """The verifier that most kinds draft for, saved where a drafter may look for its tensors."""
    ref = reference("llama")
    ref.loaded.model.save_pretrained(folder)
    return ref, TargetDescription.from_checkpoint(folder)


def by_name(name: str, folder: Path) -> Kind:
    return Kind(*llama(folder / "verifier"), name)


def of_folder(verifier: Path, source: str) -> Kind:
    """A kind that drafts for a verifier of its own."""
    loaded = load_model(verifier, torch.float32, torch.device("cpu"))
    prompts = random_prompts(PROMPT_LENS)
    ref = Reference(verifier.name, loaded, prompts, *greedy(loaded.model, prompts, NUM_TOKENS))
    return Kind(ref, TargetDescription.from_checkpoint(verifier), source)
