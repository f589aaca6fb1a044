"""Loads a verifier's weights, and checks that no tensor is missing, misshapen, of an unreadable type, or not finite.

transformers renames, splits and stacks tensors while loading, differently per architecture. Only transformers can
therefore report which tensors a checkpoint lacks. Its report is read twice: first on the meta device, for which only
file headers are read (`check_weights`), then when the weights are loaded (`load_weights`). Tensors that transformers
would initialise randomly with a warning are an error here.
"""

import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from wingbeat.runtime.folder_kinds import head_problem
from wingbeat.runtime.hugging_face import generation_of, load_files, make_config, one_line, quiet
from wingbeat.runtime.parts import first_result, hooks
from wingbeat.runtime.tensor_files import ModelCheckpointError, TensorHeader, read_headers, weight_files
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile, auto_class

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    Loaded = tuple[PreTrainedModel, Mapping[str, Any]]

_NUM_NAMED = 3
_FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
_LAYER = re.compile(r"(?P<layer>.*\blayers\.(?P<index>\d+)\.)")
_OWN_LAYER = re.compile(r"model\.layers\.(?P<index>\d+)\.")
_PREDICTION = re.compile(r"(^|\.)(mtp|mtp_block|mtp_layers|nextn)[._]")
_FREQUENCIES = re.compile(r"(^|\.)(original_)?inv_freq$|rotary_emb\.(cos|sin)_cached$|(^|\.)position_ids$")
_TOWER = re.compile(
    r"^(model\.)?(visual|vision|audio|image|speech|multi_modal|multimodal|mm_|embed_vision|embed_audio)"
)
_TOWER_CONFIGS = ("vision_config", "audio_config", "speech_config", "vision_tower_config")


class Place(NamedTuple):
    """Device on which a model will run, and dtype in which it will run."""

    device: "torch.device"
    dtype: "torch.dtype"


def check_files(config: ConfigFile) -> None:
    """Checks the headers of the weight files, without torch and without reading values.

    Raises:
        ModelCheckpointError: a file is absent, truncated or damaged, or the format of its packed weights is not
            declared or not supported.
    """
    if config.quantiser is not None:
        _check_quantiser(config)
    headers = read_headers(weight_files(config.folder))
    if (problem := head_problem(config.folder, headers)) is not None:
        raise ModelCheckpointError(problem)
    if headers:
        _check_layers(config, headers)
    if config.quantization is not None:
        return
    packed = sorted(n for n, h in headers.items() if n.endswith(".weight") and h.dtype not in _FLOAT_DTYPES)
    if packed:
        raise ModelCheckpointError(
            f"{config.name}: tensor {packed[0]} is {headers[packed[0]].dtype}{_and_more(len(packed) - 1)}, "
            "and config.json has no quantization_config that says how to read it"
        )


def _check_quantiser(config: ConfigFile) -> None:
    checks = hooks("check_quantiser")
    if not checks:
        raise ModelCheckpointError(f"{config.name} is quantised by {config.quantiser!r}, which is not supported")
    for check in checks:
        check(config)


def _check_layers(config: ConfigFile, names: Iterable[str]) -> None:
    """Refuses a checkpoint in which some layer has no tensor at all. The architecture need not be known."""
    num_layers = config.size("num_hidden_layers")
    held = {int(match["index"]) for name in names if (match := _OWN_LAYER.match(name))}
    if num_layers is None or not held:
        return
    absent = sorted(set(range(num_layers)) - held)
    if absent:
        raise ModelCheckpointError(
            f"{config.folder} holds no tensor of layer {absent[0]}{_and_more(len(absent) - 1)}: config.json says that "
            f"num_hidden_layers is {num_layers}"
        )


def check_weights(config: ConfigFile) -> None:
    """Builds the model on the meta device and compares the names and shapes of its tensors with those in the files.

    Raises:
        ModelCheckpointError: a tensor is missing, unexpected or of another shape, or transformers refuses the
            checkpoint.
    """
    if config.quantization is not None:
        # Packed tensors are not compared here, because only the quantiser can map packed tensors to weights, and the
        # quantiser needs the device on which the model will run. See `load_weights`.
        return
    _loaded(config, device_map="meta")


def load_weights(
    config: ConfigFile,
    dtype: "torch.dtype",
    packed: Place | None = None,
    device: "torch.device | None" = None,
    **options: Any,
) -> "PreTrainedModel":
    """Returns the model with all of its weights, on the host unless `device` is a GPU.

    On a GPU, tensors are converted and stacked (the experts of a layer) where they stay: host memory holds one tensor
    at a time, not a copy of the model. Quantised models are loaded on the host.

    Args:
        packed: device and dtype for which quantised weights may stay packed, if kernels can multiply by packed weights;
            None unpacks all weights.
        options: arguments of `from_pretrained`, such as arguments that load only this process's shard of each weight.

    Raises:
        ModelCheckpointError: as `check_weights`.
    """
    if device is None or device.type != "cuda" or config.quantization is not None:
        return _loaded(config, packed, dtype=dtype, **options)
    with _without_warm_up():
        return _loaded(config, packed, dtype=dtype, device_map={"": device}, **options)


@contextmanager
def _without_warm_up() -> "Iterator[None]":
    """Context manager in which transformers does not allocate the model's memory as one block beforehand.

    torch's allocator could not give back parts of such a block, such as the memory of weights that are joined later.
    """
    from transformers import modeling_utils

    warm_up = modeling_utils.caching_allocator_warmup
    modeling_utils.caching_allocator_warmup = lambda *args, **options: None
    try:
        yield
    finally:
        modeling_utils.caching_allocator_warmup = warm_up


def check_finite(model: "nn.Module") -> None:
    """Refuses weights that are NaN or infinite, with one pass over the weights and one device synchronisation.

    Raises:
        ModelCheckpointError: a tensor holds NaN or infinity; the message names the first such tensor.
    """
    import torch

    names, extremes = [], []
    for name, tensor in chain(model.named_parameters(), _saved_buffers(model)):
        if tensor.untyped_storage().nbytes() < tensor.nbytes:
            continue  # placeholder of a packed weight; its scales were checked when they were read
        if tensor.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16) and tensor.numel():
            names.append(name)
            # aminmax propagates NaN, so no mask of the tensor's size is needed.
            extremes.append(torch.stack(tensor.aminmax()).double())
    if not names:
        return
    bad = (~torch.stack(extremes).isfinite().all(dim=1)).nonzero().flatten().tolist()
    if bad:
        what = "NaN" if extremes[bad[0]].isnan().any() else "infinity"
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        raise ModelCheckpointError(f"tensor {names[bad[0]]} holds {what} as {dtype}{_and_more(len(bad) - 1)}")


def _saved_buffers(model: "nn.Module") -> "Iterator[tuple[str, torch.Tensor]]":
    for prefix, module in model.named_modules():
        for name, tensor in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", tensor


def _loaded(config: ConfigFile, packed: Place | None = None, **options: Any) -> "PreTrainedModel":
    def load(
        model_class: Any = auto_class(config.fields["model_type"]), folder: Path | None = config.folder, **more: Any
    ) -> "Loaded":
        # With this option, transformers reports tensors of another shape by name, instead of raising without names.
        generation = {} if folder is None else generation_of(folder)
        more = generation | {"config": read, "output_loading_info": True, "ignore_mismatched_sizes": True} | more
        return load_files(model_class, folder, **options, **more)

    read = make_config(config.fields, config.folder, config.name)
    with one_line(config.name), quiet():
        try:
            model, info = (
                load() if config.quantization is None else first_result("load_quantised", config, load, packed)
            )
        except (pickle.UnpicklingError, EOFError) as error:
            raise ModelCheckpointError(
                f"{config.folder}: a .bin file is damaged or holds code beside weights, which is never run: convert it "
                "to safetensors where it is trusted"
            ) from error
    _check_loading(config, info)
    return model


def _check_loading(config: ConfigFile, info: Mapping[str, Any]) -> None:
    """Turns transformers' loading report into an error if a tensor is missing, unexpected or of another shape."""
    headers = read_headers(weight_files(config.folder))
    shapes = sorted((name, tuple(found), tuple(wanted)) for name, found, wanted in info["mismatched_keys"])
    unexpected = sorted(set(info["unexpected_keys"]) - set(_harmless(config, info["unexpected_keys"], headers)))
    missing = sorted(set(info["missing_keys"]) - {name for name, _, _ in shapes})
    problems = []
    if shapes:
        name, found, wanted = shapes[0]
        problems.append(f"tensor {name} has shape {list(found)}, expected {list(wanted)}{_and_more(len(shapes) - 1)}")
    for word, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            plural = "s" if len(names) > 1 else ""
            named = ", ".join(names[:_NUM_NAMED])
            problems.append(f"{len(names)} {word} tensor{plural}: {named}{', ...' if len(names) > _NUM_NAMED else ''}")
    problems += [" ".join(str(message).split()) for message in list(info["error_msgs"])[:1]]
    if problems:
        raise ModelCheckpointError(f"{config.folder} does not hold the weights of {config.name}: {'; '.join(problems)}")


def _harmless(config: ConfigFile, names: Iterable[str], headers: Mapping[str, TensorHeader]) -> set[str]:
    """Returns the unexpected tensors that do not affect a causal LM's output.

    Such tensors are tables computed from the config, multi-token prediction modules, and image and audio towers.
    """
    has_tower = any(isinstance(config.fields.get(name), dict) for name in _TOWER_CONFIGS)
    num_layers = config.size("num_hidden_layers") or 0
    joints = {match["layer"] for name in headers if name.endswith("eh_proj.weight") and (match := _LAYER.match(name))}
    found = set()
    for name in names:
        layer = _LAYER.match(name)
        if (
            _FREQUENCIES.search(name)
            or _PREDICTION.search(name)
            or (layer is not None and layer["layer"] in joints and int(layer["index"]) >= num_layers)
            or (has_tower and _TOWER.search(name))
        ):
            found.add(name)
    return found


def _and_more(count: int) -> str:
    return f" (and {count} more)" if count > 0 else ""
