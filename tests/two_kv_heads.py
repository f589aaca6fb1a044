"""A small verifier that two ranks divide, where the demo's has one KV head."""

import shutil
from pathlib import Path

from tests.runtime.models import DEMO_PAIR, random_model


def save_two_kv_heads(folder: Path) -> None:
    """Into an empty folder, with the demo's tokenizer."""
    random_model("llama", vocab_size=4096, num_hidden_layers=2).save_pretrained(folder)
    for file in (DEMO_PAIR / "verifier").glob("*token*"):
        shutil.copy(file, folder)
