"""Greedy continuations that an application serves, and those of transformers by the weights in a folder."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.conftest import MODEL, App

PROMPTS = (
    "def main(argv=None):\n    import os\n    ",
    "class Queue:\n    def put(self, item):\n        ",
    "import sys\n",
)
PREFIX, BEHIND = "import json\nimport os\nimport sys\n\n\nclass Reader:\n    def __init__(self):\n", "        self."
NUM_TOKENS = 40


def generated(folder: Path, change: Callable[[PreTrainedModel], object] = lambda model: None) -> list[str]:
    """transformers' own greedy continuations of the prompts, and of what is behind the saved prefix.

    Args:
        change: writes into the model's weights first.
    """
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    change(model)
    texts = []
    for parts in (*((prompt,) for prompt in PROMPTS), (PREFIX, BEHIND)):
        ids = torch.tensor([[token for part in parts for token in tokenizer(part)["input_ids"]]])
        made = model.generate(ids, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False)
        texts.append(tokenizer.decode(made[0, ids.shape[1] :]))
    return texts


def text(app: App, prompt: str, model: str = MODEL, **fields) -> str:
    return app.text(prompt, model=model, max_tokens=NUM_TOKENS, extra={"min_tokens": NUM_TOKENS, **fields})


def texts(app: App) -> list[str]:
    return [text(app, prompt) for prompt in PROMPTS]
