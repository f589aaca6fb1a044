"""Weights of a GGUF file: as transformers reads them, and those of linear layers as they lie on disk where kernels
multiply by such."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from wingbeat.kernels.layer.grouped_weight import GROUP, GroupedWeight
from wingbeat.runtime.hugging_face import build_model, generation_of, make_config
from wingbeat.runtime.parts import hooks
from wingbeat.runtime.quantised.gguf_folder import open_reader
from wingbeat.runtime.tensor_files import GGUF_FILE
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    Loaded = tuple[PreTrainedModel, Mapping[str, Any]]

logger = logging.getLogger(__name__)


def _halves(blocks: Tensor, begin: int) -> Tensor:
    """float16 [rows, blocks] that lie in bytes from `begin` on of each block [rows, blocks, bytes]."""
    return blocks[:, :, begin : begin + 2].contiguous().view(torch.float16).squeeze(2)


def _nibbles(blocks: Tensor, begin: int) -> Tensor:
    """uint8 [rows, inputs]: numbers 0 to 15, the first half of a block in the lower halves of its bytes."""
    pairs = blocks[:, :, begin:]
    return torch.cat([pairs & 15, pairs >> 4], dim=2).flatten(1)


def _q8_0(blocks: Tensor) -> GroupedWeight:
    return GroupedWeight(blocks[:, :, 2:].contiguous().view(torch.int8).flatten(1), _halves(blocks, 0))


def _q4_0(blocks: Tensor) -> GroupedWeight:
    return GroupedWeight(_nibbles(blocks, 2), _halves(blocks, 0), offset=-8.0)


def _q4_1(blocks: Tensor) -> GroupedWeight:
    return GroupedWeight(_nibbles(blocks, 4), _halves(blocks, 0), _halves(blocks, 2))


def _fives(blocks: Tensor, begin: int) -> Tensor:
    """int8 [rows, inputs]: numbers 0 to 31, their highest bits in four bytes before the others."""
    bits = torch.arange(8, dtype=torch.uint8)
    high = (blocks[:, :, begin : begin + 4, None] >> bits & 1).flatten(2).flatten(1)
    return (_nibbles(blocks, begin + 4) | high << 4).to(torch.int8)


def _q5_0(blocks: Tensor) -> GroupedWeight:
    return GroupedWeight(_fives(blocks, 2) - 16, _halves(blocks, 0))


def _q5_1(blocks: Tensor) -> GroupedWeight:
    return GroupedWeight(_fives(blocks, 4), _halves(blocks, 0), _halves(blocks, 2))


FORMS: dict[str, tuple[int, Callable[[Tensor], GroupedWeight]]] = {
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
}
"""Forms that kernels multiply by: bytes of a block of `GROUP` numbers, and what reads blocks [rows, blocks, bytes]."""


LENT = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}
"""Tensors that drafters share with their verifier, as GGUF and transformers name them."""


def load_gguf(config: ConfigFile, load: Callable[..., "Loaded"]) -> "Loaded":
    """The model in float32 with transformers' report; linear layers know their weights as they lie in the file.

    Raises:
        ModelCheckpointError: the file is damaged.
    """
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    reader = open_reader(config.folder / GGUF_FILE)
    plain = make_config(config.fields, config.folder, config.name)
    del plain.quantization_config
    with torch.device("meta"):
        shell = build_model(plain)
    processor = TENSOR_PROCESSORS.get(plain.model_type, TensorProcessor)(config=plain.to_dict())
    names = _names(shell, processor)
    packed = {
        names[one.name]: weight
        for one in reader.tensors
        if one.name in names and (weight := _grouped(one, processor)) is not None
    }
    dense = _dense([one for one in reader.tensors if names.get(one.name) not in packed], processor, names)
    state = dense | {name: weight.dense() for name, weight in packed.items()}
    model, info = load(type(shell), None, config=plain, state_dict=state)
    if (config.folder / "generation_config.json").is_file():
        model.generation_config = generation_of(config.folder)["generation_config"]
    for keep in hooks("keep_groups"):
        keep(model, packed)
    forms = Counter(one.tensor_type.name for one in reader.tensors)
    logger.info("Tensors of the file: %s", ", ".join(f"{count} {form}" for form, count in forms.most_common()))
    return model, info


def lent_tensors(folder: Path) -> dict[str, Callable[[], Tensor]] | None:
    """Readers of the embedding and of the output matrix of a folder that stands for a GGUF file, in float32, by
    transformers' names; None for other folders.

    Raises:
        ModelCheckpointError: the file is damaged.
    """
    if not (folder / GGUF_FILE).exists():
        return None
    tensors = {one.name: one for one in open_reader(folder / GGUF_FILE).tensors}
    return {name: partial(_as_floats, tensors[own]) for own, name in LENT.items() if own in tensors}


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Shapes of the tensors of a folder that stands for a GGUF file, by the file's names; None for other folders."""
    if not (folder / GGUF_FILE).exists():
        return None
    return {one.name: tuple(map(int, reversed(one.shape))) for one in open_reader(folder / GGUF_FILE).tensors}


def _as_floats(tensor: Any) -> Tensor:
    from gguf import dequantize

    return torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))


def _names(model: "PreTrainedModel", processor: Any) -> dict[str, str]:
    """Transformers' names of tensors by those of the file."""
    import gguf
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    # It asks for the same table at every module, and a table takes a tenth of a second.
    with mock.patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)):
        return get_gguf_hf_weights_map(model, processor)


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
        if made.name in names:  # experts are put among the others one by one
            read["tensors"][names[made.name]] = torch.from_numpy(np.array(made.weights))
    return read["tensors"]


def _grouped(tensor: Any, processor: Any) -> GroupedWeight | None:
    """A matrix of the file, its rows in transformers' order; None for other forms, and where more is done to it."""
    form = tensor.tensor_type.name
    if form not in FORMS or len(tensor.shape) != 2:
        return None
    inputs, columns = map(int, tensor.shape)
    rows = np.arange(columns)[:, None]
    order = processor.process(weights=rows, name=tensor.name).weights
    if not np.array_equal(np.sort(order, axis=0), rows):
        return None
    size, read = FORMS[form]
    blocks = torch.from_numpy(np.array(tensor.data)).view(columns, inputs // GROUP, size)
    return read(blocks if np.array_equal(order, rows) else blocks[torch.from_numpy(order[:, 0].copy())])
