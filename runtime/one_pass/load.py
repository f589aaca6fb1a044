"""Loads checkpoints of heads that draft in one pass: canonical tensor names, checks and errors.

Unknown, missing and mis-shaped tensors raise errors. A log line states how the head is read.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.heads.files import (
    CheckpointError,
    fields_refused,
    find_folder,
    read_config,
    read_shapes,
    read_tensors,
    torch_tensors,
)
from wingbeat.runtime.heads.load import check_shape, fit_vocabulary
from wingbeat.runtime.heads.plain_weights import plain_shapes, plain_tensors
from wingbeat.runtime.heads.rotary import turning_order
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.one_pass.config import OnePassConfig
from wingbeat.runtime.one_pass.families import OnePassFamily, one_pass_family
from wingbeat.runtime.one_pass.head import OnePassHead
from wingbeat.runtime.one_pass.read_config import one_pass_conventions, read_one_pass_config

logger = logging.getLogger(__name__)

MASK_FILE = "mask_embedding.pt"
"""File with the learned mask vector, for heads that have such a vector. The file contains a dictionary with the key
`embedding`.
"""
_IGNORED = ("verifier_norm.weight", "verifier_lm_head.weight")
_ALIASES = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^encoder\.fc\."), "fc."),
    (re.compile(r"^encoder\.output_norm_enc\."), "hidden_norm."),
    # Some training tools store these parameters as embedding modules, so that their tensor names end with `.weight`.
    (re.compile(r"(_codebook|mask_embedding|attention_sink_bias)\.weight$"), r"\1"),
    (re.compile(r"^(markov_w[12]|gate_proj|joint_proj)\."), r"markov_head.\1."),
)
_IN_ATTENTION = ("q_proj", "o_proj", "q_norm")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")


def file_name(name: str) -> str:
    """The canonical name of a tensor, from the tensor's name in a file. Different tools give the same tensor different
    names.
    """
    for pattern, replacement in _ALIASES:
        name = pattern.sub(replacement, name)
    return name


@dataclass(frozen=True)
class OnePassCheckpoint:
    """A head's folder, with tensor shapes but without values."""

    folder: Path
    family: OnePassFamily
    raw: Mapping[str, Any]
    """Fields of config.json."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the tensors by canonical name."""

    def config(self, target_hidden_size: int, target_num_layers: int) -> OnePassConfig:
        """The canonical config; raises the same errors as `read_one_pass_config`."""
        has_mask = (self.folder / MASK_FILE).is_file()
        sizes = (target_hidden_size, target_num_layers)
        return read_one_pass_config(self.raw, self.family, self.shapes, *sizes, has_mask_embedding=has_mask)

    def conventions(self, target_hidden_size: int, target_num_layers: int) -> tuple[HeadConvention, ...]:
        """The conventions under which the head may be read, most likely first; raises the same errors as `config`."""
        return one_pass_conventions(self.raw, self.config(target_hidden_size, target_num_layers), target_num_layers)

    def canonical(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the folder by canonical name, dequantised, including the mask vector."""
        plain = plain_tensors(self.raw, tensors)
        named = {file_name(name): tensor for name, tensor in plain.items() if file_name(name) in self.shapes}
        mask = self.folder / MASK_FILE
        if mask.is_file():
            found = torch_tensors(mask)
            if "embedding" not in found:
                raise CheckpointError(f"{mask} has no tensor 'embedding'")
            named["mask_embedding"] = found["embedding"].flatten()
        return named


def read_one_pass_checkpoint(path: str | Path) -> OnePassCheckpoint:
    """Read config and tensor shapes of a folder or a hub repository.

    Raises:
        CheckpointError: the folder is unreadable, or holds no head that drafts in one pass.
    """
    folder = find_folder(path)
    raw = read_config(folder)
    shapes = plain_shapes(raw, read_shapes(folder))
    family = one_pass_family(raw, shapes)
    if family is None:
        raise CheckpointError(f"{folder} holds no head that drafts in one pass")
    named = {file_name(name): shape for name, shape in shapes.items() if file_name(name) not in _IGNORED}
    return OnePassCheckpoint(folder, family, raw, named)


def load_one_pass_head(
    checkpoint: OnePassCheckpoint, target: TargetDescription, dtype: torch.dtype, device: str | torch.device
) -> OnePassHead:
    """Load a DFlash-based head in evaluation mode.

    Raises:
        CheckpointError: the family or the config is not supported, or a tensor is missing, unexpected or mis-shaped.
    """
    config = checkpoint.config(target.hidden_size, target.num_layers)
    tensors = checkpoint.canonical(read_tensors(checkpoint.folder))
    with torch.device("meta"), fields_refused():
        head = OnePassHead(config)
    token_ids, borrowed = fit_vocabulary(tensors, config, target)
    state = _state(tensors, head)
    # On a CPU `fc` is kept in float32, because the sum over the taps needs float32, and torch has no matrix product of
    # half-precision matrices with a float32 result on CPUs.
    wide = {"fc.weight"} if torch.device(device).type == "cpu" else set()
    placed = {name: tensor.to(device, torch.float32 if name in wide else dtype) for name, tensor in state.items()}
    head.load_state_dict(placed | {"draft_token_ids": token_ids.to(device)}, assign=True)
    head.reset_rope(device)
    _log(checkpoint.folder, config, borrowed)
    return head.eval().requires_grad_(False)


def load_walker(
    checkpoint: OnePassCheckpoint,
    config: OnePassConfig,
    token_ids: Tensor,
    dtype: torch.dtype,
    device: str | torch.device,
) -> OnePassHead:
    """A head of which only the walk's weights and the token map are loaded; other weights stay on the meta device.

    Args:
        checkpoint: the head's folder.
        config: config under the chosen convention.
        token_ids: int64 [draft_vocab_size]: the target id of each draft id.
        dtype, device: dtype and device of the loaded weights.

    Raises:
        CheckpointError: a tensor is missing.
    """
    with torch.device("meta"), fields_refused():
        head = OnePassHead(config)
    tensors, state = checkpoint.canonical(read_tensors(checkpoint.folder)), {}
    for canonical, expected in head.state_dict().items():
        if canonical.startswith(("markov.", "selector.")):
            [name] = names_in_file(canonical, config)
            if name not in tensors:
                raise CheckpointError(f"missing tensor {name}")
            check_shape(name, tensors[name], tuple(expected.shape))
            state[canonical] = tensors[name].to(device, dtype)
    head.load_state_dict(state | {"draft_token_ids": token_ids.to(device)}, assign=True, strict=False)
    return head.eval().requires_grad_(False)


def _state(tensors: Mapping[str, Tensor], head: OnePassHead) -> dict[str, Tensor]:
    """Converts a file's tensors, without the token map, to the head's state dict. Raises an error unless all tensors
    are used and have the expected shapes.
    """
    state, unused = {}, set(tensors)
    for canonical, expected in head.state_dict().items():
        if canonical == "draft_token_ids":
            continue
        names = names_in_file(canonical, head.config)
        for name in names:
            if name not in tensors:
                raise CheckpointError(f"missing tensor {name}")
        parts = [tensors[name] for name in names]
        for name, part, shape in zip(names, parts, _shapes(canonical, expected, head.config, len(names)), strict=True):
            check_shape(name, part, shape)
        if canonical.startswith("kv_proj.") and head.config.value_scale != 1.0:
            parts[1::2] = [part * head.config.value_scale for part in parts[1::2]]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        state[canonical] = _in_turning_order(canonical, whole.view(expected.shape), head.config)
        unused.difference_update(names)
    if unused:
        raise CheckpointError(f"unexpected tensor {', '.join(sorted(unused))}")
    return state


def _in_turning_order(canonical: str, tensor: Tensor, config: OnePassConfig) -> Tensor:
    """Permutes query and key rows, and their norms, from the file's order to the order of rotate-half RoPE."""
    order = turning_order(config)
    if order is None:
        return tensor
    if canonical == "key_norms" or canonical.endswith(".q_norm.weight"):
        return tensor[..., order]
    if ".q_proj." in canonical:
        return tensor.unflatten(0, (-1, config.head_dim))[:, order].flatten(0, 1)
    if not canonical.startswith("kv_proj."):
        return tensor
    key, value = tensor.unflatten(0, (config.num_layers, 2, -1, config.head_dim)).unbind(1)
    return torch.stack([key[:, :, order], value], dim=1).flatten(0, 3)


def names_in_file(canonical: str, config: OnePassConfig) -> list[str]:
    """Names of the file's tensors that make up a tensor of the head, in concatenation order."""
    layers = range(config.num_layers)
    if canonical.startswith("kv_proj."):
        kind = canonical.rpartition(".")[2]
        return [f"layers.{i}.self_attn.{part}_proj.{kind}" for i in layers for part in "kv"]
    if canonical == "key_norms":
        return [f"layers.{i}.self_attn.k_norm.weight" for i in layers]
    if canonical.endswith(".sinks"):
        return [canonical.replace(".sinks", ".self_attn.attention_sink_bias")]
    if canonical.startswith("markov.confidence."):
        return [canonical.replace("markov.confidence.", "confidence_head.proj.")]
    if canonical.startswith("markov."):
        return [canonical.replace("markov.", "markov_head.", 1)]
    if canonical.startswith("selector."):
        return [canonical.replace("selector.", "candidate_selector.", 1)]
    found = _LAYER.fullmatch(canonical)
    if found is None:
        return [canonical]
    index, module, kind = found.groups()
    if module == "gate_up_proj":
        return [f"layers.{index}.mlp.{part}_proj.{kind}" for part in ("gate", "up")]
    if module in _IN_ATTENTION:
        return [f"layers.{index}.self_attn.{module}.{kind}"]
    return [f"layers.{index}.mlp.{module}.{kind}" if module == "down_proj" else canonical]


def _shapes(canonical: str, whole: Tensor, config: OnePassConfig, count: int) -> list[tuple[int, ...]]:
    """Shapes of the file's tensors that make up a tensor of the head."""
    if canonical == "key_norms":
        return [(config.head_dim,)] * count
    return [(whole.shape[0] // count, *whole.shape[1:])] * count


def _log(path: Path, config: OnePassConfig, borrowed: list[str]) -> None:
    causal, windows = [mask.causal for mask in config.masks], [mask.window for mask in config.masks]
    logger.info(
        "drafter %s: %s, %s slots, block of %d, %d layers (causal: %s, windows: %s), taps enter layers %s, mask token "
        "%s, draft vocabulary %d of %d, RoPE %s of base %g, from the target: %s",
        path,
        config.family,
        config.slots,
        config.block_size,
        config.num_layers,
        causal[0] if len(set(causal)) == 1 else causal,
        windows[0] if len(set(windows)) == 1 else windows,
        list(config.tap_layers),
        "by its own vector" if config.mask_token_id is None else config.mask_token_id,
        config.draft_vocab_size,
        config.vocab_size,
        config.rope_parameters["rope_type"],
        config.rope_parameters["rope_theta"],
        ", ".join(borrowed) or "nothing",
    )
