"""Adapter files: what is not served is refused by one line that names it."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.runtime.lora_world import ALL, write_adapter
from tests.runtime.models import random_model
from tests.runtime.mutations import mutations, some
from wingbeat.runtime.lora.adapter import AdapterError, LinearShape
from wingbeat.runtime.lora.adapter_config import AdapterConfig
from wingbeat.runtime.lora.adapter_files import adapter_digest, read_adapter

LINEAR = "model.layers.0.self_attn.q_proj"
TENSOR = f"base_model.model.{LINEAR}.lora_"


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


def read(model, folder, max_rank=8):
    named = dict(model.named_modules())
    shapes = {
        name: LinearShape(one.in_features, one.out_features)
        for name, one in named.items()
        if name.rpartition(".")[2] in ALL
    }
    return read_adapter(folder, shapes, max_rank)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"use_dora": True}, "use_dora is true, which is not supported"),
        ({"modules_to_save": ["lm_head"]}, 'modules_to_save is ["lm_head"], which is not supported'),
        ({"bias": "all"}, "bias is all: only none is supported"),
        ({"lora_bias": True}, "lora_bias is true"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is true"),
        ({"peft_type": "IA3"}, "peft_type is IA3: only LORA is supported"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters is"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is pissa, which changes the base model's weights"),
        ({"some_new_method": {"rate": 2}}, "some_new_method is"),
        ({"r": 0}, "r: Input should be greater than 0"),
        ({"r": True}, "r: Input should be a valid integer"),
        ({"lora_alpha": None}, "lora_alpha: Input should be a valid number"),
        ({"lora_alpha": 0}, "lora_alpha: Input should be greater than 0"),
        ({"lora_alpha": -8}, "lora_alpha: Input should be greater than 0"),
        ({"lora_alpha": float("nan")}, "lora_alpha: Input should be"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj: Input should be greater than 0"),
        ({"alpha_pattern": {"q_proj": -1}}, "alpha_pattern.q_proj: Input should be greater than 0"),
        ({"use_rslora": "no"}, "use_rslora: Input should be a valid boolean"),
        ({"target_modules": "("}, "pattern '(' of adapter_config.json is no expression"),
        ({"rank_pattern": {"(": 4}}, "pattern '(' of adapter_config.json is no expression"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_adapter_that_asks_for_more_than_lora_is_refused_by_the_field(model, tmp_path, fields, problem):
    write_adapter(tmp_path, model, targets=("q_proj",), fields={"rank_pattern": {}} | fields)
    with pytest.raises(AdapterError) as refused:
        read(model, tmp_path)
    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({f"{TENSOR}A.weight": torch.zeros(4, 63)}, f"lora_A of {LINEAR} is [4, 63], not [4, 64]"),
        ({f"{TENSOR}B.weight": torch.zeros(65, 4)}, f"lora_B of {LINEAR} is [65, 4], not [64, 4]"),
        ({f"{TENSOR}A.weight": torch.zeros(5, 64)}, f"lora_A of {LINEAR} is [5, 64], not [4, 64]"),
        ({f"{TENSOR}B.weight": torch.full((64, 4), float("inf"))}, f"lora_B of {LINEAR} holds a number that is not"),
        ({f"{TENSOR}A.weight": torch.zeros(4, 64, dtype=torch.int8)}, f"lora_A of {LINEAR} is I8"),
        (
            {f"base_model.model.lm_head.lora_{side}.weight": torch.zeros(4, 64) for side in "AB"},
            "lm_head is not a linear layer of the model's decoder layers",
        ),
        ({f"{TENSOR}magnitude_vector": torch.zeros(64)}, "is not one of a linear layer's lora_A and lora_B"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 97)}, "is not one of a linear"),
        ({"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.zeros(4, 64)}, "has lora_A alone"),
    ],
    ids=range(9),
)
def test_tensors_that_do_not_fit_the_model_are_refused_by_name(model, tmp_path, tensors, problem):
    write_adapter(tmp_path, model, targets=("q_proj",), tensors=tensors)
    with pytest.raises(AdapterError) as refused:
        read(model, tmp_path)
    assert problem in str(refused.value)


def without(folder, *modules: str) -> None:
    """Leave the tensors of some modules out."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: part for name, part in tensors.items() if not any(one in name for one in modules)}, file)


@pytest.mark.parametrize(
    "fields",
    [{}, {"target_modules": "all-linear"}, {"target_modules": r".*\.(q|k|v|o|gate|up|down)_proj"}],
    ids=["names", "all", "expression"],
)
def test_an_adapter_that_lacks_a_layer_of_its_targets_is_refused(model, tmp_path, fields):
    write_adapter(tmp_path, model, fields=fields)
    read(model, tmp_path)
    without(tmp_path, "layers.1.")
    with pytest.raises(
        AdapterError, match=r"no tensors for model\.layers\.1\.self_attn\.q_proj and for 6 more: target"
    ):
        read(model, tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"layers_to_transform": [0, 2, 3]},
        {"layers_to_transform": [0, 2, 3], "layers_pattern": "layers"},
        {"exclude_modules": r".*\.1\..*"},
        {"target_modules": None},
    ],
    ids=["by number", "by list and number", "excluded", "says nothing"],
)
def test_layers_that_an_adapter_does_not_act_on_need_no_tensors(model, tmp_path, fields):
    write_adapter(tmp_path, model, fields=fields)
    without(tmp_path, "layers.1.")
    assert len(read(model, tmp_path)) == 21


@pytest.mark.parametrize("count", [60, pytest.param(10**6, marks=pytest.mark.slow)])
def test_one_wrong_field_is_refused_or_scales_as_the_file_says(model, tmp_path, count):
    whole = write_adapter(tmp_path / "whole", model, targets=("q_proj", "v_proj"), fields={"use_rslora": False})
    made = load_file(whole / "adapter_model.safetensors")
    for index, mutation in enumerate(some(mutations(whole, "adapter_config.json"), count)):
        folder = shutil.copytree(whole, tmp_path / str(index))
        mutation.write(folder)
        found, lines = None, []
        try:
            found = read(model, folder)
        except AdapterError as error:
            lines = str(error).splitlines()
        if found is None:
            assert len(lines) == 1, mutation
            continue
        fields = json.loads((folder / "adapter_config.json").read_text())
        scale = fields["lora_alpha"] / (fields["r"] ** 0.5 if fields.get("use_rslora") else fields["r"])
        assert len(found) == 8, mutation
        assert torch.allclose(found[LINEAR].b, scale * made[f"{TENSOR}B.weight"]), mutation


def test_a_rank_above_the_highest_is_refused(model, tmp_path):
    write_adapter(tmp_path, model, rank=9)
    with pytest.raises(AdapterError, match="has rank 9, max_lora_rank is 8"):
        read(model, tmp_path)


def test_an_adapter_of_a_wider_model_is_refused(model, tmp_path):
    write_adapter(tmp_path, random_model("llama", hidden_size=128), targets=("q_proj",))
    with pytest.raises(AdapterError, match=r"is \[4, 128\], not \[4, 64\]"):
        read(model, tmp_path)


def test_a_pickle_is_not_read(model, tmp_path):
    write_adapter(tmp_path, model)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterError, match="is a pickle, which is not read"):
        read(model, tmp_path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_files_that_are_missing_or_cut_short_are_named(model, tmp_path, name):
    write_adapter(tmp_path, model)
    file = tmp_path / name
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(AdapterError, match=name):
        read(model, tmp_path)
    file.unlink()
    with pytest.raises(AdapterError, match=name):
        read(model, tmp_path)


def test_scales_are_pefts():
    def scale(module: str, **fields) -> float:
        return AdapterConfig(peft_type="LORA", r=4, lora_alpha=8, **fields).scale(module)

    assert scale("a.q_proj") == 2.0
    assert scale("a.q_proj", use_rslora=True) == 4.0
    assert scale("a.q_proj", alpha_pattern={"q_proj": 2}) == 0.5
    assert scale("a.q_proj", rank_pattern={"q_proj": 16}) == 0.5
    assert scale("a.kq_proj", rank_pattern={"q_proj": 16}) == 2.0


def test_what_is_read_is_scaled_and_the_digest_is_of_the_content(model, tmp_path):
    one, same, other = (
        write_adapter(tmp_path / name, model, targets=("q_proj",), seed=seed)
        for name, seed in (("one", 0), ("same", 0), ("other", 1))
    )
    assert adapter_digest(one) == adapter_digest(same) != adapter_digest(other)
    found, tensors = read(model, one)[LINEAR], load_file(one / "adapter_model.safetensors")
    assert torch.equal(found.a, tensors[f"{TENSOR}A.weight"])
    assert torch.equal(found.b, 2 * tensors[f"{TENSOR}B.weight"])
    fields = json.loads((one / "adapter_config.json").read_text())
    (one / "adapter_config.json").write_text(json.dumps(fields | {"lora_alpha": 1}))
    assert adapter_digest(one) != adapter_digest(same)
