"""A small EAGLE-3 head in a folder: how tests load it and edit its files."""

import json

from safetensors.torch import load_file, save_file

from wingbeat.runtime.heads.eagle3 import EagleHead
from wingbeat.runtime.heads.load import load_eagle_head

HIDDEN, VOCAB, DRAFT_VOCAB, LAYERS = 16, 40, 12, 8


def load(folder, **changes) -> EagleHead:
    target = dict(target_hidden_size=HIDDEN, target_num_layers=LAYERS, target_vocab_size=VOCAB)
    return load_eagle_head(folder, **target | changes)


def edit_config(folder, drop=(), **fields) -> None:
    raw = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if k not in drop}))


def edit_tensors(folder, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
