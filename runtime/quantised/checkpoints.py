"""Loads quantised checkpoints of verifiers.

Weights with scales per group stay packed if an optional part has kernels for such weights (`packed_loading`). All other
weights are dequantised to the model's dtype during loading, by transformers' quantisers if these support the format. A
row's results thus never depend on the other rows of a batch, as they would in some quantised kernels (LLM.int8 selects
outliers over the whole batch).
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from wingbeat.runtime.tensor_files import ModelCheckpointError, weight_files
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from wingbeat.kernels.grouped_weight import GroupedWeight
    from wingbeat.runtime.quantised.packed_loading import Experts
    from wingbeat.runtime.verifier.checkpoints.checkpoint import Place

    Loaded = tuple[PreTrainedModel, Mapping[str, Any]]
    Load = Callable[..., Loaded]
    Read = Callable[[ConfigFile, Load, Place | None], Loaded]

logger = logging.getLogger(__name__)
_OF_ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "activation_scale")
"""Names of tensors that describe activations, not weights."""
_CACHE_SCALE = re.compile(r"\.(kv?|v|q|prob)_(scale|zero_point)$")
"""Names of the scales of a quantised KV cache; these tensors are ignored, because Wingbeat does not quantise the KV
cache.
"""
_KINDS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
"""Kinds of an expert's linear layers by the layers' names; w1, w2 and w3 are Mixtral's names."""
_EXPERT = re.compile(rf"(.+\.experts)\.(\d+)\.({'|'.join(_KINDS)})")
"""Name of an expert's linear layer in most checkpoints."""
_BLOCK, _OWN_BLOCK = ".block_sparse_moe.", ".mlp."
"""Part of the name of the module with Mixtral's experts: `_BLOCK` in Mixtral's checkpoints, `_OWN_BLOCK` in
transformers.
"""
_OWN_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
"""Formats of compressed-tensors that are read without the package compressed-tensors."""


def check_quantiser(config: ConfigFile) -> None:
    """Raise an error for a quantisation that is not supported.

    The check is needed because transformers ignores an unknown quantisation and loads packed integers as weights.

    Raises:
        ModelCheckpointError: the message names the supported methods, or the missing package.
    """
    method = config.quantiser
    if method not in _QUANTISERS:
        raise ModelCheckpointError(
            f"{config.name} is quantised by {method!r}, which is not supported: {', '.join(_QUANTISERS)} are"
        )
    package = _QUANTISERS[method].package
    is_read = config.quantization.get("format") in _OWN_FORMATS
    if package is not None and not is_read and find_spec(package.replace("-", "_")) is None:
        raise ModelCheckpointError(
            f"{config.name} is quantised by {method}: install {package} (pip install 'wingbeat[quantised]')"
        )


def load_quantised(config: ConfigFile, load: "Load", packed: "Place | None") -> "Loaded":
    """Load a quantised checkpoint; returns the model and transformers' loading report, without KV cache scales.

    Args:
        config: config of a checkpoint that `check_quantiser` accepts.
        load: `from_pretrained` of the folder; accepts further options.
        packed: device and dtype of weights that may stay packed; None dequantises all weights.

    Raises:
        ModelCheckpointError: the packing is not supported.
    """
    from wingbeat.runtime.verifier.layers.linears import held_bytes

    model, info = _QUANTISERS[config.quantiser].load(config, load, packed)
    _make_plain(model)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    logger.info("%s: weights quantised by %s take %.2f GB", config.name, config.quantiser, held_bytes(model) / 1e9)
    unexpected = {name for name in info["unexpected_keys"] if not _CACHE_SCALE.search(name)}
    return model, {**info, "unexpected_keys": unexpected}


def _make_plain(model: "PreTrainedModel") -> None:
    """Converts parameters to plain tensors of the model's dtype, except parameters that stay in float32. Shared
    parameters stay shared.
    """
    import torch

    dtype, made = model.config.dtype, {}
    kept = set(model._keep_in_fp32_modules_strict or ()) if dtype == torch.bfloat16 else set()
    if dtype == torch.float16:
        kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in made:
                held = parameter.data
                plain = held if type(held) is torch.Tensor else held.dequantize()
                if not any(part in f"{prefix}.{name}" for part in kept):
                    plain = plain.to(dtype)
                # Tensors created in inference mode are copied, because parameters must not be inference tensors.
                made[id(parameter)] = torch.nn.Parameter(plain.clone() if plain.is_inference() else plain, False)
            setattr(module, name, made[id(parameter)])


def _by_option(config_class: str, **choices: Any) -> "Read":
    """Returns a reader that passes `choices` to a quantisation config class of transformers, whose quantiser then reads
    the checkpoint tensor by tensor.
    """

    def loaded(config: ConfigFile, load: "Load", packed: "Place | None") -> "Loaded":
        import transformers

        return load(quantization_config=getattr(transformers, config_class)(**choices))

    return loaded


def _as_they_are(config: ConfigFile, load: "Load", packed: "Place | None") -> "Loaded":
    """Reads a checkpoint whose quantised tensors are of classes that can dequantise themselves."""
    return load()


def _bitsandbytes(config: ConfigFile, load: "Load", packed: "Place | None") -> "Loaded":
    model, info = load()
    return model.dequantize(model.config.dtype), info


def _packed_integers(config: ConfigFile, load: "Load", packed: "Place | None") -> "Loaded":
    """Reads GPTQ and AWQ checkpoints without transformers' quantisers, because these require a package that needs a
    newer torch than the installed version.
    """
    from wingbeat.runtime.quantised.packed_integers import PARTS, check_packing, read_linear

    check_packing(config.quantization)
    return _packed(config, load, packed, PARTS, ("qweight",), read_linear)


def _scaled(config: ConfigFile, load: "Load", packed: "Place | None") -> "Loaded":
    """Reads float8 and integer weights with scales, as in FP8 checkpoints and compressed-tensors."""
    from wingbeat.runtime.quantised.scaled_weights import PARTS, read_weight

    return _packed(config, load, packed, ("weight", *PARTS), ("weight_scale", "weight_scale_inv"), read_weight)


def _compressed_tensors(config: ConfigFile, load: "Load", packed: "Place | None") -> "Loaded":
    if config.quantization.get("format") in _OWN_FORMATS:
        return _scaled(config, load, packed)
    return _by_option("CompressedTensorsConfig", run_compressed=False)(config, load, packed)


def _gguf(config: ConfigFile, load: "Load", packed: "Place | None") -> "Loaded":
    from wingbeat.runtime.quantised.gguf_weights import load_gguf

    return load_gguf(config, load, packed)


def _mxfp4(config: ConfigFile, load: "Load", packed: "Place | None") -> "Loaded":
    if packed is None:
        return _by_option("Mxfp4Config", dequantize=True)(config, load, packed)
    from wingbeat.runtime.quantised.mxfp4 import load_mxfp4

    return load_mxfp4(config, load, _stored_tensors(config), packed)


def _stored(file: "Path", name: str) -> "Tensor":
    """Reads a tensor through a file mapping that is closed at once, because the pages of an open mapping would count as
    memory of the process.
    """
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor(name)


def _stored_tensors(config: ConfigFile) -> "dict[str, Callable[[], Tensor]]":
    """Readers of a checkpoint's tensors by name."""
    from safetensors import safe_open

    files, found = weight_files(config.folder), {}
    if files[0].suffix != ".safetensors":
        raise ModelCheckpointError(
            f"{files[0]}: {config.quantiser} is read only from safetensors files; convert the checkpoint"
        )
    for file in files:
        with safe_open(file, framework="pt") as opened:
            found |= {name: partial(_stored, file, name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
    return found


def _packed(
    config: ConfigFile,
    load: "Load",
    packed: "Place | None",
    parts: tuple[str, ...],
    marks: tuple[str, ...],
    read: "Callable[[str, Mapping[str, Tensor], Mapping[str, Any]], GroupedWeight | Tensor]",
) -> "Loaded":
    """Load a checkpoint from safetensors files; only one packed weight at a time is in memory.

    Args:
        config, load, packed: see `load_quantised`.
        parts: name suffixes of the tensors that make up a packed layer.
        marks: name suffixes among `parts` that only packed layers have.
        read: function (layer name, parts, quantization_config) -> weight.
    """
    import torch

    from wingbeat.runtime.quantised.packed_loading import empty_model, load_packed, plain_config

    tensors = _stored_tensors(config)
    layers = {name.rpartition(".")[0]: {} for name in tensors if name.rpartition(".")[2] in marks}
    plain = {}
    for name, stored in tensors.items():
        layer, _, part = name.rpartition(".")
        if layer in layers and part in parts:
            layers[layer][part] = stored
        elif part not in _OF_ACTIVATIONS:
            plain[name] = stored()
            if part == "weight" and plain[name].dtype not in (
                torch.float32,
                torch.bfloat16,
                torch.float16,
                torch.float64,
            ):
                raise ModelCheckpointError(f"{config.folder}: tensor {name} is {plain[name].dtype}, but has no scale")

    def weight_of(layer: str) -> "GroupedWeight | Tensor":
        return read(layer, {part: stored() for part, stored in layers[layer].items()}, config.quantization)

    shell = empty_model(plain_config(config))
    experts, apart = _experts(layers, dict(shell.named_modules()), weight_of)
    linears = {f"{layer}.weight": partial(weight_of, layer) for layer in layers if layer not in apart}
    return load_packed(config, load, shell, plain, linears, packed, experts)


def _experts(
    layers: Iterable[str], modules: Mapping[str, Any], weight_of: "Callable[[str], GroupedWeight | Tensor]"
) -> "tuple[dict[str, Experts], set[str]]":
    """Experts, by module name, of the modules whose experts all have group-quantised weights; and the names of these
    experts' layers.
    """
    from wingbeat.kernels.grouped_weight import GroupedWeight
    from wingbeat.runtime.quantised.packed_loading import Experts, has_plain_experts

    by_module: dict[str, dict[tuple[str, int], str]] = {}
    for layer in layers:
        if (match := _EXPERT.fullmatch(layer)) is None:
            continue
        name = match[1] if match[1] in modules else match[1].replace(_BLOCK, _OWN_BLOCK)
        if has_plain_experts(modules.get(name)):
            by_module.setdefault(name, {})[_KINDS[match[3]], int(match[2])] = layer
    found, kinds = {}, ("gate", "up", "down")
    for name, own in by_module.items():
        count = modules[name].num_experts
        is_whole = own.keys() == {(kind, expert) for kind in kinds for expert in range(count)}
        if is_whole and all(isinstance(weight_of(own[kind, 0]), GroupedWeight) for kind in kinds):
            found[name] = Experts(count, lambda kind, expert, own=own: weight_of(own[kind, expert]))
    return found, {layer for name in found for layer in by_module[name].values()}


class _Quantiser(NamedTuple):
    """Reader of one quantisation method."""

    load: "Read"
    package: str | None = None
    """Package that must be installed."""


_QUANTISERS = {
    "awq": _Quantiser(_packed_integers),
    "bitsandbytes": _Quantiser(_bitsandbytes, "bitsandbytes"),
    "compressed-tensors": _Quantiser(_compressed_tensors, "compressed-tensors"),
    "fp8": _Quantiser(_scaled),
    "gguf": _Quantiser(_gguf),
    "gptq": _Quantiser(_packed_integers),
    "mxfp4": _Quantiser(_mxfp4),
    "torchao": _Quantiser(_as_they_are, "torchao"),
}
