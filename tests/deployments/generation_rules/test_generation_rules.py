"""A model's generation_config.json: each field of transformers' is honoured, named at the start, or without effect."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.drafters.choice import FALLBACK
from wingbeat.runtime.generation_rules.generation_config import (
    BY_REQUEST,
    HONOURED,
    NOT_APPLIED,
    WITHOUT_EFFECT,
    read_rules,
)
from wingbeat.runtime.llm import LLM
from wingbeat.runtime.scheduling.request import SamplingParams
from wingbeat.runtime.tensor_files import ModelCheckpointError

PROMPT, NUM_TOKENS, VOCAB = [40, 41, 42, 43], 12, 257
SETS = {"honoured": HONOURED, "by request": BY_REQUEST, "not applied": NOT_APPLIED, "without effect": WITHOUT_EFFECT}


def copied(source: Path, folder: Path, **fields: Any) -> Path:
    shutil.copytree(source, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0} | fields))
    return folder


def test_every_field_of_transformers_is_in_one_of_four_lists():
    listed = frozenset().union(*SETS.values())
    assert set(GenerationConfig().to_dict()) <= listed
    assert sum(map(len, SETS.values())) == len(listed)


@pytest.mark.parametrize("name", sorted(BY_REQUEST | NOT_APPLIED))
def test_what_is_not_applied_is_named_in_one_line(name: str, tmp_path: Path):
    (tmp_path / "generation_config.json").write_text(
        json.dumps({name: 7 if name.endswith("_id") else 0.7, "use_cache": True, "bos_token_id": 1})
    )
    line = read_rules(tmp_path, VOCAB).not_applied
    assert name in line
    assert "\n" not in line
    assert "use_cache" not in line


def test_fields_that_nobody_knows_are_named_and_neutral_ones_are_not(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"novel_rule": 3}))
    assert "novel_rule" in read_rules(tmp_path, VOCAB).not_applied
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "num_beams": 1, "do_sample": False, "eos_token_id": 0}
    (tmp_path / "generation_config.json").write_text(json.dumps(neutral))
    assert not read_rules(tmp_path, VOCAB).not_applied


def plain_text(folder: Path) -> list[int]:
    """The model's own text by transformers, under the rules of the folder's file."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False)
    return out[0, len(PROMPT) :].tolist()


def our_text(folder: Path, drafter: str) -> list[int]:
    (got,) = opened(folder, drafter).generate([PROMPT], [SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)])
    return got.token_ids


def opened(folder: Path, drafter: str) -> LLM:
    return LLM(folder, drafter, EngineConfig(max_num_seqs=1, max_model_len=64, num_kv_blocks=64), InProcessChannel)


RULES = {
    "suppress_tokens": lambda text: {"suppress_tokens": [text[0], text[3]]},
    "begin_suppress_tokens": lambda text: {"begin_suppress_tokens": [text[0]]},
    "bad_words_ids": lambda text: {"bad_words_ids": [[text[1]], text[2:5]]},
    "min_new_tokens": lambda text: {"eos_token_id": text[2], "min_new_tokens": 8},
    "min_length": lambda text: {"eos_token_id": [text[2], text[4]], "min_length": len(PROMPT) + 9},
    "sequence_bias": lambda text: {"sequence_bias": [[[text[0]], -50.0], [[7], 50.0]]},
    "eos_token_id": lambda text: {"eos_token_id": [text[5], 0]},
    "as text": lambda text: {"eos_token_id": str(text[5]), "min_new_tokens": "3"},
    "all": lambda text: {
        "begin_suppress_tokens": [text[0]],
        "eos_token_id": text[3],
        "min_new_tokens": 6,
        "suppress_tokens": [text[1]],
    },
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", RULES)
def test_rules_of_the_file_hold_for_every_request_as_in_transformers(name: str, tiny_model: Path, tmp_path: Path):
    text = plain_text(tiny_model)
    fields = RULES[name](text)
    folder = copied(tiny_model, tmp_path / "ours", **fields)
    if name == "as text":
        fields = {key: int(value) for key, value in fields.items()}
    expected = plain_text(copied(tiny_model, tmp_path / "theirs", **fields))
    assert expected != text
    for drafter in ("none", FALLBACK.kind):
        assert our_text(folder, drafter) == expected


@pytest.mark.parametrize("fields", [{"suppress_tokens": "all"}, {"bad_words_ids": [3]}, {"min_new_tokens": -2}])
def test_a_field_that_cannot_be_right_is_one_line(fields: dict[str, Any], tmp_path: Path):
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelCheckpointError, match=f"generation_config.json: {next(iter(fields))} is"):
        read_rules(tmp_path, VOCAB)


def test_a_start_names_what_is_not_applied(tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = copied(tiny_model, tmp_path / "model", temperature=0.6, forced_eos_token_id=3)
    with caplog.at_level(logging.WARNING, "wingbeat"):
        opened(folder, "none")
    (line,) = (one.getMessage() for one in caplog.records if "generation_config.json" in one.getMessage())
    assert "temperature 0.6" in line
    assert "forced_eos_token_id" in line
