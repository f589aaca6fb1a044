"""Small verifiers with the demo's tokenizer: one that two ranks divide (the demo's has one KV head), and a hybrid."""

import shutil
from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3_5TextConfig

from tests.runtime import hybrids
from tests.runtime.models import DEMO_PAIR, add_noise, random_model


def save_two_kv_heads(folder: Path) -> None:
    """Into an empty folder, with the demo's tokenizer."""
    _save(random_model("llama", vocab_size=4096, num_hidden_layers=2), folder)


def save_hybrid(folder: Path) -> None:
    """Half of its layers keep recurrent state."""
    config = Qwen3_5TextConfig(**hybrids.SHAPES["qwen3_5"] | {"vocab_size": 4096})
    _save(add_noise(AutoModelForCausalLM.from_config(config)), folder)


def _save(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder)
    for file in (DEMO_PAIR / "verifier").glob("*token*"):
        shutil.copy(file, folder)
