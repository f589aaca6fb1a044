"""Loads the MTP modules in a verifier's checkpoint.

`mtp_names` defines the layouts. A module without an embedding or output matrix uses that of the verifier. Missing,
unexpected and mis-shaped tensors raise errors.
"""

import logging
import re
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from wingbeat.runtime.heads.load import CheckpointError
from wingbeat.runtime.heads.plain_weights import plain_tensors
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.hugging_face import build_model
from wingbeat.runtime.mtp.mtp_modules import MtpModule, MtpModules
from wingbeat.runtime.mtp.mtp_names import count_modules, name_in_module, prefix_of_module, why_none

logger = logging.getLogger(__name__)

MOST_MODULES = 16
"""Maximum number of modules.

The limit exists because the context of module k may start at row -k, and attention supports context lengths of at least
-15 (`wingbeat.kernels.attention.reference.tree_attention`).
"""
_EXPERT = re.compile(r"(?P<experts>.*experts)\.(?P<index>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight")


def num_mtp_modules(target: TargetDescription) -> int:
    """Number of modules with a readable layout in a verifier's checkpoint; 0 if it has no such modules."""
    return count_modules(target.tensor_files, target.num_layers)


def load_mtp_modules(
    target: TargetDescription, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> MtpModules:
    """Load all modules of a verifier's checkpoint, ready to run.

    Raises:
        CheckpointError: there are no modules or more than `MOST_MODULES`, or a tensor is missing, unexpected,
            mis-shaped or quantised in an unsupported way.
        UnsupportedModelError: the modules' attention cannot be run over a paged cache.
    """
    count = num_mtp_modules(target)
    if not count:
        raise CheckpointError(f"{target.path} {why_none(target.tensor_files, target.num_layers)}")
    if count > MOST_MODULES:
        raise CheckpointError(f"{target.path} has {count} MTP modules: {MOST_MODULES} at most are supported")
    skeleton = _skeleton(target.config)
    _check_layer_kinds(target.config, count)
    found = [_module_tensors(target, index, dtype) for index in range(count)]
    embedding, head = target.embedding(), target.lm_head()
    with torch.device("meta"):
        modules = MtpModules(skeleton, count)
    kept = tuple(getattr(skeleton, "_keep_in_fp32_modules_strict", None) or ())
    for index, module in enumerate(modules.items):
        tensors = found[index]
        module.embedding = _own_or_shared(tensors.pop("embedding", None), embedding, "embed_tokens.weight", index)
        module.head = _own_or_shared(tensors.pop("head", None), head, "shared_head.head.weight", index)
        _assign(module, tensors, index, dtype, kept)
    _place(modules, dtype, device)
    logger.info(
        "%s: %d MTP module%s of %s, output matrix: %s",
        target.path,
        count,
        "" if count == 1 else "s, each for its own depth",
        type(modules.items[0].block).__name__,
        "the verifier's" if modules.items[0].head is modules.items[-1].head and head is not None else "its own",
    )
    return modules.prepare()


def _skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """The verifier's model in transformers' code, on the meta device, without weights."""
    with torch.device("meta"):
        return build_model(config)


def _check_layer_kinds(config: PretrainedConfig, count: int) -> None:
    """Raises CheckpointError unless the modules have the same config as the verifier's last layer; modules are built
    from that layer's class.
    """
    for own, main in (("mtp_layer_types", "layer_types"), ("mtp_mlp_layer_types", "mlp_layer_types")):
        stated, last = getattr(config, own, None), (getattr(config, main, None) or [None])[-1]
        if stated is not None and set(stated[:count]) != {last}:
            raise CheckpointError(f"{own}={list(stated)} is not supported: the verifier's last layer is {last!r}")


def _module_tensors(target: TargetDescription, index: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors of a module by their names in `MtpModule`. The experts' matrices are stacked as in transformers."""
    files = target.tensor_files
    prefix = prefix_of_module(files, target.num_layers + index)
    parts: dict[str, dict[str, Path]] = {}
    for name, file in files.items():
        if name.startswith(prefix) and not name.endswith("rotary_emb.inv_freq"):
            parts.setdefault(name.rpartition(".")[0], {})[name] = file
    found: dict[str, Tensor] = {}
    for names in parts.values():
        found |= {name_in_module(name, prefix): weight for name, weight in _plain(target, names, dtype).items()}
    packed = sorted(name for name, tensor in found.items() if tensor.element_size() == 1 or "scale" in name)
    if packed:
        raise CheckpointError(f"MTP module {index} is quantised in an unsupported way ({packed[0]})")
    return _stack_experts(found)


def _plain(target: TargetDescription, files: dict[str, Path], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of one layer by name; quantised weights are converted to `dtype`.

    Linear layers are read one at a time, because all experts of a large module in float32 would need twice the memory
    of the result.
    """
    tensors = {}
    for name, file in files.items():
        with safe_open(file, framework="pt") as opened:
            tensors[name] = opened.get_tensor(name)
    plain = plain_tensors(target.quantization, tensors)
    return {name: tensor if tensors.get(name) is tensor else tensor.to(dtype) for name, tensor in plain.items()}


def _stack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices of single experts -> gate_up_proj [experts, 2 * I, H] and down_proj [experts, H, I]."""
    stacked: dict[str, Tensor] = {}
    parts: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            stacked[name] = tensor
        else:
            parts.setdefault(match["experts"], {}).setdefault(match["part"], {})[int(match["index"])] = tensor
    for experts, by_part in parts.items():
        counts = {part: sorted(matrices) for part, matrices in by_part.items()}
        indices = counts.get("down_proj", [])
        if set(counts) != {"gate_proj", "up_proj", "down_proj"} or any(c != indices for c in counts.values()):
            raise CheckpointError(f"{experts}: experts without all of gate_proj, up_proj and down_proj")
        gate, up, down = (
            torch.stack([by_part[part][index] for index in indices]) for part in ("gate_proj", "up_proj", "down_proj")
        )
        stacked[f"{experts}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        stacked[f"{experts}.down_proj"] = down
    return stacked


def _own_or_shared(own: Tensor | None, shared: Tensor | None, name: str, index: int) -> Tensor:
    """Returns a module's own matrix, or the verifier's matrix if the two are equal or the module has none."""
    if own is None and shared is None:
        raise CheckpointError(f"MTP module {index} has no {name}, and the verifier's checkpoint has none to lend")
    if own is None or shared is None:
        return shared if own is None else own
    if own.shape != shared.shape:
        raise CheckpointError(f"{name} of MTP module {index} is {list(own.shape)}, not {list(shared.shape)}")
    # A matrix lent by the verifier is on the verifier's device, in the verifier's dtype.
    return shared if torch.equal(own.to(shared.dtype), shared.to(own.device)) else own


def _assign(
    module: MtpModule, tensors: dict[str, Tensor], index: int, dtype: torch.dtype, kept: tuple[str, ...]
) -> None:
    """Assigns a module's tensors; raises CheckpointError unless they match its parameters exactly."""
    expected = {name: tensor.shape for name, tensor in module.state_dict().items()}
    for problem, names in (
        ("lacks tensors", expected.keys() - tensors.keys()),
        ("has unexpected tensors", tensors.keys() - expected.keys()),
    ):
        if names:
            raise CheckpointError(f"MTP module {index} {problem}: {', '.join(sorted(names)[:3])} ({len(names)} in all)")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name]:
            raise CheckpointError(f"{name} of MTP module {index} is {list(tensor.shape)}, not {list(expected[name])}")
    # Some parameters, such as the router's correction biases, stay in float32, because they must not be rounded.
    cast = {k: v.to(torch.float32 if any(part in k for part in kept) else dtype) for k, v in tensors.items()}
    module.load_state_dict(cast, assign=True)


def _place(modules: MtpModules, dtype: torch.dtype, device: str | torch.device) -> None:
    """Moves all tensors to the device. Tensors that several modules share stay shared."""
    moved: dict[int, Tensor] = {}
    for module in modules.items:
        for name in ("embedding", "head"):
            tensor = getattr(module, name)
            setattr(module, name, moved.setdefault(id(tensor), tensor.to(device, dtype)))
    modules.to(device)
