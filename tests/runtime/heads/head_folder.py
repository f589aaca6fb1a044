"""A small EAGLE-3 head in a folder: how tests load it and edit its files."""

import json
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file

from wingbeat.runtime.heads.eagle3 import EagleHead
from wingbeat.runtime.heads.load import load_eagle_head

HIDDEN, VOCAB, DRAFT_VOCAB, LAYERS = 16, 40, 12, 8


def target_of(hidden_size, num_layers, vocab_size, embedding=None, lm_head=None) -> SimpleNamespace:
    """Description of a verifier that lends the given embedding and output matrix."""
    return SimpleNamespace(
        hidden_size=hidden_size,
        num_layers=num_layers,
        vocab_size=vocab_size,
        embedding=lambda: embedding,
        lm_head=lambda: lm_head,
    )


def load(folder, hidden_size=HIDDEN, convention=None, **lent) -> EagleHead:
    return load_eagle_head(folder, target_of(hidden_size, LAYERS, VOCAB, **lent), convention=convention)


def edit_config(folder, drop=(), **fields) -> None:
    raw = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if k not in drop}))


def edit_tensors(folder, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def same_head(one: EagleHead, other: EagleHead) -> bool:
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
