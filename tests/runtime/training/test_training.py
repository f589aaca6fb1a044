"""Shared parts of training runs: choice of text and settings; and the script that made the demo's verifier."""

import json
from itertools import pairwise

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo_pair.training.train_base import arguments, train, train_tokenizer
from wingbeat.runtime.corpus import split_files
from wingbeat.runtime.recordings.token_windows import WindowSampler
from wingbeat.runtime.standard_library import stdlib_root
from wingbeat.runtime.training.drafter_config import TrainDrafterConfig

SOURCE = "def f{i}(x):\n    if x > {i}:\n        return [x, {i}]\n    return f{i}(x + 1)\n\n\n"


@pytest.fixture
def corpus(tmp_path):
    root = tmp_path / "corpus"
    (root / "tests").mkdir(parents=True)
    for i in range(120):
        (root / f"module{i}.py").write_text(SOURCE.format(i=i) * 5)
        (root / "tests" / f"test_{i}.py").write_text(SOURCE.format(i=i))
    return root


def test_no_file_is_both_trained_on_and_held_out(corpus):
    split = split_files(corpus)
    assert split.held_out
    assert not set(split.train) & set(split.held_out)
    assert split == split_files(corpus)
    assert all("tests" not in path.parts for path in split.held_out)
    assert 0 < sum("tests" in path.parts for path in split.train) < 60


def test_the_split_depends_on_relative_paths_alone(corpus):
    before = [path.relative_to(corpus) for path in split_files(corpus).held_out]
    moved = corpus.rename(corpus.with_name("moved"))
    assert [path.relative_to(moved) for path in split_files(moved).held_out] == before


def test_what_is_no_training_text_is_left_out(corpus):
    before = split_files(corpus)
    (corpus / "binary.py").write_bytes(b"\xff\xfe\x00")
    (corpus / "table.py").write_text("x = " + "1, " * 1000)
    (corpus / "empty.py").write_text("\n")
    (corpus / "notes.txt").write_text("text")
    assert split_files(corpus) == before
    assert corpus / "notes.txt" in {path for part in split_files(corpus, (".txt",)) for path in part}


@pytest.mark.slow
def test_the_standard_library_has_held_out_files():
    split = split_files(stdlib_root())
    assert 5 <= len(split.held_out) < len(split.train) / 10
    assert not any("site-packages" in path.parts for path in split.train)


def test_an_epoch_of_windows_shows_every_token_once():
    documents = [torch.arange(0, 40), torch.arange(40, 64)]
    sampler = WindowSampler(documents, seed=3)
    epoch = torch.cat([sampler.batch(cursor, 2, 8) for cursor in range(4)])
    assert sorted(epoch.flatten().tolist()) == list(range(64))
    again = WindowSampler(documents, seed=3)
    assert torch.equal(again.batch(3, 2, 8), sampler.batch(3, 2, 8))
    assert not torch.equal(sampler.batch(4, 2, 8), sampler.batch(0, 2, 8))
    with pytest.raises(ValueError, match="64 tokens"):
        sampler.batch(0, 1, 65)


def test_the_tokenizer_returns_any_text_and_knows_indentation():
    tokenizer = train_tokenizer([SOURCE.format(i=i) for i in range(50)], 320, 64)
    text = "def é():\n\tx = 1234  # \u4f60\r\n        return\n\n\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("\n    ")["input_ids"]) == 1
    assert tokenizer.convert_tokens_to_ids(tokenizer.eos_token) == 0


def test_chat_messages_become_comments():
    tokenizer = train_tokenizer([SOURCE], 300, 64)
    messages = [{"role": "user", "content": "sort\nit"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "# user: sort\n# it\n\n"


def test_the_script_makes_a_model_folder_that_has_learnt(corpus, tmp_path):
    small = "--steps 12 --batch-size 2 --sequence-length 16 --max-position-embeddings 32 --final-fraction 0.34"
    shape = "--vocab-size 512 --hidden-size 32 --intermediate-size 48 --num-layers 2 --num-attention-heads 4"
    output = tmp_path / "out"
    settings = arguments(["--output", str(output), "--warmup-steps", "1", *small.split(), *shape.split()])
    train(output, corpus, settings)
    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 0
    assert model.config.max_position_embeddings == 32
    assert tokenizer.chat_template
    metrics = json.loads((output / "metrics.json").read_text())
    assert metrics["num_parameters"] == sum(p.numel() for p in model.parameters())
    assert metrics["losses"][-1] < metrics["losses"][0]
    assert 0 < metrics["held_out"]["nats_per_token"] < metrics["losses"][0]
    # bfloat16, and tied matrices only once.
    assert (output / "model.safetensors").stat().st_size < 2.2 * metrics["num_parameters"] + 4096


def test_the_learning_rate_rises_stays_and_falls_to_zero(tmp_path):
    config = TrainDrafterConfig(verifier="", output=tmp_path, steps=100, warmup_steps=9, decay_fraction=0.5)
    scales = [config.learning_rate_scale(step) for step in range(101)]
    assert scales[0] == pytest.approx(0.1)
    assert scales[9:51] == [1.0] * 42
    assert all(a > b for a, b in pairwise(scales[50:]))
    assert scales[100] == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sequence_length": 9, "ttt_steps": 8}, "sequence_length=9"),
        ({"device": "tpu"}, "tpu"),
        ({"steps": 0}, "steps"),
        ({"corpus": "/nowhere"}, "corpus='/nowhere' is not a folder"),
        ({"stepz": 3}, "stepz"),
    ],
)
def test_settings_are_refused_by_field(tmp_path, fields, message):
    with pytest.raises(ValidationError, match=message):
        TrainDrafterConfig(**{"verifier": "", "output": tmp_path} | fields)
