"""Weights of GGUF files are multiplied in the file's own format, without conversion."""

from copy import deepcopy

import pytest
import torch

from tests.runtime.models import TREE, eagle_drafter, engine_config, generate, greedy, greedy_params
from wingbeat.kernels.cpu.group_panels import GroupPanels
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.runtime.cpu.layers.layer_stack import CpuLayer
from wingbeat.runtime.hub import checkpoint_folder
from wingbeat.runtime.verifier.checkpoints.checkpoint import Place, load_weights
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile
from wingbeat.runtime.verifier.layers.linears import dense_weight

pytest.importorskip("gguf")
from tests.runtime.quantised.gguf_world import write_model
from tests.runtime.quantised.test_gguf import NUM_TOKENS, PROMPTS, served
from wingbeat.runtime.quantised.gguf_weights import FORMS

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")


def text_of(loaded):
    params = [greedy_params(NUM_TOKENS)] * len(PROMPTS)
    return generate(loaded, engine_config(TREE), eagle_drafter(loaded, TREE), PROMPTS, params)[0]


@pytest.mark.few(3)
@pytest.mark.parametrize("tied", [False, True], ids=["own output", "tied"])
@pytest.mark.parametrize("form", [*FORMS, "F16"])
def test_text_is_that_of_the_numbers_that_weights_stand_for(form, tied, tmp_path):
    meant = write_model(tmp_path / "tiny.gguf", form, tied=tied)
    loaded = served(tmp_path / "tiny.gguf")
    modules, packed = dict(loaded.model.named_modules()), 0
    for name, parameter in meant.named_parameters():
        module = modules[name.removesuffix(".weight")]
        assert torch.equal(dense_weight(module), parameter), name
        packed += isinstance(getattr(module, "panels", None), GroupPanels)
    packed += tied and isinstance(loaded.model.lm_head.panels, GroupPanels)
    assert packed == (7 * 4 + 2 if form in FORMS else 0)
    bytes_each = loaded.weights_bytes / sum(parameter.numel() for parameter in meant.parameters())
    assert bytes_each < (1.5 if form in FORMS else 4.6)
    assert text_of(loaded) == greedy(meant, PROMPTS, NUM_TOKENS)[0]


def test_a_model_that_is_copied_or_leaves_float32_has_its_numbers(tmp_path):
    write_model(tmp_path / "tiny.gguf", "Q4_1", tied=True)
    place = Place(torch.device("cpu"), torch.float32)
    model = load_weights(ConfigFile.read(checkpoint_folder(tmp_path)), torch.float32, place)
    meant, ids = dense_weight(model.get_input_embeddings()), torch.tensor([[3, 1, 4]])
    copied = deepcopy(model)
    assert isinstance(model.get_input_embeddings().panels, GroupPanels)
    with torch.inference_mode():
        assert torch.equal(copied.get_input_embeddings()(ids), meant[ids])
        torch.testing.assert_close(copied(ids).logits, model(ids).logits)
    model.to(torch.bfloat16)
    assert torch.equal(model.get_input_embeddings().weight, meant.bfloat16())
    assert model.to(torch.float16).get_input_embeddings().weight.dtype == torch.float16


def test_layers_of_several_forms_run_as_transformers_wrote_them_where_gate_and_up_differ(tmp_path):
    meant = write_model(tmp_path / "tiny.gguf", "Q4_0", others={"up_proj": "Q8_0", "v_proj": "F16"})
    loaded = served(tmp_path / "tiny.gguf")
    assert not isinstance(loaded.decoder_layers[0], CpuLayer)
    assert isinstance(loaded.decoder_layers[0].mlp.gate_proj.panels, GroupPanels)
    assert text_of(loaded) == greedy(meant, PROMPTS, NUM_TOKENS)[0]
