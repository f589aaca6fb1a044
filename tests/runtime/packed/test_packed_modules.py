"""Models whose weights stay packed as on a GPU, by the references of its kernels."""

import copy

import pytest
import torch

from tests.runtime.models import TREE, eagle_drafter, engine_config, generate, greedy, greedy_params, random_prompts
from tests.runtime.quantised.test_checkpoints import CASES, CPU, save_mxfp4, save_quantised
from wingbeat.runtime.fused.layers import FusedLayer
from wingbeat.runtime.hub import checkpoint_folder
from wingbeat.runtime.packed.modules import JoinedProduct, PackedExperts, PackedLinear, PackedRows
from wingbeat.runtime.verifier.layers.linears import held_bytes
from wingbeat.runtime.verifier.loading.loader import load_model

pytest.importorskip("gguf")
from tests.runtime.quantised.gguf_architectures import write_architecture
from tests.runtime.quantised.gguf_world import TOKENS, write_model
from wingbeat.runtime.quantised.gguf_blocks import FORMS

NUM_TOKENS = 16
PROMPTS = random_prompts((5, 23, 70), len(TOKENS))
"""The last one's rows are more than kernels unpack in registers."""


def packed_of(model):
    return [module for module in model.modules() if isinstance(module, PackedLinear | PackedRows)]


@pytest.mark.few(3)
@pytest.mark.parametrize("form", FORMS)
def test_text_of_a_file_is_that_of_its_numbers(tmp_path, form):
    meant = write_model(tmp_path / "tiny.gguf", form)
    loaded = load_model(checkpoint_folder(tmp_path), torch.float32, CPU)
    assert packed_of(loaded.model)
    assert all(isinstance(layer, FusedLayer) for layer in loaded.decoder_layers)
    assert isinstance(loaded.decoder_layers[0]._half.qkv, JoinedProduct)
    state, expected = loaded.model.state_dict(), meant.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], weight) for name, weight in expected.items())
    params = [greedy_params(NUM_TOKENS)] * len(PROMPTS)
    drafter = eagle_drafter(loaded, TREE)
    texts = greedy(meant, PROMPTS, NUM_TOKENS)[0]
    assert generate(loaded, engine_config(TREE), drafter, PROMPTS, params)[0] == texts


@pytest.mark.few(2)
@pytest.mark.parametrize("case", CASES)
def test_checkpoints_stay_packed_in_half_precision(tmp_path, case):
    """The trial at load holds the model against transformers' own decoding, fused and as written."""
    meant = save_quantised(tmp_path, *CASES[case])
    loaded = load_model(tmp_path, torch.bfloat16, CPU)
    assert len(packed_of(loaded.model)) == len(meant)
    assert all(module.weight.untyped_storage().nbytes() == 2 for module in packed_of(loaded.model))
    state = loaded.model.state_dict()
    assert all(torch.equal(state[name], weight.bfloat16()) for name, weight in meant.items())
    whole = sum(weight.nbytes for weight in meant.values())
    others = sum(weight.nbytes for name, weight in state.items() if name not in meant)
    assert held_bytes(loaded.model) < others + whole // 2


def test_projections_of_one_form_are_one_launch(tmp_path):
    write_model(tmp_path / "tiny.gguf", "Q4_0")
    layer = load_model(checkpoint_folder(tmp_path), torch.float32, CPU).decoder_layers[0]
    (part,) = layer._half.qkv._parts
    attention = layer.self_attn
    assert attention.q_proj.held.values.data_ptr() == part[1].values.data_ptr()
    rows = torch.randn(3, attention.q_proj.in_features)
    each = torch.cat([one(rows) for one in (attention.q_proj, attention.k_proj, attention.v_proj)], dim=1)
    assert torch.equal(layer._half.qkv(rows), each)


def test_a_copy_shares_what_is_packed_and_moves_as_a_whole(tmp_path):
    write_model(tmp_path / "tiny.gguf", "Q4_0")
    loaded = load_model(checkpoint_folder(tmp_path), torch.float32, CPU)
    linear = loaded.decoder_layers[0].mlp.down_proj
    twin = copy.deepcopy(linear).to(torch.bfloat16)
    assert twin.held is linear.held
    assert twin.weight.dtype == torch.bfloat16
    assert twin.weight.untyped_storage().nbytes() == 2
    rows = torch.randn(2, linear.in_features)
    torch.testing.assert_close(twin(rows.bfloat16()).float(), linear(rows), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("form", ["Q8_0", "Q4_0"])
def test_text_of_experts_is_that_of_their_numbers(tmp_path, form):
    meant = write_architecture(tmp_path / "tiny.gguf", "qwen3moe", form)
    loaded = load_model(checkpoint_folder(tmp_path), torch.float32, CPU)
    experts = [one for one in loaded.model.modules() if isinstance(one, PackedExperts)]
    assert len(experts) == len(loaded.layers)
    assert all(one.untyped_storage().nbytes() == 4 for experts in experts for one in experts.parameters())
    state, expected = loaded.model.state_dict(), meant.state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in expected.items())
    params = [greedy_params(NUM_TOKENS)] * len(PROMPTS)
    texts = greedy(meant, PROMPTS, NUM_TOKENS)[0]
    assert generate(loaded, engine_config(TREE), eagle_drafter(loaded, TREE), PROMPTS, params)[0] == texts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_of_mxfp4_have_biases_and_lie_turned(tmp_path, dtype):
    save_mxfp4(tmp_path)
    loaded, meant = (load_model(tmp_path, dtype, CPU, packed=packed) for packed in (True, False))
    ours, theirs = (
        next(one for one in model.model.modules() if hasattr(one, "gate_up_proj_bias")) for model in (loaded, meant)
    )
    assert isinstance(ours, PackedExperts)
    state = loaded.model.state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in meant.model.state_dict().items())
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(90, loaded.hidden_size, generator=draw).to(dtype)
    chosen = torch.rand(90, ours.num_experts, generator=draw).argsort(dim=1)[:, :2]
    shares = torch.rand(90, 2, generator=draw).to(dtype)
    near = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(ours(rows, chosen, shares), theirs(rows, chosen, shares), **near)
    torch.testing.assert_close(ours(rows[:1], chosen[:1], shares[:1]), ours(rows, chosen, shares)[:1])
