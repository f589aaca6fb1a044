"""Quantised checkpoints are served by the numbers that their weights stand for."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.runtime.models import TREE, eagle_drafter, engine_config, generate, greedy_params, random_model
from wingbeat.runtime.quantised import checkpoints as quantised
from wingbeat.runtime.tensor_files import ModelCheckpointError
from wingbeat.runtime.verifier.loading.loader import load_model
from wingbeat.runtime.verifier_errors import UnsupportedModelError

CPU, GROUP = torch.device("cpu"), 16
Packed = tuple[dict[str, Tensor], Tensor]
"""A layer's tensors by the end of their names, and the weight [out, in] that they stand for."""


def save_quantised(
    folder: Path, pack: Callable[[Tensor], Packed], config: dict[str, Any], model: str = "llama"
) -> dict[str, Tensor]:
    """A small model whose projections are packed; returns the weights they stand for."""
    random_model(model).save_pretrained(folder)
    tensors, meant = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")):
            parts, meant[name] = pack(tensor)
            tensors |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in parts.items()}
        else:
            tensors[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    return meant


def fp8_blocks(weight: Tensor) -> Packed:
    scale = weight.abs().max() / 448
    rounded = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": rounded, "weight_scale_inv": scale[None, None]}, rounded.float() * scale


def in_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Integers of four bits [in, out], zeros and scales [groups, out], and the weight that they stand for."""
    grouped = weight.t().unflatten(0, (-1, GROUP))
    low, high = grouped.amin(1), grouped.amax(1)
    scales = ((high - low) / 14).half()
    zeros = (1 - low / scales.float()).round().clamp(1, 15).int()
    numbers = (grouped / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 15).int()
    meant = (numbers - zeros[:, None]) * scales.float()[:, None]
    return numbers.flatten(0, 1), zeros, scales, meant.flatten(0, 1).t()


def packed(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight neighbours of the last dimension to an int32, those of `order` from its lowest bits up."""
    eights = numbers.unflatten(-1, (-1, 8))[..., order].long()
    whole = (eights << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(whole >= 2**31, whole - 2**32, whole).int()


def gptq(weight: Tensor) -> Packed:
    numbers, zeros, scales, meant = in_groups(weight)
    groups = (torch.arange(len(numbers)) // GROUP).int()
    parts = {"qweight": packed(numbers.t()).t(), "qzeros": packed(zeros - 1), "scales": scales, "g_idx": groups}
    return parts, meant


def gptq_by_activation(weight: Tensor) -> Packed:
    """Inputs of a group lie anywhere."""
    parts, meant = gptq(weight)
    shuffled = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
    numbers, _, _, _ = in_groups(weight)
    parts |= {"qweight": packed(numbers[shuffled].t()).t(), "g_idx": parts["g_idx"][shuffled]}
    return parts, meant[:, shuffled]


def awq(weight: Tensor) -> Packed:
    numbers, zeros, scales, meant = in_groups(weight)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": packed(numbers, order), "qzeros": packed(zeros, order), "scales": scales}, meant


def eight_bits_by_activation(weight: Tensor) -> Packed:
    """GPTQ of eight bits, whose zeros go up to 256, the groups of its inputs in another order."""
    grouped = weight.t().unflatten(0, (-1, GROUP))
    scales = (grouped.abs().amax(1) / 255).half()
    zeros = torch.where(grouped.sum(1) > 0, 1, 256).int()
    numbers = (grouped / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 255).int()
    meant = ((numbers - zeros[:, None]) * scales.float()[:, None]).flatten(0, 1).t()
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
    groups = (torch.arange(weight.shape[1]) // GROUP).int()[order]
    parts = {"qweight": whole(numbers.flatten(0, 1)[order].t(), 8).t(), "qzeros": whole(zeros - 1, 8)}
    return parts | {"scales": scales, "g_idx": groups}, meant[:, order]


def whole(numbers: Tensor, num_bits: int) -> Tensor:
    """Neighbours of the last dimension to an int32, the first in its lowest bits."""
    parts = numbers.unflatten(-1, (-1, 32 // num_bits)).long() << torch.arange(0, 32, num_bits)
    found = parts.sum(-1)
    return torch.where(found >= 2**31, found - 2**32, found).int()


def pack_quantized(weight: Tensor, zeroed: bool) -> Packed:
    """Groups of an output, four bits around zero, with zero points or without."""
    numbers, zeros, scales, meant = in_groups(weight)
    if not zeroed:
        zeros = torch.full_like(zeros, 8)
        meant = ((numbers.unflatten(0, (-1, GROUP)) - 8) * scales.float()[:, None]).flatten(0, 1).t()
    parts = {
        "weight_packed": whole(numbers.t(), 4),
        "weight_scale": scales.t(),
        "weight_shape": torch.tensor(weight.shape),
    }
    return parts | ({"weight_zero_point": whole(zeros, 4).t()} if zeroed else {}), meant


def float_quantized(weight: Tensor) -> Packed:
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    rounded = (weight / scale.float()).to(torch.float8_e4m3fn)
    return {"weight": rounded, "weight_scale": scale}, rounded.float() * scale.float()


def int_quantized(weight: Tensor) -> Packed:
    scale = weight.abs().amax(1, keepdim=True) / 127
    rounded = (weight / scale).round().to(torch.int8)
    return {"weight": rounded, "weight_scale": scale}, rounded.float() * scale


def fp8_cut_blocks(weight: Tensor) -> Packed:
    """Squares of 48, the last of which are cut off."""
    rows, columns = weight.shape
    scale = torch.rand(-(-rows // 48), -(-columns // 48), generator=torch.Generator().manual_seed(rows)) / 300 + 1e-3
    spread = scale.repeat_interleave(48, 0)[:rows].repeat_interleave(48, 1)[:, :columns]
    rounded = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": rounded, "weight_scale_inv": scale}, rounded.float() * spread


COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {"all": {"weights": {"num_bits": 4}}}}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq", "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


CASES = {
    "fp8": (fp8_blocks, FP8),
    "fp8, cut blocks": (fp8_cut_blocks, FP8 | {"weight_block_size": [48, 48]}),
    "gptq": (gptq, GPTQ),
    "gptq by activation": (gptq_by_activation, GPTQ),
    "gptq of eight bits": (eight_bits_by_activation, GPTQ | {"bits": 8}),
    "awq": (awq, AWQ),
    "packed": (partial(pack_quantized, zeroed=False), COMPRESSED | {"format": "pack-quantized"}),
    "packed with zeros": (partial(pack_quantized, zeroed=True), COMPRESSED | {"format": "pack-quantized"}),
    "float-quantized": (float_quantized, COMPRESSED | {"format": "float-quantized"}),
    "int-quantized": (int_quantized, COMPRESSED | {"format": "int-quantized"}),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("case", CASES)
def test_weights_are_what_was_packed_and_speculation_changes_no_token(tmp_path, case):
    meant = save_quantised(tmp_path, *CASES[case])
    loaded = load_model(tmp_path, torch.float32, CPU)
    held = loaded.model.state_dict()
    for name, weight in meant.items():
        torch.testing.assert_close(held[name], weight, rtol=0, atol=0)
    prompts = [[5, 6, 7], list(range(1, 30))]
    plain, _ = generate(loaded, engine_config(), None, prompts, greedy_params(16))
    original = random_model("llama")
    original.load_state_dict(meant, strict=False)
    expected = [original.generate(torch.tensor([p]), max_new_tokens=16, do_sample=False) for p in prompts]
    assert plain == [tokens[0, len(p) :].tolist() for tokens, p in zip(expected, prompts, strict=True)]
    tokens, _ = generate(loaded, engine_config(TREE), eagle_drafter(loaded, TREE), prompts, greedy_params(16))
    assert tokens == plain


def save_mxfp4(folder: Path) -> None:
    """A small gpt-oss with random experts."""
    random_model("gpt_oss").save_pretrained(folder)
    tensors, chance = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in list(tensors):
        if name.endswith(("gate_up_proj", "down_proj")):
            num_experts, inputs, outputs = tensors.pop(name).shape
            blocks = (num_experts, outputs, inputs // 32, 16)
            tensors[f"{name}_blocks"] = torch.randint(256, blocks, generator=chance, dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(118, 122, blocks[:3], generator=chance, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))


def test_experts_in_mxfp4_are_numbers_of_the_models_dtype(tmp_path):
    save_mxfp4(tmp_path)
    loaded = load_model(tmp_path, torch.float32, CPU)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    tokens, _ = generate(loaded, engine_config(TREE), eagle_drafter(loaded, TREE), [[5, 6, 7]], greedy_params(12))
    assert tokens == generate(loaded, engine_config(), None, [[5, 6, 7]], greedy_params(12))[0]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (GPTQ | {"bits": 3}, "bits is 3; of gptq, 2, 4, 8 can be read"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        (AWQ | {"version": "gemv"}, "version is 'gemv'; of awq, gemm can be read"),
    ],
    ids=["bits", "gptq", "awq"],
)
def test_other_ways_to_pack_are_refused_by_field(tmp_path, config, says):
    save_quantised(tmp_path, gptq, config)
    with pytest.raises(ModelCheckpointError, match=says):
        load_model(tmp_path, torch.float32, CPU)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda parts: parts.pop("scales"), r"q_proj\.scales is missing"),
        (lambda parts: parts.update(qzeros=parts["qzeros"][:-1]), "q_proj do not fit together: qweight"),
        (lambda parts: parts["g_idx"].fill_(-1), r"q_proj\.g_idx does not name one of 4 groups for 64 inputs"),
        (lambda parts: parts["g_idx"].fill_(4), r"q_proj\.g_idx does not name one of 4 groups for 64 inputs"),
    ],
    ids=["missing", "mis-shaped", "group below", "group above"],
)
def test_parts_that_do_not_fit_together_are_named(tmp_path, change, says):
    save_quantised(tmp_path, gptq, GPTQ)
    file, layer = tmp_path / "model.safetensors", "model.layers.0.self_attn.q_proj."
    tensors = load_file(file)
    parts = {name.removeprefix(layer): tensors.pop(name) for name in list(tensors) if name.startswith(layer)}
    change(parts)
    save_file(tensors | {layer + part: tensor.contiguous() for part, tensor in parts.items()}, file)
    with pytest.raises(ModelCheckpointError, match=says):
        load_model(tmp_path, torch.float32, CPU)


@pytest.mark.parametrize(
    ("case", "change", "says"),
    [
        ("fp8", lambda parts: parts.pop("weight_scale_inv"), r"q_proj.weight is torch.float8_e4m3fn, but has no scale"),
        ("fp8", lambda parts: parts["weight"].view(torch.uint8).fill_(0x7F), r"q_proj.weight or its scales hold NaN"),
        (
            "float-quantized",
            lambda parts: parts["weight_scale"].fill_(torch.nan),
            r"q_proj.weight or its scales hold NaN",
        ),
        ("packed", lambda parts: parts.pop("weight_scale"), r"q_proj.weight_packed"),
        (
            "packed",
            lambda parts: parts.update(weight_packed=parts["weight_packed"].repeat(1, 2)),
            r"q_proj.weight_packed is \[64, 16\], not \[64, 64\] numbers of 4 bits",
        ),
        (
            "packed",
            lambda parts: parts.update(weight_g_idx=torch.full((64,), -1)),
            r"q_proj.weight_g_idx does not name one of 4 groups",
        ),
    ],
)
def test_a_weight_that_cannot_be_meant_is_named(tmp_path, case, change, says):
    save_quantised(tmp_path, *CASES[case])
    file, layer = tmp_path / "model.safetensors", "model.layers.0.self_attn.q_proj."
    tensors = load_file(file)
    parts = {name.removeprefix(layer): tensors.pop(name) for name in list(tensors) if name.startswith(layer)}
    change(parts)
    save_file(tensors | {layer + part: tensor.contiguous() for part, tensor in parts.items()}, file)
    with pytest.raises(ModelCheckpointError, match=says):
        load_model(tmp_path, torch.float32, CPU)


def test_scales_of_a_quantised_kv_cache_are_passed_over(tmp_path):
    save_quantised(tmp_path, *CASES["fp8"])
    file, layer = tmp_path / "model.safetensors", "model.layers.0.self_attn."
    save_file(load_file(file) | {f"{layer}k_scale": torch.ones(1), f"{layer}v_scale": torch.ones(1)}, file)
    load_model(tmp_path, torch.float32, CPU)
    save_file(load_file(file) | {f"{layer}other_scale": torch.ones(1)}, file)
    with pytest.raises(ModelCheckpointError, match=r"1 unexpected tensor: .*\.other_scale"):
        load_model(tmp_path, torch.float32, CPU)


def test_a_quantiser_that_is_not_installed_is_named(tmp_path, monkeypatch):
    save_quantised(tmp_path, gptq, {"quant_method": "compressed-tensors"})
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    with pytest.raises(ModelCheckpointError, match="quantised by compressed-tensors: install compressed-tensors"):
        load_model(tmp_path, torch.float32, CPU)


def by_bitsandbytes(folder: Path, bits: int) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=config).save_pretrained(folder)


def by_torchao(folder: Path) -> None:
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    config = TorchAoConfig(Int8WeightOnlyConfig())
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=config).save_pretrained(folder)


def by_compressed_tensors(folder: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme

    model = random_model("llama")
    scheme = preset_name_to_scheme("W8A16", ["Linear"])
    scheme.weights = scheme.weights.model_copy(update={"strategy": "channel", "group_size": None})
    groups = {"linears": scheme}
    config = QuantizationConfig(
        config_groups=groups, ignore=["lm_head"], quantization_status="frozen", format="pack-quantized"
    )
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data.copy_(module.weight.data.abs().amax(1, keepdim=True) / 127)
    ModelCompressor(quantization_config=config).compress_model(model)
    save_file({n: t.contiguous() for n, t in model.state_dict().items()}, folder / "model.safetensors")
    file, said = folder / "config.json", config.model_dump(mode="json") | {"quant_method": "compressed-tensors"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": said}))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "quantise",
    [lambda f: by_bitsandbytes(f, 4), lambda f: by_bitsandbytes(f, 8), by_torchao, by_compressed_tensors],
    ids=["bitsandbytes 4", "bitsandbytes 8", "torchao", "compressed-tensors"],
)
def test_what_their_own_packages_packed_is_near_what_it_was(tmp_path, quantise, dtype):
    random_model("llama").save_pretrained(tmp_path)
    quantise(tmp_path)
    loaded = load_model(tmp_path, dtype, CPU)
    weights = {name: tensor for name, tensor in loaded.model.state_dict().items() if name.endswith("_proj.weight")}
    assert {tensor.dtype for tensor in weights.values()} == {dtype}
    original = random_model("llama").state_dict()
    for name, tensor in weights.items():
        assert (tensor.float() - original[name]).norm() < 0.3 * original[name].norm(), name


def test_a_checkpoint_that_was_digits_is_refused(tmp_path):
    random_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(UnsupportedModelError, match=r"^dtype is int8 and LlamaForCausalLM is quantised: "):
        load_model(tmp_path, torch.float32, CPU, eight_bits=True)
