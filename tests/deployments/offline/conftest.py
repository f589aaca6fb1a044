"""A model with a chat template, and `wingbeat.LLM` over it."""

import json
import shutil
from pathlib import Path

import pytest

import wingbeat
from wingbeat.runtime.drafters.choice import FALLBACK

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def chat_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_model` with `TEMPLATE`."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="session")
def llm(chat_model: Path) -> wingbeat.LLM:
    """Two prompts at once, drafted for by their own text."""
    return wingbeat.LLM(chat_model, FALLBACK.kind, max_num_seqs=2, max_model_len=128)
