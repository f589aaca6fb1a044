"""Loads the weights of a GGUF file; linear layers stay packed if kernels support their format.

The file has one tensor of each kind (gate, up, down) for all experts of a layer.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from wingbeat.kernels.grouped_weight import GroupedWeight
from wingbeat.runtime.quantised.gguf_blocks import FORMS, grouped_rows
from wingbeat.runtime.quantised.gguf_config import ARCHITECTURES, HEAD
from wingbeat.runtime.quantised.gguf_file import GgufTensor, read_gguf
from wingbeat.runtime.quantised.gguf_head import head_shapes
from wingbeat.runtime.quantised.packed_loading import Experts, empty_model, load_packed, plain_config
from wingbeat.runtime.tensor_files import GGUF_FILE, ModelCheckpointError
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile

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


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from wingbeat.runtime.verifier.checkpoints.checkpoint import Place

    Loaded = tuple[PreTrainedModel, Mapping[str, Any]]

logger = logging.getLogger(__name__)


_OF_THE_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
LENT = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}
"""Tensors that drafters borrow from their verifier: names in GGUF to names in transformers."""
_ROWS_AT_ONCE = 1024


def load_gguf(config: ConfigFile, load: Callable[..., "Loaded"], packed: "Place | None") -> "Loaded":
    """Load the model in float32, except matrices that stay packed. Returns the model and transformers' loading report.

    Args:
        config: config of the folder.
        load, packed: see `checkpoints.load_quantised`.

    Raises:
        ModelCheckpointError: the file is damaged.
    """
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    file = read_gguf(config.folder / GGUF_FILE)
    shell = empty_model(plain_config(config))
    architecture = file.fields["general.architecture"]
    kind = TENSOR_PROCESSORS.get(ARCHITECTURES[architecture].tensors_of or architecture, TensorProcessor)
    processor = kind(config=shell.config.to_dict())
    names = _names(shell, processor, architecture)
    experts = experts_of((config.folder / GGUF_FILE).resolve(), shell, {tensor.name: tensor for tensor in file.tensors})
    matrices, others = {}, []
    for tensor in file.tensors:
        if tensor.name in experts.tensors:
            continue
        if tensor.name in names and (read := _grouped(tensor, processor)) is not None:
            matrices[names[tensor.name]] = read
        else:
            others.append(tensor)
    forms = Counter(one.tensor_type.name for one in file.tensors)
    logger.info("Tensors of the file: %s", ", ".join(f"{count} {form}" for form, count in forms.most_common()))
    plain = _dense(others, processor, names) | experts.biases
    return load_packed(config, load, shell, plain, matrices, packed, experts.by_module)


def lent_tensors(folder: Path) -> dict[str, Callable[[], Tensor]] | None:
    """Readers of embedding and output matrix, in float32, by transformers' names; None for folders without a GGUF file.

    Raises:
        ModelCheckpointError: the file is damaged.
    """
    if not (folder / GGUF_FILE).exists():
        return None
    tensors = {one.name: one for one in read_gguf(folder / GGUF_FILE).tensors}
    return {name: partial(_as_floats, tensors[own]) for own, name in LENT.items() if own in tensors}


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Tensor shapes of a GGUF folder, by the file's names or a draft head's names; None for other folders."""
    if not (folder / GGUF_FILE).exists():
        return None
    file = read_gguf(folder / GGUF_FILE)
    if file.fields.get("general.architecture") == HEAD:
        return head_shapes(file)
    return {one.name: tuple(map(int, reversed(one.shape))) for one in file.tensors}


def _as_floats(tensor: GgufTensor) -> Tensor:
    """A matrix, dequantised in slices of rows, because temporary tensors for all rows would need several times the
    matrix's memory.
    """
    from gguf import dequantize

    packed, made = tensor.data, torch.empty(tuple(reversed(tensor.shape)))
    for begin in range(0, len(packed), _ROWS_AT_ONCE):
        rows = packed[begin : begin + _ROWS_AT_ONCE]
        made[begin : begin + len(rows)] = torch.from_numpy(np.asarray(dequantize(rows, tensor.tensor_type)))
    return made


def _names(model: "PreTrainedModel", processor: Any, architecture: str) -> dict[str, str]:
    """Names of tensors in transformers by names in the file."""
    import gguf
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    # The table is cached, because transformers would build the table again for each module, which takes 0.1 s each
    # time.
    with mock.patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)):
        names = get_gguf_hf_weights_map(model, processor, model_type=architecture)
    layers, more = range(model.config.num_hidden_layers), ARCHITECTURES[architecture].names
    for layer in layers:
        names |= {f"blk.{layer}.{own}": f"model.layers.{layer}.{name}" for own, name in more.items()}
    return names


def _dense(tensors: list[Any], processor: Any, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Dequantised tensors in float32 by transformers' names, after transformers' processing."""
    from gguf import dequantize

    read: dict[str, dict[str, Tensor]] = {"tensors": {}}
    for tensor in tensors:
        made = processor.process(
            weights=dequantize(tensor.data, tensor.tensor_type),
            name=tensor.name,
            tensor_key_mapping=names,
            parsed_parameters=read,
        )
        if made.name in names:
            read["tensors"][names[made.name]] = torch.from_numpy(np.array(made.weights))
        elif made.name not in _OF_THE_CONFIG:
            raise ModelCheckpointError(f"{tensor.file.resolve()}: the model has no place for tensor {made.name}")
    return read["tensors"]


def _grouped(tensor: Any, processor: Any) -> Callable[[], GroupedWeight] | None:
    """Reader of a packed matrix, with rows in transformers' order. None if the kernels do not support the format, or if
    transformers processes the tensor in another way than by reordering rows.
    """
    form = tensor.tensor_type.name
    if form not in FORMS or len(tensor.shape) != 2:
        return None
    rows = np.arange(int(tensor.shape[1]))[:, None]
    order = processor.process(weights=rows, name=tensor.name).weights
    if not np.array_equal(np.sort(order, axis=0), rows):
        return None

    def read() -> GroupedWeight:
        in_order = np.array_equal(order, rows)
        return grouped_rows(tensor.data if in_order else tensor.data[order[:, 0]], tensor)

    return read
