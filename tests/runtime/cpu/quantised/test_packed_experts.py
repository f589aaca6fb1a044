"""Experts of quantised models stay packed, each expert by itself."""

import json
from copy import deepcopy

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.runtime.models import TREE, engine_config, generate, greedy, greedy_params, random_model, random_prompts
from tests.runtime.quantised.test_checkpoints import CASES, CPU, save_mxfp4, save_quantised
from tests.runtime.scripted import ScriptedDrafter, right_tree
from wingbeat.kernels.cpu.ops import cpu_kernels, use_kernels
from wingbeat.runtime.cpu.layers.packed_modules import ExpertPanels, PackedExperts
from wingbeat.runtime.tensor_files import ModelCheckpointError
from wingbeat.runtime.verifier.loading.loader import load_model

pytest.importorskip("gguf")
from tests.runtime.quantised.gguf_architectures import write_architecture
from tests.runtime.quantised.gguf_world import TOKENS
from wingbeat.runtime.hub import checkpoint_folder

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")
NUM_TOKENS = 24


def experts_of(model):
    return [module for module in model.modules() if isinstance(module, PackedExperts)]


def check_text(loaded, meant, prompts):
    """Check the text without drafts, in a batch and alone, and with drafts that are all right."""
    params, expected = [greedy_params(NUM_TOKENS)] * len(prompts), greedy(meant, prompts, NUM_TOKENS)[0]
    assert generate(loaded, engine_config(), None, prompts, params)[0] == expected
    assert generate(loaded, engine_config(), None, prompts[:1], params[:1])[0] == expected[:1]
    sequences = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
    right = ScriptedDrafter(sequences, right_tree, loaded.vocab_size)
    assert generate(loaded, engine_config(TREE), right, prompts, params)[0] == expected


@pytest.mark.parametrize(
    ("case", "form"),
    [
        *(("qwen3moe", "Q8_0"), ("qwen3moe", "Q4_0"), ("qwen3moe", "Q5_1"), ("gpt-oss", "MXFP4"), ("gpt-oss", "Q4_1")),
        *(("mixtral", "Q4_0"), ("qwen2moe", "Q8_0"), ("olmoe", "Q4_1"), ("granitemoe", "Q5_0")),
    ],
)
def test_those_of_a_gguf_file(case, form, tmp_path):
    meant = write_architecture(tmp_path / "tiny.gguf", case, form)
    loaded = load_model(checkpoint_folder(tmp_path), torch.float32, CPU)
    experts = experts_of(loaded.model)
    assert [type(one.panels) for one in experts] == [ExpertPanels] * 4
    places = [place for one in experts for name, place in one.named_parameters() if not name.endswith("bias")]
    assert all(place.untyped_storage().nbytes() == 4 for place in places)
    assert loaded.weights_bytes < 1.6 * sum(parameter.numel() for parameter in meant.parameters())
    held, expected = loaded.model.state_dict(), meant.state_dict()
    names = [name for name in expected if ".experts." in name]
    assert len(names) >= 2 * len(experts)
    for name in names:
        assert torch.equal(held[name], expected[name])
    check_text(loaded, meant, random_prompts((5, 40, 17), len(TOKENS)))


@pytest.mark.few(4)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_those_of_a_checkpoint(name, case, tmp_path):
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    stands_for = save_quantised(packed, *CASES[case], model=name)
    assert any(".experts." in name for name in stands_for)
    random_model(name).save_pretrained(plain)
    tensors = load_file(plain / "model.safetensors")
    contiguous = {name: tensor.contiguous() for name, tensor in stands_for.items()}
    save_file(tensors | contiguous, plain / "model.safetensors", metadata={"format": "pt"})
    meant = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    loaded = load_model(packed, torch.float32, CPU)
    assert len(experts_of(loaded.model)) == loaded.model.config.num_hidden_layers
    assert all(one.panels is not None for one in experts_of(loaded.model))
    check_text(loaded, meant, random_prompts((5, 30)))


def test_those_of_mxfp4(tmp_path):
    save_mxfp4(tmp_path)
    loaded, meant = (load_model(tmp_path, torch.float32, CPU, packed=packed) for packed in (True, False))
    assert len(experts_of(loaded.model)) == len(loaded.layers)
    assert not experts_of(meant.model)
    numbers = sum(parameter.numel() for one in experts_of(loaded.model) for parameter in one.parameters())
    held = sum(one.panels.nbytes() for one in experts_of(loaded.model))
    assert held < 0.6 * numbers
    for name, weight in meant.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], weight), name
    prompts, params = random_prompts((5, 30)), [greedy_params(NUM_TOKENS)] * 2
    expected = generate(meant, engine_config(), None, prompts, params)[0]
    assert generate(loaded, engine_config(), None, prompts, params)[0] == expected
    sequences = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
    right = ScriptedDrafter(sequences, right_tree, loaded.vocab_size)
    assert generate(loaded, engine_config(TREE), right, prompts, params)[0] == expected


@pytest.mark.parametrize(
    ("name", "spoil", "says"),
    [
        ("down_proj_scales", lambda tensor: tensor[:, :-1], r"down_proj_scales is torch.uint8 \["),
        ("down_proj_bias", lambda tensor: tensor[:1], r"down_proj_bias is \[1, \d+\], \["),
        ("gate_up_proj_blocks", lambda tensor: tensor[..., :8], r"gate_up_proj_blocks is torch.uint8 \["),
        (
            "gate_up_proj_scales",
            lambda tensor: torch.full_like(tensor, 255),
            "gate_up of expert 0 of .* hold NaN",
        ),
        ("down_proj_scales", lambda tensor: None, "down_proj_scales is missing"),
    ],
    ids=["scales", "biases", "blocks", "nan", "missing"],
)
def test_what_is_wrong_with_mxfp4_is_named(tmp_path, name, spoil, says):
    save_mxfp4(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.0.mlp.experts.{name}"
    tensors[name] = spoil(tensors[name])
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(ModelCheckpointError, match=says):
        load_model(tmp_path, torch.float32, CPU)


def test_experts_of_other_shapes_than_the_models_are_refused(tmp_path):
    save_mxfp4(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    wrong = {"num_local_experts": r"experts holds \d+ experts", "intermediate_size": "of expert 0 of .* has shape"}
    for field, says in wrong.items():
        file.write_text(json.dumps(fields | {field: 2 * fields[field]}))
        with pytest.raises(ModelCheckpointError, match=says):
            load_model(tmp_path, torch.float32, CPU)


def test_experts_without_kernels_are_numbers(tmp_path):
    write_architecture(tmp_path / "tiny.gguf", "qwen3moe", "Q4_0")
    loaded = load_model(checkpoint_folder(tmp_path), torch.float32, CPU)
    rows, chosen = torch.randn(5, 64), torch.tensor([[0, 3]] * 5)
    experts, weights = experts_of(loaded.model)[0], torch.full((5, 2), 0.5)
    with torch.inference_mode():
        found = experts(rows, chosen, weights)
        before = use_kernels(False)
        expected = experts(rows, chosen, weights)
        use_kernels(before)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("model", "gate", "up"), [("qwen3_moe", "gate_proj", "up_proj"), ("mixtral", "w1", "w3")], ids=["qwen3", "mixtral"]
)
def test_a_set_of_experts_that_is_not_packed_whole_is_held_as_numbers(model, gate, up, tmp_path):
    packed = tmp_path
    stands_for = save_quantised(packed, *CASES["awq"], model=model)
    name = next(name for name in stands_for if f".experts.1.{up}." in name)
    tensors = load_file(packed / "model.safetensors")
    parts = [part for part in tensors if part.startswith(name.removesuffix("weight"))]
    kept = {part: tensor for part, tensor in tensors.items() if part not in parts}
    save_file(kept | {name: stands_for[name].contiguous()}, packed / "model.safetensors")
    loaded = load_model(packed, torch.float32, CPU)
    assert len(experts_of(loaded.model)) == len(loaded.layers) - 1
    layer = name.partition(".experts.")[0].replace("block_sparse_moe", "mlp")
    held = loaded.model.state_dict()[f"{layer}.experts.gate_up_proj"][1]
    assert torch.equal(held, torch.cat([stands_for[name.replace(up, gate)], stands_for[name]]))


def test_a_model_that_is_copied_or_leaves_float32_has_its_numbers(tmp_path):
    meant = write_architecture(tmp_path / "tiny.gguf", "qwen3moe", "Q4_0")
    model = load_model(checkpoint_folder(tmp_path), torch.float32, CPU).model
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(deepcopy(model).state_dict()[name], meant.state_dict()[name])
    model.to(torch.bfloat16)
    assert all(one.panels is None for one in experts_of(model))
    assert torch.equal(model.get_parameter(name), meant.state_dict()[name].bfloat16())


def test_experts_in_another_dtype_are_numbers(tmp_path):
    meant = write_architecture(tmp_path / "tiny.gguf", "qwen3moe", "Q8_0")
    loaded = load_model(checkpoint_folder(tmp_path), torch.float32, CPU, packed=False)
    assert not experts_of(loaded.model)
    for name, weight in meant.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], weight), name


def test_a_scale_that_is_none_is_named(tmp_path):
    save_quantised(tmp_path, *CASES["awq"], model="qwen3_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.experts.2.up_proj.scales"][0, 0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelCheckpointError, match=r"up of expert 2 of model.layers.1.mlp.experts or its scales hold"):
        load_model(tmp_path, torch.float32, CPU)
