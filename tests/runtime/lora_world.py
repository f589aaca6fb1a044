"""LoRA adapters for the tiny verifiers of `tests.runtime.models`, and what transformers writes with each merged."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.runtime.models import PROMPT_LENS, greedy, random_model, random_prompts
from wingbeat.runtime.lora.adapted import ModelAdapters
from wingbeat.runtime.lora.adapter_config import read_config
from wingbeat.runtime.lora.adapter_files import WEIGHTS_FILE
from wingbeat.runtime.lora.resident import ResidentAdapters
from wingbeat.runtime.scheduling.request import Variant
from wingbeat.runtime.verifier.loading.loader import LoadedModel, prepare_model

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NUM_TOKENS = 24
KINDS: dict[str, dict[str, Any]] = {
    "all": {"targets": ALL, "rank": 4},
    "attention": {"targets": ("q_proj", "v_proj"), "rank": 8, "fields": {"use_rslora": True}},
    "patterned": {
        "targets": ("o_proj", "down_proj", "up_proj"),
        "rank": 4,
        "fields": {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {r"layers\.[01]\.mlp\.up_proj": 3}},
    },
    "plain": {"targets": ALL, "rank": 2},
}
"""Adapters of one model: other layers, ranks and scales each."""


def num_resident(resident: ResidentAdapters) -> int:
    """Adapters in a place."""
    return len(resident._held)


def linears(model: PreTrainedModel, targets: tuple[str, ...]) -> dict[str, nn.Linear]:
    """The linear layers of a model whose names are among these."""
    named = model.named_modules()
    return {name: one for name, one in named if isinstance(one, nn.Linear) and name.rpartition(".")[2] in targets}


def write_adapter(
    folder: Path,
    model: PreTrainedModel,
    *,
    targets: tuple[str, ...] = ALL,
    rank: int = 4,
    seed: int = 0,
    std: float = 0.15,
    fields: dict[str, Any] | None = None,
    tensors: dict[str, Tensor] | None = None,
) -> Path:
    """Files of an adapter of random weights, as peft writes them.

    Args:
        fields: of its configuration, beside the usual ones or in their place.
        tensors: beside those of its weights, or in their place.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | (fields or {})))
    patterns = (fields or {}).get("rank_pattern", {})
    generator = torch.Generator().manual_seed(100 + seed)
    made = {}
    for name, linear in linears(model, targets).items():
        own = next((low for end, low in patterns.items() if name.endswith(end)), rank)
        prefix = f"base_model.model.{name}.lora_"
        made[f"{prefix}A.weight"] = torch.randn(own, linear.in_features, generator=generator) * std
        made[f"{prefix}B.weight"] = torch.randn(linear.out_features, own, generator=generator) * std
    save_file(made | (tensors or {}), folder / WEIGHTS_FILE)
    return folder


@torch.no_grad()
def merge(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model with an adapter in its weights: W + scale * B A."""
    config, tensors = read_config(folder), load_file(folder / WEIGHTS_FILE)
    for name, linear in model.named_modules():
        prefix = f"base_model.model.{name}.lora_"
        if f"{prefix}A.weight" in tensors:
            linear.weight += config.scale(name) * tensors[f"{prefix}B.weight"] @ tensors[f"{prefix}A.weight"]
    return model


class LoraWorld:
    """A verifier with room for adapters, some adapters, and what each of them writes.

    Args:
        kinds: of `KINDS`.
    """

    def __init__(
        self, name: str, max_loras: int = 4, max_rank: int = 8, kinds: dict[str, dict[str, Any]] | None = None
    ) -> None:
        self.prompts = random_prompts(PROMPT_LENS)
        self.loaded: LoadedModel = prepare_model(random_model(name), name)
        self.loaded.add(ModelAdapters(self.loaded.model, self.loaded.decoder_layers, max_loras, max_rank))
        self.adapters: list[Variant | None] = [None]
        self.folders: list[Path | None] = [None]
        self.expected = [greedy(random_model(name), self.prompts, NUM_TOKENS)[0]]
        """By adapter and prompt."""
        root = Path(mkdtemp())
        for seed, (kind, options) in enumerate((KINDS if kinds is None else kinds).items()):
            base = random_model(name)
            folder = write_adapter(root / kind, base, seed=seed, **options)
            self.take(kind, folder, merge(base, folder))

    def take(self, name: str, folder: Path, merged: PreTrainedModel) -> None:
        """Add an adapter."""
        self.folders.append(folder)
        self.adapters.append(self.loaded.parts["adapters"].inspect(name, folder))
        self.expected.append(greedy(merged, self.prompts, NUM_TOKENS)[0])


@cache
def lora_world() -> LoraWorld:
    """A Llama with adapters, shared by all tests of a process."""
    return LoraWorld("llama")
