"""Loads a checkpoint tensor by tensor, so that weights which the kernels read in packed form are never stored as
floats.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from wingbeat.kernels.grouped_weight import E4M3, GroupedWeight
from wingbeat.runtime.hugging_face import build_model, generation_of, make_config
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.tensor_files import ModelCheckpointError
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile
from wingbeat.runtime.verifier.loading.mapped_files import give_back_freed

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from wingbeat.runtime.verifier.checkpoints.checkpoint import Place

    Loaded = tuple[PreTrainedModel, Mapping[str, Any]]


class Experts(NamedTuple):
    """Experts of a layer."""

    count: int
    read: Callable[[str, int], GroupedWeight | Tensor]
    """Function (kind, index of the expert) -> weight: a `GroupedWeight`, or for other formats a float32 tensor
    [columns, inputs].
    """
    gated: tuple[str, ...] = ("gate", "up")
    """Kinds of the weights that together are the gate and up projections; their outputs are concatenated."""
    biases: Mapping[str, Tensor] = MappingProxyType({})
    """Biases [num_experts, columns] by kind."""


def has_plain_experts(module: Any) -> bool:
    """Whether a module's experts have the form of most models in transformers: gate and up projections concatenated,
    weights [out, in], no biases.
    """
    plain = {"has_gate": True, "is_concatenated": True, "is_transposed": False, "has_bias": False}
    return all(getattr(module, name, None) == value for name, value in plain.items()) and not getattr(
        module, "has_post_expert_norm", False
    )


def plain_config(config: ConfigFile) -> "PretrainedConfig":
    """The model's config without the fields of its quantisation."""
    plain = make_config(config.fields, config.folder, config.name)
    del plain.quantization_config
    return plain


def empty_model(plain: "PretrainedConfig") -> "PreTrainedModel":
    """The model on the meta device, which allocates no memory for weights."""
    with torch.device("meta"):
        return build_model(plain)


def load_packed(
    config: ConfigFile,
    load: "Callable[..., Loaded]",
    shell: "PreTrainedModel",
    plain: Mapping[str, Tensor],
    packed: Mapping[str, Callable[[], GroupedWeight | Tensor]],
    place: "Place | None",
    experts: Mapping[str, Experts] = MappingProxyType({}),
) -> "Loaded":
    """Load the model; returns it and transformers' loading report.

    Args:
        config: config of the checkpoint.
        load: `from_pretrained`, called with a state dict.
        shell: the model from `empty_model`.
        plain: unquantised tensors by name.
        packed: readers of packed weights by name, called one at a time.
        place: device and dtype of weights that may stay packed; None dequantises all weights.
        experts: experts of layers by module name.

    Raises:
        ModelCheckpointError: a scale is not finite, or experts have other shapes than the model's; the message names
            the tensor.
    """
    modules, state, kept = dict(shell.named_modules()), dict(plain), {}
    for name, read in packed.items():
        weight = read()
        if isinstance(weight, Tensor):
            state[name] = weight
            continue
        _check_finite(weight, f"tensor {name}", config)
        layer = name.removesuffix(".weight")
        bias = state.get(f"{layer}.bias")
        held = None if place is None else first_result("pack_weight", modules.get(layer), weight, bias, place)
        if held is None:
            state[name] = _dense(weight, place)
        else:
            kept[name] = held
            state[name] = _placeholder(weight.values.shape, place)
        del weight
        give_back_freed()  # otherwise the freed temporary copies would leave gaps in memory between the weights
    for name, own in experts.items():
        held = _load_experts(config, name, own, shell, state, place)
        if held is not None:
            kept[name] = held
        give_back_freed()
    model, info = load(type(shell), None, config=shell.config, state_dict=state)
    if (config.folder / "generation_config.json").is_file():
        model.generation_config = generation_of(config.folder)["generation_config"]
    _keep(model, kept)
    return model, info


def _keep(model: "PreTrainedModel", kept: Mapping[str, Any]) -> None:
    """Attach packed weights to their modules; a tied embedding and output matrix share one packed weight."""
    modules = dict(model.named_modules())
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = isinstance(head, nn.Linear) and head.weight is embedding.weight
    for name, held in kept.items():
        module = modules[name.removesuffix(".weight")]
        for one in (head, embedding) if is_tied and module in (head, embedding) else (module,):
            first_result("keep_packed", one, held)


def _load_experts(
    config: ConfigFile,
    name: str,
    own: Experts,
    shell: "PreTrainedModel",
    state: dict[str, Tensor],
    place: "Place | None",
) -> Any:
    """Load experts. If they stay packed, returns them and writes placeholders to `state`; otherwise writes the
    dequantised experts to `state` and returns None.

    Raises:
        ModelCheckpointError: as for `load_packed`.
    """
    parameters, shapes = {f"{name}.gate_up_proj": own.gated, f"{name}.down_proj": ("down",)}, {}
    is_transposed = shell.get_submodule(name).is_transposed
    for parameter, kinds in parameters.items():
        count, *sizes = shell.get_parameter(parameter).shape
        columns, inputs = reversed(sizes) if is_transposed else sizes
        shapes |= dict.fromkeys(kinds, (columns // len(kinds), inputs))
        if own.count != count:
            raise ModelCheckpointError(f"{config.folder}: {name} holds {own.count} experts, {count} are expected")
    read = partial(_read_expert, config, name, own, shapes)
    grouped = all(isinstance(own.read(kind, 0), GroupedWeight) for kind in (*own.gated, "down"))
    held = first_result("pack_experts", own.count, own.gated, read, place) if place is not None and grouped else None
    for parameter, kinds in parameters.items():
        if held is not None:
            state[parameter] = _placeholder(shell.get_parameter(parameter).shape, place)
            continue
        each = (torch.cat([_dense(read(kind, one)[0], place) for kind in kinds]) for one in range(own.count))
        weight = torch.stack(list(each))
        state[parameter] = weight.mT.contiguous() if is_transposed else weight
    return held


def _read_expert(
    config: ConfigFile, name: str, experts: Experts, shapes: Mapping[str, tuple[int, int]], kind: str, expert: int
) -> tuple[GroupedWeight | Tensor, Tensor | None]:
    """Reads a weight and its bias, and checks their shapes; raises ModelCheckpointError as `load_packed` does."""
    weight, biases, own = experts.read(kind, expert), experts.biases.get(kind), f"{kind} of expert {expert} of {name}"
    shape = tuple(weight.values.shape if isinstance(weight, GroupedWeight) else weight.shape)
    if shape != shapes[kind]:
        shape, expected = list(shape), list(shapes[kind])
        raise ModelCheckpointError(f"{config.folder}: {own} has shape {shape}, {expected} is expected")
    if isinstance(weight, GroupedWeight):
        _check_finite(weight, own, config)
    return weight, None if biases is None else biases[expert]


def _dense(weight: GroupedWeight | Tensor, place: "Place | None") -> Tensor:
    """A dequantised weight. If `place` is given, the weight is converted to `place.dtype` at once, so that not all
    weights are in memory in float32 at the same time.
    """
    numbers = weight.dense() if isinstance(weight, GroupedWeight) else weight
    return numbers if place is None else numbers.to(place.dtype)


def _placeholder(shape: tuple[int, ...], place: "Place") -> Tensor:
    """A tensor with a weight's shape, expanded from a single NaN, so that it needs no memory."""
    return torch.full((), float("nan"), dtype=place.dtype).expand(shape)


def _check_finite(weight: GroupedWeight, name: str, config: ConfigFile) -> None:
    """Raises ModelCheckpointError if a scale, or a float8 value, is not finite."""
    parts = [*weight.scales, *(weight.minima or ())]
    # x - x is NaN if and only if x is not finite, and a sum that contains a NaN is NaN. A sum therefore tests all
    # scales of a tensor.
    floats = [part for part in parts if part is not None and part.is_floating_point()]
    is_nan = weight.form is E4M3 and int((weight.values & 127).amax()) == 127
    if is_nan or any(float((part - part).sum()) != 0 for part in floats):
        raise ModelCheckpointError(f"{config.folder}: {name} or its scales hold NaN or infinity")
