"""Damaged checkpoints end `load_model` in an error that names the tensor, never in a model that writes garbage."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.runtime.models import random_model, random_prompts
from wingbeat.runtime.heads.files import CheckpointError, read_shapes
from wingbeat.runtime.tensor_files import ModelCheckpointError
from wingbeat.runtime.verifier.checkpoints.checkpoint import check_files, check_finite, check_weights
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile, load_config
from wingbeat.runtime.verifier.loading.loader import load_model

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
CPU = torch.device("cpu")


def saved(folder: Path, name: str = "llama", change: Callable[[dict[str, Tensor]], Any] = lambda t: None) -> Path:
    """A checkpoint of random weights, changed."""
    random_model(name).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def edit_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.few(2)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [Q_PROJ, "model.embed_tokens.weight", "model.norm.weight"])
def test_a_weight_that_is_no_number_is_called_by_its_name(tmp_path: Path, name: str, value: float) -> None:
    folder = saved(tmp_path, change=lambda tensors: tensors[name].flatten()[-1:].fill_(value))
    with pytest.raises(
        ModelCheckpointError, match=rf"tensor {name} holds {'NaN' if math.isnan(value) else 'infinity'}"
    ):
        load_model(folder, torch.float32, CPU)


def test_a_weight_too_large_for_the_dtype_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, change=lambda tensors: tensors[Q_PROJ].fill_(1e6))
    with pytest.raises(ModelCheckpointError, match=f"{Q_PROJ} holds infinity as float16"):
        load_model(folder, torch.float16, CPU)


def test_every_bad_tensor_is_counted() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    check_finite(model)
    with torch.no_grad():
        model[0].bias.fill_(float("nan"))
        model[1].weight[0, 0] = float("inf")
    with pytest.raises(ModelCheckpointError, match=r"tensor 0\.bias holds NaN as float32 \(and 1 more\)"):
        check_finite(model)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors: tensors.pop(Q_PROJ), f"1 missing tensor: {Q_PROJ}"),
        (lambda tensors: tensors.update(foo=torch.zeros(2)), "1 unexpected tensor: foo"),
        (lambda tensors: tensors.update({Q_PROJ: torch.zeros(2, 2)}), rf"{Q_PROJ} has shape \[2, 2\], expected"),
        (lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].to(torch.int32)}), f"{Q_PROJ} is I32"),
        (lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].to(torch.float8_e4m3fn)}), f"{Q_PROJ} is F8_E4M3"),
    ],
    ids=["missing", "unexpected", "mis-shaped", "integers", "8 bits without scale"],
)
def test_a_checkpoint_that_transformers_would_fill_or_pass_over_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], says: str
) -> None:
    with pytest.raises(ModelCheckpointError, match=says):
        load_model(saved(tmp_path, change=change), torch.float32, CPU)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"quantization_config": {"quant_method": "foo"}}, "LlamaForCausalLM is quantised by 'foo'.*: awq, .*fp8"),
        ({"hidden_act": "nope"}, "LlamaForCausalLM.*'nope'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "LlamaForCausalLM cannot be loaded"),
        ({"intermediate_size": None}, "LlamaForCausalLM cannot be loaded"),
        ({"auto_map": {"AutoModelForCausalLM": "mine.Mine"}, "model_type": "mine"}, "auto_map"),
    ],
    ids=["unknown quantisation", "activation", "RoPE", "size", "own code"],
)
def test_what_transformers_stumbles_over_is_one_line_with_the_architecture(
    tmp_path: Path, fields: dict[str, Any], says: str
) -> None:
    folder = saved(tmp_path)
    edit_config(folder, **fields)
    with pytest.raises(ModelCheckpointError, match=says) as caught:
        load_model(folder, torch.float32, CPU)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_names_that_transformers_converts_are_no_false_alarm(tmp_path: Path, name: str) -> None:
    """Mixtures of experts are saved under other names than the model has; headers alone must be enough to tell."""
    folder = saved(tmp_path, name)
    file = ConfigFile.read(folder)
    load_config(file)
    check_files(file)
    check_weights(file)
    loaded = load_model(folder, torch.float32, CPU)
    prompt = torch.tensor(random_prompts((7,)))
    loaded.model.set_attn_implementation("eager")
    torch.testing.assert_close(loaded.model(prompt).logits, random_model(name)(prompt).logits.detach())


@pytest.mark.parametrize(
    "extra",
    ["model.layers.0.self_attn.rotary_emb.inv_freq", "mtp.fc.weight", "model.layers.4.eh_proj.weight"],
)
def test_tensors_that_no_output_depends_on_are_passed_over(tmp_path: Path, extra: str) -> None:
    load_model(saved(tmp_path, change=lambda t: t.update({extra: torch.zeros(4)})), torch.float32, CPU)


def test_towers_are_passed_over_only_beside_a_config_of_theirs(tmp_path: Path) -> None:
    folder = saved(tmp_path, change=lambda tensors: tensors.update({"model.visual.proj": torch.zeros(4)}))
    with pytest.raises(ModelCheckpointError, match=r"unexpected tensor: model\.visual\.proj"):
        check_weights(ConfigFile.read(folder))
    edit_config(folder, vision_config={"depth": 1})
    check_weights(ConfigFile.read(folder))


def test_a_pickle_is_read_as_weights_and_never_run(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    load_model(folder, torch.float32, CPU)

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (folder / "was-run",))

    torch.save(tensors | {"evil": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelCheckpointError, match="holds code beside weights"):
        load_model(folder, torch.float32, CPU)
    assert not (folder / "was-run").exists()


def sharded(folder: Path) -> dict[str, Any]:
    """A checkpoint in two shards, and what its index says."""
    saved(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{1 + (index % 2)}.safetensors" for index, name in enumerate(sorted(tensors))}
    for shard in set(places.values()):
        save_file({n: tensors[n] for n in places if places[n] == shard}, folder / shard, metadata={"format": "pt"})
    return {"metadata": {"total_size": 1}, "weight_map": places}


def write_index(folder: Path, index: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_and_a_wrong_total_size_are_read(tmp_path: Path) -> None:
    index = sharded(tmp_path)
    write_index(tmp_path, index)
    load_model(tmp_path, torch.float32, CPU)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"model.foo": "model-1.safetensors"},
            r"has tensor model\.foo in model-1\.safetensors, which does not hold it",
        ),
        ({Q_PROJ: "model-3.safetensors"}, r"names model-3\.safetensors, which is not there"),
        ({Q_PROJ: "../model-1.safetensors"}, "which is no file name"),
        ({Q_PROJ: 1}, "weight_map must be an object from tensors to file names"),
        ({Q_PROJ: "model-0.safetensors"}, f"{Q_PROJ} in model-0.safetensors, which does not hold it"),
    ],
    ids=["no such tensor", "no such shard", "outside", "no name", "another shard"],
)
def test_an_index_that_does_not_say_what_its_shards_hold_is_refused(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    index = sharded(tmp_path)
    save_file({"model.norm.bias": torch.zeros(1)}, tmp_path / "model-0.safetensors")
    index["weight_map"] |= change
    write_index(tmp_path, index)
    with pytest.raises(ModelCheckpointError, match=says):
        load_model(tmp_path, torch.float32, CPU)
    with pytest.raises(CheckpointError, match=says):
        read_shapes(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    index = sharded(tmp_path)
    write_index(tmp_path, index)
    for shard in set(index["weight_map"].values()):
        tensors = load_file(tmp_path / shard) | {Q_PROJ: torch.zeros(64, 64)}
        save_file(tensors, tmp_path / shard, metadata={"format": "pt"})
    with pytest.raises(ModelCheckpointError, match=f"tensor {Q_PROJ} is in model-.* and in model-"):
        load_model(tmp_path, torch.float32, CPU)
