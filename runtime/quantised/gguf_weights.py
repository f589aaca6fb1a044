"""Weights of a GGUF file: as transformers reads them, and those of linear layers as they lie on disk where kernels
multiply by such."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from wingbeat.kernels.grouped_weight import GroupedWeight
from wingbeat.runtime.quantised.gguf_blocks import FORMS
from wingbeat.runtime.quantised.gguf_config import ARCHITECTURES
from wingbeat.runtime.quantised.gguf_file import GgufTensor, read_gguf
from wingbeat.runtime.quantised.packed_loading import (
    Experts,
    empty_model,
    has_plain_experts,
    load_packed,
    plain_config,
)
from wingbeat.runtime.tensor_files import GGUF_FILE, ModelCheckpointError
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from wingbeat.runtime.verifier.checkpoints.checkpoint import Place

    Loaded = tuple[PreTrainedModel, Mapping[str, Any]]

logger = logging.getLogger(__name__)


_OF_THE_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
LENT = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}
"""Tensors that drafters share with their verifier, as GGUF and transformers name them."""
_EXPERTS = re.compile(r"(.+\.ffn_)(gate|up|down)(_exps\.weight)")
_ROWS_AT_ONCE = 1024


def load_gguf(config: ConfigFile, load: Callable[..., "Loaded"], packed: "Place | None") -> "Loaded":
    """The model in float32 with transformers' report of what was loaded; matrices stay as they lie in the file.

    Args:
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
    modules = dict(shell.named_modules())
    experts = _experts({tensor.name: tensor for tensor in file.tensors}, names)
    experts = {name: own for name, own in experts.items() if has_plain_experts(modules.get(name))}
    matrices, others = {}, []
    for tensor in file.tensors:
        read = _grouped(tensor, processor) if tensor.name in names else None
        if read is not None:
            matrices[names[tensor.name]] = read
        elif _module_of_experts(tensor.name, names) not in experts:
            others.append(tensor)
    forms = Counter(one.tensor_type.name for one in file.tensors)
    logger.info("Tensors of the file: %s", ", ".join(f"{count} {form}" for form, count in forms.most_common()))
    return load_packed(config, load, shell, _dense(others, processor, names), matrices, packed, experts)


def lent_tensors(folder: Path) -> dict[str, Callable[[], Tensor]] | None:
    """Readers of the embedding and of the output matrix of a folder that stands for a GGUF file, in float32, by
    transformers' names; None for other folders.

    Raises:
        ModelCheckpointError: the file is damaged.
    """
    if not (folder / GGUF_FILE).exists():
        return None
    tensors = {one.name: one for one in read_gguf(folder / GGUF_FILE).tensors}
    return {name: partial(_as_floats, tensors[own]) for own, name in LENT.items() if own in tensors}


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Shapes of the tensors of a folder that stands for a GGUF file, by the file's names; None for other folders."""
    if not (folder / GGUF_FILE).exists():
        return None
    return {one.name: tuple(map(int, reversed(one.shape))) for one in read_gguf(folder / GGUF_FILE).tensors}


def _as_floats(tensor: GgufTensor) -> Tensor:
    """A matrix, unpacked some rows at a time: what is computed for all of them is several times as large."""
    from gguf import dequantize

    packed, made = tensor.data, torch.empty(tuple(reversed(tensor.shape)))
    for begin in range(0, len(packed), _ROWS_AT_ONCE):
        rows = packed[begin : begin + _ROWS_AT_ONCE]
        made[begin : begin + len(rows)] = torch.from_numpy(np.asarray(dequantize(rows, tensor.tensor_type)))
    return made


def _names(model: "PreTrainedModel", processor: Any, architecture: str) -> dict[str, str]:
    """Transformers' names of tensors by those of the file."""
    import gguf
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    # It asks for the same table at every module, and a table takes a tenth of a second.
    with mock.patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)):
        return get_gguf_hf_weights_map(model, processor, model_type=architecture)


def _dense(tensors: list[Any], processor: Any, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors in float32 by transformers' names, as it has them."""
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
        elif made.name is not None and made.name not in _OF_THE_CONFIG:  # experts were put among the others
            raise ModelCheckpointError(f"the model has no place for tensor {made.name}")
    return read["tensors"]


def _experts(tensors: Mapping[str, GgufTensor], names: Mapping[str, str]) -> dict[str, Experts]:
    """Experts that have all of their weights in forms that stay packed, by the name of their module."""
    found = {}
    for name in tensors:
        if (module := _module_of_experts(name, names)) is None:
            continue
        own = {kind: tensors.get(_EXPERTS.sub(rf"\1{kind}\3", name)) for kind in ("gate", "up", "down")}
        if all(one is not None and one.tensor_type.name in FORMS for one in own.values()):
            found[module] = Experts(int(own["down"].shape[2]), partial(_read_expert, own))
    return found


def _module_of_experts(name: str, names: Mapping[str, str]) -> str | None:
    """The module that a tensor of experts belongs to; None for other tensors."""
    own = names.get(name.removesuffix(".weight")) if _EXPERTS.fullmatch(name) else None
    return None if own is None else own.rpartition(".")[0]


def _read_expert(tensors: Mapping[str, GgufTensor], kind: str, expert: int) -> GroupedWeight:
    return _read_blocks(tensors[kind].part(expert), tensors[kind])


def _read_blocks(data: np.ndarray, tensor: GgufTensor) -> GroupedWeight:
    """Rows of a form's blocks."""
    layout = FORMS[tensor.tensor_type.name]
    inputs = int(tensor.shape[0])
    return layout.read(torch.from_numpy(data).view(len(data), inputs // layout.inputs, layout.size))


def _grouped(tensor: Any, processor: Any) -> Callable[[], GroupedWeight] | None:
    """Reads a matrix, its rows in transformers' order; None for other forms, and where more is done to it."""
    form = tensor.tensor_type.name
    if form not in FORMS or len(tensor.shape) != 2:
        return None
    rows = np.arange(int(tensor.shape[1]))[:, None]
    order = processor.process(weights=rows, name=tensor.name).weights
    if not np.array_equal(np.sort(order, axis=0), rows):
        return None

    def read() -> GroupedWeight:
        in_order = np.array_equal(order, rows)
        return _read_blocks(tensor.data if in_order else tensor.data[order[:, 0]], tensor)

    return read
