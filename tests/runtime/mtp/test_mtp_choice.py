"""`auto` is the modules of the verifier's own checkpoint, where their tensors are there."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.runtime.drafters.test_drafter_kinds import LLAMA, checkpoint
from wingbeat.runtime.drafters.choice import FALLBACK, KINDS, holds_modules, parse_drafter

MTP = KINDS["mtp"]


def mtp_checkpoint(folder: Path, layer: int = 2, **fields) -> Path:
    """A verifier of two layers that says it has a prediction layer, and has one as layer number `layer`."""
    tensors = {"model.layers.1.mlp.up_proj.weight": (2, 2), f"model.layers.{layer}.eh_proj.weight": (2, 4)}
    return checkpoint(folder, LLAMA | {"num_nextn_predict_layers": 1} | fields, tensors)


def test_auto_is_the_models_own_prediction_where_its_layers_are_there(tmp_path):
    assert parse_drafter("auto", mtp_checkpoint(tmp_path)).kind == "mtp"
    (tmp_path / "config.json").write_text(json.dumps({"text_config": LLAMA}))
    assert holds_modules(MTP, tmp_path)


def test_auto_knows_qwens_prediction_layers_too(tmp_path):
    assert parse_drafter("auto", checkpoint(tmp_path, LLAMA, {"mtp.fc.weight": (2, 4)})).kind == "mtp"


def test_a_config_that_promises_prediction_layers_is_not_believed_without_their_tensors(tmp_path):
    assert not holds_modules(MTP, mtp_checkpoint(tmp_path, layer=1))
    assert parse_drafter("auto", tmp_path) == FALLBACK


def test_prediction_layers_are_found_in_shards(tmp_path):
    mtp_checkpoint(tmp_path, layer=1)
    save_file({"model.layers.2.eh_proj.weight": torch.zeros(2, 4)}, tmp_path / "model-00002-of-00002.safetensors")
    assert holds_modules(MTP, tmp_path)
