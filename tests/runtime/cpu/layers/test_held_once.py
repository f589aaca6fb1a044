"""A loaded model keeps neither its file's memory map nor a second copy of a packed weight."""

import gc
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.runtime.models import SHAPE
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.runtime.verifier.loading.loader import load_model

DENSE = (104, SHAPE["hidden_size"])
"""A shape that no other tensor of these tests has."""


@pytest.mark.few(1)
@pytest.mark.skipif(cpu_kernels() is None, reason="the CPU kernels cannot be compiled here")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_weights_are_held_once(tmp_path: Path, tied: bool):
    torch.manual_seed(0)
    shape = SHAPE | {"intermediate_size": DENSE[0], "tie_word_embeddings": tied}
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(tmp_path)
    gc.collect()
    loaded = load_model(tmp_path, torch.float32, torch.device("cpu"))
    gc.collect()
    assert loaded.decoder_layers[0].mlp.up_proj.panels is not None
    assert str(tmp_path / "model.safetensors") not in Path("/proc/self/maps").read_text()
    whole = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter) and one.shape == DENSE]
    assert not [one for one in whole if one.untyped_storage().nbytes() >= one.nbytes]
