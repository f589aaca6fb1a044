"""P-EAGLE: an EAGLE-3 head of several layers that drafts all its tokens in one pass. Source: arXiv 2602.01469.

Committed pairs are those of EAGLE-3. Behind the last one come slots of which nothing is known: each has the embedding
of the mask token and the features of one learned tap, and each is drafted from what it sees to its left.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wingbeat.kernels.layer.reference import rotate_and_store, silu_mul
from wingbeat.runtime.heads.contract import Attend, HeadConvention, Rotary
from wingbeat.runtime.heads.eagle3 import EagleHead, EagleHeadConfig
from wingbeat.runtime.heads.families import OnePassFamily
from wingbeat.runtime.heads.files import CheckpointError, fields_refused, read_tensors
from wingbeat.runtime.heads.head_config import conventions, head_config
from wingbeat.runtime.heads.layer import HeadNorm, rotate
from wingbeat.runtime.heads.layouts import MODELOPT, SPECULATORS, Layout, Theta, file_tensors
from wingbeat.runtime.heads.load import Lent, borrow, canonical_state, draft_token_ids
from wingbeat.runtime.heads.one_pass.load import OnePassCheckpoint
from wingbeat.runtime.heads.one_pass.read_config import check_supported, mask_token_id
from wingbeat.runtime.heads.target import TargetDescription

logger = logging.getLogger(__name__)


class HeadLayer(nn.Module):
    """A decoder layer behind the first: its inputs are one stream, normed."""

    def __init__(self, config: EagleHeadConfig) -> None:
        super().__init__()
        hidden, eps, dim = config.hidden_size, config.rms_norm_eps, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.heads, self.head_dim = (heads, kv_heads, kv_heads), dim
        self.input_layernorm = HeadNorm(hidden, eps)
        self.qkv_proj = nn.Linear(hidden, (heads + 2 * kv_heads) * dim, bias=config.attention_bias)
        self.q_norm = HeadNorm(dim, eps) if config.qk_norm else None
        self.k_norm = HeadNorm(dim, eps) if config.qk_norm else None
        self.o_proj = nn.Linear(heads * dim, hidden, bias=config.output_bias)
        self.post_attention_layernorm = HeadNorm(hidden, eps)
        self.gate_up_proj = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, hidden, bias=False)

    def forward(self, stream: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """The residual stream [..., T, H] behind the layer."""
        qkv = self.qkv_proj(self.input_layernorm(stream)).unflatten(-1, (sum(self.heads), self.head_dim))
        if getattr(attend, "in_fused_steps", False):
            mixed = self._fused(qkv, rotary, attend)
        else:
            query, key, value = qkv.split(self.heads, dim=-2)
            if self.q_norm is not None and self.k_norm is not None:
                query, key = self.q_norm(query.contiguous()), self.k_norm(key.contiguous())
            mixed = attend(rotate(query, *rotary), rotate(key, *rotary), value)
        stream = stream + self.o_proj(mixed.flatten(-2)).view(stream.shape)
        gate_up = self.gate_up_proj(self.post_attention_layernorm(stream))
        return stream + self.down_proj(silu_mul(gate_up.flatten(0, -2))).view(stream.shape)

    def _fused(self, qkv: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """What attention makes of products side by side [..., T, heads, head_dim]: [rows, num_heads, head_dim]."""
        norms = ()
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        rows = qkv.reshape(-1, *qkv.shape[-2:])
        cos, sin = (part.reshape(len(rows), self.head_dim) for part in rotary)
        return attend.over(rotate_and_store(rows, cos, sin, *attend.cache, attend.slot_mapping, *norms))


class ParallelEagleHead(EagleHead):
    """EAGLE-3's layer, those behind it, and the tap of a slot of which nothing is known.

    Args:
        mask_token_id: of the embedding that such slots have.
    """

    def __init__(self, config: EagleHeadConfig, num_layers: int, mask_token_id: int) -> None:
        super().__init__(config)
        if not 0 <= mask_token_id < config.vocab_size:
            raise ValueError(f"mask_token_id={mask_token_id} is outside the embedding of {config.vocab_size} rows")
        self.mask_token_id = mask_token_id
        self.behind = nn.ModuleList(HeadLayer(config) for _ in range(num_layers - 1))
        self.mask_hidden = nn.Parameter(torch.empty(1, 1, self.taps_size))

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return 1 + len(self.behind)

    def run_layers(self, token_ids: Tensor, features: Tensor, rotary: Rotary, attends: list[Attend]) -> Tensor:
        """`forward` through every layer; `attends` are by layer."""
        stream = self(token_ids, features, rotary, attends[0])
        for layer, attend in zip(self.behind, attends[1:], strict=True):
            stream = layer(stream, rotary, attend)
        return stream

    def masked_features(self) -> Tensor:
        """[1, 1, H]: of every slot of which nothing is known."""
        return self.fuse(self.mask_hidden)


def read_parallel_config(
    checkpoint: OnePassCheckpoint, target_hidden_size: int, target_num_layers: int
) -> tuple[EagleHeadConfig, Layout, HeadConvention]:
    """The canonical config of a P-EAGLE head, whose names its tensors have, and how it is read.

    Raises:
        CheckpointError: a field is missing, not supported, or does not fit the target.
    """
    raw, shapes = checkpoint.raw, checkpoint.shapes
    body = raw.get("transformer_layer_config") or raw
    check_supported(raw, body, OnePassFamily.PEAGLE, shapes)
    sliding = [kind for kind in body.get("layer_types") or [] if kind != "full_attention"]
    if sliding:
        raise CheckpointError(f"a P-EAGLE head with layer_types={sliding[0]!r} is not supported")
    written = SPECULATORS if "transformer_layer_config" in raw else MODELOPT
    # Names are canonical, and neither a norm nor the base of the rotation is left open as in older tools' files.
    layout = replace(written, may_norm_before_residual=False, rope_theta=Theta.READ)
    readings = conventions(raw, layout, shapes, target_num_layers, target_hidden_size)
    return head_config(raw, layout, shapes, target_hidden_size, readings[0]), layout, readings[0]


def num_layers_of(checkpoint: OnePassCheckpoint) -> int:
    """Decoder layers, by the names of the tensors.

    Raises:
        CheckpointError: there are none.
    """
    numbers = {name.split(".")[1] for name in checkpoint.shapes if name.startswith("layers.")}
    if not numbers or numbers != {str(number) for number in range(len(numbers))}:
        raise CheckpointError(f"the tensors are of layers {sorted(numbers)}: they must be numbered from 0 without gaps")
    return len(numbers)


def fit_parallel_head(
    checkpoint: OnePassCheckpoint,
    tensors: dict[str, Tensor],
    target: TargetDescription,
    embedding: Lent,
    lm_head: Lent,
) -> tuple[ParallelEagleHead, dict[str, Tensor], Tensor, list[str]]:
    """A head on the meta device, its state, its token map, and the names of what the target lends.

    Raises:
        CheckpointError: a bad config, or a missing, unexpected or mis-shaped tensor.
    """
    config, layout, convention = read_parallel_config(checkpoint, target.hidden_size, target.num_layers)
    if config.vocab_size != target.vocab_size:
        raise CheckpointError(f"vocab_size={config.vocab_size} differs from the target's {target.vocab_size}")
    num_layers = num_layers_of(checkpoint)
    with torch.device("meta"), fields_refused():
        head = ParallelEagleHead(config, num_layers, mask_token_id(checkpoint.raw)).with_convention(convention)
    token_ids = draft_token_ids(tensors, config)
    lent = {"embed_tokens.weight": embedding}
    if config.draft_vocab_size == config.vocab_size:
        lent["lm_head.weight"] = lm_head
    borrowed = borrow(tensors, lent)

    def names_of(canonical: str, tensor: Tensor) -> dict[str, Tensor]:
        return parallel_tensors(layout, config, canonical, tensor)

    return head, canonical_state(tensors, head, names_of), token_ids, borrowed


def parallel_tensors(layout: Layout, config: EagleHeadConfig, canonical: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor of a head -> the tensors of the file that it is made of, by the names of the layout, in order."""
    if not canonical.startswith("behind."):
        return file_tensors(layout, config, canonical, tensor)
    _, index, rest = canonical.split(".", 2)
    return file_tensors(replace(layout, layer=f"layers.{int(index) + 1}."), config, rest, tensor)


def load_parallel_head(
    checkpoint: OnePassCheckpoint, target: TargetDescription, dtype: torch.dtype, device: str | torch.device
) -> ParallelEagleHead:
    """Read a P-EAGLE head in evaluation mode.

    Raises:
        CheckpointError: as `fit_parallel_head`.
    """
    tensors = checkpoint.canonical(read_tensors(checkpoint.folder))
    head, state, token_ids, borrowed = fit_parallel_head(checkpoint, tensors, target, target.embedding, target.lm_head)
    placed: dict[str, Any] = {name: tensor.to(device, dtype) for name, tensor in state.items()}
    head.load_state_dict(placed | {"draft_token_ids": token_ids.to(device)}, assign=True)
    head.reset_rope(device)
    logger.info(
        "drafter %s: P-EAGLE, %d layers, taps enter layers %s, mask token %d, draft vocabulary %d of %d, "
        "norm_before_residual=%s, from the target: %s",
        Path(checkpoint.folder),
        head.num_layers,
        list(head.tap_layers),
        head.mask_token_id,
        head.config.draft_vocab_size,
        head.config.vocab_size,
        head.convention.norm_before_residual,
        ", ".join(borrowed) or "nothing",
    )
    return head.eval().requires_grad_(False)
