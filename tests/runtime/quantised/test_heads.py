"""Heads of eight and four bits are read as the numbers that these stand for, whoever packed them."""

import pytest
import torch
from safetensors.torch import load_file

from tests.runtime.heads.head_folder import edit_config, edit_tensors, load
from wingbeat.runtime.heads.files import CheckpointError
from wingbeat.runtime.heads.plain_weights import plain_shapes, plain_tensors

LAYERS = ("fc", "midlayer.self_attn.q_proj", "midlayer.self_attn.o_proj")
FP8 = {"quant_method": "fp8", "weight_block_size": [4, 8]}
INT4 = {"weights": {"num_bits": 4, "group_size": 8, "symmetric": True}}


def int4(symmetric):
    groups = {"group_0": {"weights": INT4["weights"] | {"symmetric": symmetric}}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def packed(numbers, num_bits):
    """Unsigned [a, b] -> int32 [a, b * num_bits / 32], lowest bits first."""
    each = 32 // num_bits
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // each, dtype=torch.int64)
    for place in range(each):
        words |= numbers[:, place::each].long() << (num_bits * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def blocks(weight, rows, columns):
    """Weights whose squares of a size have a scale each, and what is read of them."""
    out, inner = weight.shape
    scale = 0.01 + torch.rand(-(-out // rows), -(-inner // columns))
    spread = scale.repeat_interleave(rows, 0)[:out].repeat_interleave(columns, 1)[:, :inner]
    values = (weight / spread).clamp(-400, 400).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale_inv": scale}, values.float() * spread


def scaled(weight, scale, name="weight_scale"):
    """Weights of eight bits beside a scale of all or of each row."""
    values = (weight / scale).clamp(-400, 400).to(torch.float8_e4m3fn)
    return {"weight": values, name: scale, "input_scale": torch.ones(1)}, values.float() * scale


def int8(weight):
    scale = torch.rand(len(weight), 1) / 50
    values = (weight / scale).round().clamp(-127, 127).to(torch.int8)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def grouped(weight, symmetric):
    """compressed-tensors' four bits in groups of eight inputs."""
    out, inner = weight.shape
    scale, signed = torch.rand(out, inner // 8), torch.randint(-8, 8, (out, inner))
    parts = {"weight_packed": packed(signed + 8, 4), "weight_scale": scale, "weight_shape": torch.tensor([out, inner])}
    zeros = torch.zeros(out, inner // 8, dtype=torch.int64)
    if not symmetric:
        zeros = torch.randint(-8, 8, (out, inner // 8))
        parts["weight_zero_point"] = packed((zeros + 8).t().contiguous(), 4).t().contiguous()
    return parts, (signed - zeros.repeat_interleave(8, 1)).float() * scale.repeat_interleave(8, 1)


def gptq(weight):
    """GPTQ's four bits in groups of eight inputs, zeros less one."""
    out, inner = weight.shape
    numbers, zeros = torch.randint(0, 16, (inner, out)), torch.randint(1, 16, (inner // 8, out))
    scale = torch.rand(inner // 8, out)
    parts = {
        "qweight": packed(numbers.t().contiguous(), 4).t().contiguous(),
        "qzeros": packed(zeros - 1, 4),
        "scales": scale,
        "g_idx": torch.arange(inner, dtype=torch.int32) // 8,
    }
    return parts, ((numbers - zeros.repeat_interleave(8, 0)) * scale.repeat_interleave(8, 0)).t()


WAYS = {
    "fp8 squares": (FP8, lambda weight: blocks(weight, 4, 8)),
    "fp8 rows": ({"quant_method": "compressed-tensors"}, lambda weight: scaled(weight, torch.rand(len(weight), 1) / 9)),
    "fp8 whole": ({"quant_method": "modelopt", "quant_algo": "FP8"}, lambda weight: scaled(weight, torch.tensor(0.02))),
    "int8 rows": ({"quant_method": "compressed-tensors", "format": "int-quantized"}, int8),
    "int4 symmetric": (int4(True), lambda weight: grouped(weight, True)),
    "int4 with zeros": (int4(False), lambda weight: grouped(weight, False)),
    "gptq": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq"}, gptq),
}


def quantise(folder, settings, way):
    """Quantise some of a head's layers; what must be read of them."""
    expected = {}

    def edit(tensors):
        for layer in LAYERS:
            parts, expected[layer] = way(tensors.pop(f"{layer}.weight").float())
            tensors |= {f"{layer}.{name}": part for name, part in parts.items()}

    torch.manual_seed(5)
    edit_tensors(folder, edit)
    edit_config(folder, quantization_config=settings)
    return expected


@pytest.mark.parametrize("name", WAYS)
def test_a_quantised_head_is_read_as_its_numbers(name, folder):
    settings, way = WAYS[name]
    expected = quantise(folder, settings, way)
    head = load(folder)
    queries = len(expected["midlayer.self_attn.q_proj"])
    torch.testing.assert_close(head.fc.weight, expected["fc"])
    torch.testing.assert_close(head.qkv_proj.weight[:queries], expected["midlayer.self_attn.q_proj"])
    torch.testing.assert_close(head.o_proj.weight, expected["midlayer.self_attn.o_proj"])


@pytest.mark.parametrize("name", WAYS)
def test_shapes_are_told_without_values(name, folder):
    settings, way = WAYS[name]
    quantise(folder, settings, way)
    raw, tensors = {"quantization_config": settings}, load_file(folder / "model.safetensors")
    shapes = plain_shapes(raw, {key: tuple(tensor.shape) for key, tensor in tensors.items()})
    assert shapes == {key: tuple(tensor.shape) for key, tensor in plain_tensors(raw, tensors).items()}


@pytest.mark.parametrize(
    ("settings", "edit", "message"),
    [
        (FP8, lambda t: t.update({"fc.weight_scale": torch.ones(3, 5)}), r"scales \[3, 5\] of fc.weight do not fit"),
        (FP8, lambda t: t.update({"lm.weight_scale_inv": torch.ones(1)}), "missing tensor lm.weight beside its scale"),
        ({}, lambda t: t.update({"fc.weight_scale_2": torch.ones(1)}), "NVFP4"),
        ({"quant_method": "x"}, lambda t: t.update({"fc.qweight": torch.ones(1)}), "quant_method='x' with packed"),
        (
            int4(True) | {"bits": 3},
            lambda t: t.update({"fc.weight_packed": torch.ones(2, 2, dtype=torch.int32)}),
            "quantised to 3 bits is not supported",
        ),
        (
            int4(True),
            lambda t: t.update({"fc.weight_packed": torch.ones(16, 6, dtype=torch.int32)}),
            "missing tensor fc.weight_scale",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(settings, edit, message, folder):
    edit_tensors(folder, edit)
    edit_config(folder, quantization_config=settings)
    with pytest.raises(CheckpointError, match=message):
        load(folder)
