"""Reads the experts of a GGUF file, which has one tensor of each kind (gate, up, down) for all experts of a layer."""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wingbeat.kernels.grouped_weight import GroupedWeight
from wingbeat.runtime.quantised.gguf_blocks import FORMS, grouped_rows
from wingbeat.runtime.quantised.gguf_file import GgufTensor
from wingbeat.runtime.quantised.packed_loading import Experts
from wingbeat.runtime.tensor_files import ModelCheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_KINDS = ("gate", "up", "down")
_BOTH = "gate_up"
"""Kind of a weight whose rows alternate between the gate and the up projection."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class GgufExperts(NamedTuple):
    """Experts of all layers, and the names of the file's tensors that contain the experts."""

    by_module: dict[str, Experts]
    """Experts by module name."""
    biases: dict[str, Tensor]
    """Bias parameters of the model by name."""
    tensors: set[str]
    """Names of the file's tensors that contain the experts."""


def experts_of(file: Path, shell: "PreTrainedModel", tensors: Mapping[str, GgufTensor]) -> GgufExperts:
    """Experts of all modules of the model that have experts.

    Args:
        file: path of the file, for errors.
        shell: the model on the meta device.
        tensors: tensors of the file by name.

    Raises:
        ModelCheckpointError: a tensor is missing, or its number of experts differs from the model's; the message names
            the tensor.
    """
    found = GgufExperts({}, {}, set())
    for name, module in shell.named_modules():
        layer = _LAYER.match(name)
        # `is_concatenated` is an attribute of transformers' expert modules
        if layer is None or not hasattr(module, "is_concatenated"):
            continue
        own = partial(_tensors, file, tensors, f"blk.{layer[1]}.ffn")
        weights, biases = own("weight"), {}
        count = _count(weights["down"])
        for weight in weights.values():
            if len(weight.shape) != 3 or _count(weight) != count:
                raise _misshaped(weight, f"[{count}, columns, inputs]")
        if module.has_bias:
            biases = {kind: _bias(bias, weights[kind]) for kind, bias in own("bias").items()}
            join = torch.cat if module.is_concatenated else _in_turn
            biases[_BOTH] = join([biases["gate"], biases["up"]], dim=1)
            found.biases[f"{name}.gate_up_proj_bias"] = biases[_BOTH]
            found.biases[f"{name}.down_proj_bias"] = biases["down"]
            found.tensors.update(one.name for one in own("bias").values())
        gated = ("gate", "up") if module.is_concatenated else (_BOTH,)
        found.by_module[name] = Experts(count, partial(_read, weights), gated, biases)
        found.tensors.update(one.name for one in weights.values())
    return found


def _tensors(file: Path, tensors: Mapping[str, GgufTensor], layer: str, part: str) -> dict[str, GgufTensor]:
    """Weights or biases of a layer's experts, by kind."""
    names = {kind: f"{layer}_{kind}_exps.{part}" for kind in _KINDS}
    missing = next((name for name in names.values() if name not in tensors), None)
    if missing is not None:
        raise ModelCheckpointError(f"{file}: tensor {missing} of the model's experts is missing")
    return {kind: tensors[name] for kind, name in names.items()}


def _count(weight: GgufTensor) -> int:
    return int(weight.shape[-1])


def _bias(bias: GgufTensor, weight: GgufTensor) -> Tensor:
    """Bias of all experts, float32 [num_experts, columns]."""
    if tuple(bias.shape) != tuple(weight.shape[1:]):
        raise _misshaped(bias, str(list(reversed(weight.shape[1:]))))
    return _floats(bias.data, bias)


def _misshaped(tensor: GgufTensor, expected: str) -> ModelCheckpointError:
    shape = list(reversed(tensor.shape))
    return ModelCheckpointError(
        f"{tensor.file.resolve()}: tensor {tensor.name} has shape {shape}, {expected} is expected"
    )


def _read(tensors: Mapping[str, GgufTensor], kind: str, expert: int) -> GroupedWeight | Tensor:
    """Reads one kind of weight of one expert."""
    if kind != _BOTH:
        return _rows(tensors[kind].part(expert), tensors[kind])
    gate, up = tensors["gate"], tensors["up"]
    parts = [one.part(expert) for one in (gate, up)]
    if gate.tensor_type == up.tensor_type and gate.shape == up.shape:
        return _rows(np.stack(parts, 1).reshape(-1, parts[0].shape[1]), gate)
    return _in_turn([_floats(part, one) for part, one in zip(parts, (gate, up), strict=True)], 0)


def _rows(data: np.ndarray, tensor: GgufTensor) -> GroupedWeight | Tensor:
    return grouped_rows(data, tensor) if tensor.tensor_type.name in FORMS else _floats(data, tensor)


def _floats(data: np.ndarray, tensor: GgufTensor) -> Tensor:
    from gguf import dequantize

    return torch.from_numpy(np.array(dequantize(data, tensor.tensor_type), np.float32))


def _in_turn(parts: list[Tensor], dim: int) -> Tensor:
    """Interleaves tensors along a dimension."""
    return torch.stack(parts, dim=dim + 1).flatten(dim, dim + 1)
