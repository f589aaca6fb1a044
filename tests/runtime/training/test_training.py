"""Training the base model: which text is used, what is written, and that a killed run continues unchanged."""

import json
from itertools import pairwise

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer

from wingbeat.runtime.recordings.corpus import WindowSampler, split_files, stdlib_root
from wingbeat.runtime.training import base_model
from wingbeat.runtime.training.base_model import TrainBaseConfig, train_base
from wingbeat.runtime.training.byte_bpe import train_tokenizer
from wingbeat.runtime.training.loop import STATE_FILE

SOURCE = "def f{i}(x):\n    if x > {i}:\n        return [x, {i}]\n    return f{i}(x + 1)\n\n\n"


@pytest.fixture
def corpus(tmp_path):
    root = tmp_path / "corpus"
    (root / "tests").mkdir(parents=True)
    for i in range(120):
        (root / f"module{i}.py").write_text(SOURCE.format(i=i) * 5)
        (root / "tests" / f"test_{i}.py").write_text(SOURCE.format(i=i))
    return root


@pytest.fixture
def config(corpus, tmp_path):
    return TrainBaseConfig(
        corpus=corpus,
        output=tmp_path / "out",
        steps=6,
        batch_size=2,
        sequence_length=16,
        max_position_embeddings=32,
        final_fraction=0.34,
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        precision="float32",
        threads=1,
        log_interval_steps=1,
        warmup_steps=1,
    )


def losses(config) -> list:
    return json.loads((config.output / "metrics.json").read_text())["losses"]


def train_until(config, step: int, monkeypatch) -> None:
    """Train and die in the middle of a step, as a kill would."""
    real_loss, calls = base_model._loss, []

    def dying_loss(model, windows):
        calls.append(1)
        if len(calls) > step:
            raise KeyboardInterrupt
        return real_loss(model, windows)

    monkeypatch.setattr(base_model, "_loss", dying_loss)
    with pytest.raises(KeyboardInterrupt):
        train_base(config)
    monkeypatch.setattr(base_model, "_loss", real_loss)


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


def test_the_result_is_a_model_folder(config):
    train_base(config)
    model = AutoModelForCausalLM.from_pretrained(config.output, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(config.output)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 0
    assert model.config.max_position_embeddings == 32
    assert tokenizer.chat_template
    metrics = json.loads((config.output / "metrics.json").read_text())
    assert metrics["num_parameters"] == sum(p.numel() for p in model.parameters())
    assert 0 < metrics["held_out"]["nats_per_token"] < 7
    # bfloat16, and tied matrices only once.
    assert (config.output / "model.safetensors").stat().st_size < 2.2 * metrics["num_parameters"] + 4096
    assert not (config.output / STATE_FILE).exists()


@pytest.mark.slow
def test_a_killed_run_continues_with_the_same_losses(config, tmp_path, monkeypatch):
    uninterrupted = config.model_copy(update={"output": tmp_path / "whole"})
    train_base(uninterrupted)
    config = config.model_copy(update={"checkpoint_interval_s": 1e-9})
    train_until(config, 3, monkeypatch)
    assert (config.output / STATE_FILE).exists()
    train_base(config)
    assert losses(config) == losses(uninterrupted)


def test_a_checkpoint_of_other_settings_is_not_continued(config, monkeypatch):
    config = config.model_copy(update={"checkpoint_interval_s": 1e-9})
    train_until(config, 2, monkeypatch)
    with pytest.raises(ValueError, match="another learning_rate"):
        train_base(config.model_copy(update={"learning_rate": 1e-4}))


def test_the_learning_rate_rises_stays_and_falls_to_zero(config):
    config = config.model_copy(update={"steps": 100, "warmup_steps": 9, "decay_fraction": 0.5})
    scales = [config.learning_rate_scale(step) for step in range(101)]
    assert scales[0] == pytest.approx(0.1)
    assert scales[9:51] == [1.0] * 42
    assert all(a > b for a, b in pairwise(scales[50:]))
    assert scales[100] == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": 5}, "hidden_size=32 is not a multiple of num_attention_heads=5"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"sequence_length": 64}, "sequence_length=64"),
        ({"device": "tpu"}, "tpu"),
        ({"steps": 0}, "steps"),
        ({"corpus": "/nowhere"}, "corpus='/nowhere' is not a folder"),
        ({"stepz": 3}, "stepz"),
    ],
)
def test_settings_are_refused_by_field(config, fields, message):
    with pytest.raises(ValidationError, match=message):
        TrainBaseConfig(**config.model_dump() | fields)
