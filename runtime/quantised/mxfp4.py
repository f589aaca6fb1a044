"""Loads experts in MXFP4 as in gpt-oss: 4-bit floats, with one power of two per 32 inputs.

Format: OCP Microscaling Formats 1.0. Tensors `.._blocks` are uint8 [num_experts, columns, groups, 16], with the earlier
input in the low nibble of a byte; `.._scales` are uint8 [num_experts, columns, groups], the exponent plus 127.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wingbeat.kernels.grouped_weight import E2M1, GroupedWeight, Scales, half_powers
from wingbeat.runtime.quantised.packed_loading import Experts, empty_model, load_packed, plain_config
from wingbeat.runtime.tensor_files import ModelCheckpointError
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from wingbeat.runtime.verifier.checkpoints.checkpoint import Place

    Loaded = tuple[PreTrainedModel, Mapping[str, Any]]

_WEIGHTS = {"gate_up": "gate_up_proj", "down": "down_proj"}
"""Names of an expert's weights in the checkpoint, by kind."""
_HALF_BYTES = 16
"""Number of bytes of a group of 32 inputs."""


def load_mxfp4(
    config: ConfigFile, load: "Callable[..., Loaded]", tensors: Mapping[str, Callable[[], Tensor]], place: "Place"
) -> "Loaded":
    """Load the model; returns it and transformers' loading report. Experts stay packed if kernels support MXFP4.

    Args:
        config: config of the checkpoint.
        load: see `checkpoints.load_quantised`.
        tensors: readers of the files' tensors by name.
        place: device and dtype of experts that may stay packed.

    Raises:
        ModelCheckpointError: a tensor is missing or has a wrong shape; the message names the tensor.
    """
    mark, shell, experts = "_blocks", empty_model(plain_config(config)), {}
    held = {name for name in tensors if name.endswith((mark, "_scales"))}
    for name in sorted(name for name in held if name.endswith(f".{_WEIGHTS['down']}{mark}")):
        module = name.rpartition(".")[0]
        counts = {len(_blocks(config, f"{module}.{weight}", tensors)[0]) for weight in _WEIGHTS.values()}
        if len(counts) > 1:
            raise ModelCheckpointError(f"{config.folder}: weights of {module} are of {sorted(counts)} experts")
        biases = {kind: _bias(config, f"{module}.{weight}", tensors) for kind, weight in _WEIGHTS.items()}

        def read(kind: str, expert: int, module: str = module) -> GroupedWeight:
            # The file is mapped anew for each read, because pages count as memory of the process as long as they are
            # mapped.
            return _grouped(*(part[expert] for part in _blocks(config, f"{module}.{_WEIGHTS[kind]}", tensors)))

        experts[module] = Experts(*counts, read, ("gate_up",), biases)
    plain = {name: stored() for name, stored in tensors.items() if name not in held}
    return load_packed(config, load, shell, plain, {}, place, experts)


def _blocks(config: ConfigFile, name: str, tensors: Mapping[str, Callable[[], Tensor]]) -> tuple[Tensor, Tensor]:
    """Blocks and scales of a weight, with checked shapes."""
    missing = next((one for one in (f"{name}_blocks", f"{name}_scales", f"{name}_bias") if one not in tensors), None)
    if missing is not None:
        raise ModelCheckpointError(f"{config.folder}: tensor {missing} is missing")
    blocks, scales = tensors[f"{name}_blocks"](), tensors[f"{name}_scales"]()
    if blocks.dtype != torch.uint8 or blocks.dim() != 4 or blocks.shape[3] != _HALF_BYTES:
        raise ModelCheckpointError(
            f"{config.folder}: tensor {name}_blocks is {blocks.dtype} {list(blocks.shape)}, "
            "uint8 [num_experts, columns, groups, 16] is read"
        )
    if scales.dtype != torch.uint8 or scales.shape != blocks.shape[:3]:
        expected = list(blocks.shape[:3])
        raise ModelCheckpointError(
            f"{config.folder}: tensor {name}_scales is {scales.dtype} {list(scales.shape)}, uint8 {expected} is read"
        )
    return blocks, scales


def _bias(config: ConfigFile, name: str, tensors: Mapping[str, Callable[[], Tensor]]) -> Tensor:
    """Biases [num_experts, columns] of a weight, with checked shape."""
    bias, expected = tensors[f"{name}_bias"](), tensors[f"{name}_blocks"]().shape[:2]
    if bias.shape != expected:
        raise ModelCheckpointError(
            f"{config.folder}: tensor {name}_bias is {list(bias.shape)}, {list(expected)} is expected"
        )
    return bias


def _grouped(blocks: Tensor, scales: Tensor) -> GroupedWeight:
    """An expert's weight from blocks [columns, groups, 16] and scales [columns, groups]."""
    codes = torch.stack([blocks & 15, blocks >> 4], dim=3).flatten(1)
    return GroupedWeight(E2M1, codes, Scales(half_powers(scales)))
