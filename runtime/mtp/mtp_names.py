"""Finds MTP modules by the tensor names of a checkpoint, and maps the names; does not import torch.

Two layouts are supported. In DeepSeek's layout, also used by GLM-4.5 and others, module k has the prefix
`model.layers.{num_layers + k}.`. Its tensors are `enorm`, `hnorm`, `eh_proj`, `shared_head.norm`, the tensors of a
decoder layer, and copies of the embedding (`embed_tokens`) and of the output matrix (`shared_head.head`). In Qwen's
layout, one module has the prefix `mtp.`, with `pre_fc_norm_embedding`, `pre_fc_norm_hidden`, `fc`, `norm` and
`layers.0.`.
"""

import re
from collections.abc import Collection

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
_QWEN_PREFIX, _QWEN_LAYER = "mtp.", "mtp.layers.0."
_QWEN_JOINT = "mtp.fc.weight"
_OTHER_FAMILIES = re.compile(r"(^|\.)(mtp|mtp_block|mtp_layers|nextn)[._]")


def count_modules(names: Collection[str], num_layers: int) -> int:
    """Number of modules in a readable layout; 0 if there are no such modules.

    The count in the config is not used, because many copies of a checkpoint keep the field but omit the modules.

    Args:
        names: tensor names of the verifier.
        num_layers: number of layers of the verifier.
    """
    if _is_among(names, _QWEN_JOINT):
        return 1
    count = 0
    while _is_among(names, _joint(num_layers + count)):
        count += 1
    return count


def find_modules(names: Collection[str], num_layers: int) -> list[set[str]]:
    """Tensor names of each readable module; for the arguments see `count_modules`."""
    prefixes = [prefix_of_module(names, num_layers + index) for index in range(count_modules(names, num_layers))]
    return [{name for name in names if name.startswith(prefix)} for prefix in prefixes]


def why_none(names: Collection[str], num_layers: int) -> str:
    """Reason why a checkpoint has no readable modules, as the end of a sentence."""
    others = sorted(name for name in names if _OTHER_FAMILIES.search(name))
    if others:
        return (
            f"has MTP tensors of a layout that is not supported ({others[0]} among {len(others)}): "
            f"readable are {_joint(num_layers)} (DeepSeek, GLM) and {_QWEN_JOINT} (Qwen)"
        )
    return f"has no MTP module: {_joint(num_layers)} is not among its tensors"


def prefix_of_module(names: Collection[str], layer: int) -> str:
    """Name prefix of a module's tensors.

    Args:
        names: tensor names of the verifier.
        layer: layer number of the module; modules are numbered after the verifier's layers.
    """
    return _QWEN_PREFIX if _is_among(names, _QWEN_JOINT) else f"model.layers.{layer}."


def name_in_module(name: str, prefix: str) -> str:
    """A tensor's name in `MtpModule`, from its name in the checkpoint."""
    if prefix == _QWEN_PREFIX:
        return _qwen_name(name)
    short = name.removeprefix(prefix)
    return _DEEPSEEK.get(short, f"block.{short}")


def _is_among(names: Collection[str], joint: str) -> bool:
    """Whether a weight exists, either plain or packed."""
    layer = joint.removesuffix(".weight")
    return joint in names or f"{layer}.qweight" in names or f"{layer}.weight_packed" in names


def _joint(layer: int) -> str:
    return f"model.layers.{layer}.eh_proj.weight"


def _qwen_name(name: str) -> str:
    if name.startswith(_QWEN_LAYER):
        return f"block.{name.removeprefix(_QWEN_LAYER)}"
    return _QWEN.get(name, name)
