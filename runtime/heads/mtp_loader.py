"""MTP modules inside a verifier's checkpoint: which there are, and their tensors under one set of names.

Two layouts are read. DeepSeek's, which GLM-4.5 and others took over: module k is `model.layers.{num_layers + k}.`, with
`enorm`, `hnorm`, `eh_proj`, `shared_head.norm` beside the layer's own tensors, and copies of the embedding and of the
output matrix as `embed_tokens` and `shared_head.head`. Qwen's: one module under `mtp.`, with `pre_fc_norm_embedding`,
`pre_fc_norm_hidden`, `fc`, `norm` and `layers.0.`. A module without an embedding or output matrix uses the verifier's.
Missing, unexpected and mis-shaped tensors are errors.
"""

import logging
import re
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from wingbeat.runtime.heads.load import CheckpointError
from wingbeat.runtime.heads.mtp_modules import MtpModule, MtpModules
from wingbeat.runtime.heads.target import TargetDescription

logger = logging.getLogger(__name__)

_DEEPSEEK = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "shared_head.norm.weight": "norm.weight",
    "shared_head.head.weight": "head",
    "embed_tokens.weight": "embedding",
}
_QWEN = {
    "mtp.pre_fc_norm_embedding.weight": "enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "hnorm.weight",
    "mtp.fc.weight": "eh_proj.weight",
    "mtp.norm.weight": "norm.weight",
}
_QWEN_LAYER = "mtp.layers.0."
_EXPERT = re.compile(r"(?P<experts>.*experts)\.(?P<index>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight")
_OTHER_FAMILIES = re.compile(r"(^|\.)(mtp|mtp_block|mtp_layers|nextn)[._]")


def num_mtp_modules(target: TargetDescription) -> int:
    """Modules that a verifier's checkpoint holds in a layout that can be read; 0 where there are none."""
    if "mtp.fc.weight" in target.tensor_files:
        return 1
    count = 0
    while f"{_layer(target, count)}eh_proj.weight" in target.tensor_files:
        count += 1
    return count


def load_mtp_modules(
    target: TargetDescription, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> MtpModules:
    """Read all modules of a verifier's checkpoint, ready to run.

    Raises:
        CheckpointError: there are none, or a tensor is missing, unexpected, mis-shaped or quantised.
        UnsupportedModelError: their attention cannot be run over a paged cache.
    """
    count = num_mtp_modules(target)
    if not count:
        raise CheckpointError(why_none(target))
    skeleton = _skeleton(target.config)
    _check_layer_kinds(target.config, count)
    embedding, head = target.embedding(), target.lm_head()
    with torch.device("meta"):
        modules = MtpModules(skeleton, count)
    kept = tuple(getattr(skeleton, "_keep_in_fp32_modules_strict", None) or ())
    for index, module in enumerate(modules.items):
        tensors = _module_tensors(target, index)
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


def _layer(target: TargetDescription, index: int) -> str:
    return f"model.layers.{target.num_layers + index}."


def why_none(target: TargetDescription) -> str:
    """One line for a checkpoint without modules that can be read."""
    others = sorted(name for name in target.tensor_files if _OTHER_FAMILIES.search(name))
    if others:
        return (
            f"{target.path} has MTP tensors of a layout that is not supported ({others[0]} among {len(others)}): "
            f"readable are {_layer(target, 0)}eh_proj.weight (DeepSeek, GLM) and mtp.fc.weight (Qwen)"
        )
    return f"{target.path} has no MTP module: {_layer(target, 0)}eh_proj.weight is not among its tensors"


def _skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """The verifier's modeling code without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _check_layer_kinds(config: PretrainedConfig, count: int) -> None:
    """Modules are built like the verifier's last layer: a configuration that says otherwise is refused."""
    for own, main in (("mtp_layer_types", "layer_types"), ("mtp_mlp_layer_types", "mlp_layer_types")):
        stated, last = getattr(config, own, None), (getattr(config, main, None) or [None])[-1]
        if stated is not None and set(stated[:count]) != {last}:
            raise CheckpointError(f"{own}={list(stated)} is not supported: the verifier's last layer is {last!r}")


def _module_tensors(target: TargetDescription, index: int) -> dict[str, Tensor]:
    """Tensors of a module, by the names of `MtpModule`; experts side by side as transformers holds them."""
    found: dict[str, Tensor] = {}
    prefix = _layer(target, index)
    qwen = "mtp.fc.weight" in target.tensor_files
    by_file: dict[Path, list[str]] = {}
    for name, file in target.tensor_files.items():
        if name.startswith("mtp." if qwen else prefix):
            by_file.setdefault(file, []).append(name)
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as tensors:
            for name in names:
                canonical = _qwen_name(name) if qwen else _deepseek_name(name.removeprefix(prefix))
                found[canonical] = tensors.get_tensor(name)
    quantised = sorted(name for name, tensor in found.items() if "scale" in name or tensor.element_size() == 1)
    if quantised:
        raise CheckpointError(f"MTP module {index} is quantised ({quantised[0]}): only plain weights can be read")
    return _stack_experts({k: v for k, v in found.items() if not k.endswith("rotary_emb.inv_freq")})


def _deepseek_name(name: str) -> str:
    return _DEEPSEEK.get(name, f"block.{name}")


def _qwen_name(name: str) -> str:
    if name.startswith(_QWEN_LAYER):
        return f"block.{name.removeprefix(_QWEN_LAYER)}"
    return _QWEN.get(name, name)


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
    """A module's own matrix, unless it is a copy of the verifier's, of which one is enough."""
    if own is None and shared is None:
        raise CheckpointError(f"MTP module {index} has no {name}, and the verifier's checkpoint has none to lend")
    if own is None or (shared is not None and torch.equal(own, shared)):
        return shared
    if shared is not None and own.shape != shared.shape:
        raise CheckpointError(f"{name} of MTP module {index} is {list(own.shape)}, not {list(shared.shape)}")
    return own


def _assign(
    module: MtpModule, tensors: dict[str, Tensor], index: int, dtype: torch.dtype, kept: tuple[str, ...]
) -> None:
    """Give a module its tensors; all of them, and no others."""
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
    # Some parameters, such as the router's corrections, must not be rounded.
    cast = {k: v.to(torch.float32 if any(part in k for part in kept) else dtype) for k, v in tensors.items()}
    module.load_state_dict(cast, assign=True)


def _place(modules: MtpModules, dtype: torch.dtype, device: str | torch.device) -> None:
    """Move everything to the device; what modules share stays shared."""
    moved: dict[int, Tensor] = {}
    for module in modules.items:
        for name in ("embedding", "head"):
            tensor = getattr(module, name)
            setattr(module, name, moved.setdefault(id(tensor), tensor.to(device, dtype)))
    modules.to(device)
