"""A verifier, a corpus and the settings of a short run, for the tests of training."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.demo_pair.training.train_base import train_tokenizer
from wingbeat.runtime.heads.eagle3 import EagleHead, EagleHeadConfig
from wingbeat.runtime.training.drafter_config import ONE_PASS, TrainDrafterConfig

VOCAB, HIDDEN, TAPS, NUM_LAYERS = 320, 32, (0, 1, 2), 3


def make_head(draft_vocab_size: int, num_layers: int = 1) -> EagleHead:
    """An EAGLE-3 head of the verifier's sizes with random weights, which drafts the first tokens of the vocabulary."""
    return EagleHead(
        EagleHeadConfig(
            hidden_size=HIDDEN,
            intermediate_size=40,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            target_hidden_size=HIDDEN,
            tap_layers=TAPS,
            vocab_size=VOCAB,
            draft_vocab_size=draft_vocab_size,
            num_layers=num_layers,
        )
    )


def make_verifier(root: Path) -> Path:
    """A random Llama of three layers with a tokenizer, in `root/verifier`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    path = root / "verifier"
    LlamaForCausalLM(config).save_pretrained(path)
    texts = ["def f(x):\n    return x\n" * 9, "class A:\n    y = [1, 2]\n" * 9]
    train_tokenizer(texts, VOCAB, 64).save_pretrained(path)
    return path


def make_corpus(root: Path) -> Path:
    """A hundred small files in `root/corpus`."""
    folder = root / "corpus"
    folder.mkdir()
    for i in range(100):
        (folder / f"m{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 8)
    return folder


def short_run(root: Path, output: Path, **changes: Any) -> TrainDrafterConfig:
    """Six steps in float32, each in the loss history, without measurements."""
    settings = {
        "corpus": root / "corpus",
        "output": output,
        "verifier": str(root / "verifier"),
        "steps": 6,
        "batch_size": 4,
        "sequence_length": 16,
        "ttt_steps": 3,
        "draft_vocab_size": 200,
        "rollout_rows": 64,
        "precision": "float32",
        "threads": 1,
        "log_interval_steps": 1,
        "warmup_steps": 1,
        "validation_prompts": 0,
    }
    if changes.get("family") in ONE_PASS and "ttt_steps" not in changes:
        del settings["ttt_steps"]
    return TrainDrafterConfig(**settings | changes)


def metrics(config: TrainDrafterConfig) -> dict[str, Any]:
    """Metrics that a finished run wrote."""
    return json.loads((config.output / "metrics.json").read_text())


def losses(config: TrainDrafterConfig) -> list[float]:
    """Loss of every step of a finished run."""
    return [loss for _, loss in metrics(config)["losses"]]
