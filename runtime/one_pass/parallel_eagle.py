"""P-EAGLE: an EAGLE-3 head of several layers that drafts all its tokens in one pass (arXiv 2602.01469).

Committed pairs are the same as in EAGLE-3. Masked slots follow the last pair. Each slot's inputs are the embedding of
the mask token and the features of a learned tap vector; a slot sees all pairs and slots to its left.
"""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.heads.eagle3 import EagleHead, EagleHeadConfig
from wingbeat.runtime.heads.files import CheckpointError, fields_refused, read_tensors
from wingbeat.runtime.heads.head_config import conventions, head_config
from wingbeat.runtime.heads.layouts import MODELOPT, SPECULATORS, Layout, Theta, file_tensors
from wingbeat.runtime.heads.load import canonical_state, fit_vocabulary
from wingbeat.runtime.heads.rotary import in_turning_order
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.one_pass.families import OnePassFamily
from wingbeat.runtime.one_pass.load import OnePassCheckpoint
from wingbeat.runtime.one_pass.read_config import check_supported, mask_token_id

logger = logging.getLogger(__name__)


class ParallelEagleHead(EagleHead):
    """EAGLE-3 layers, plus the learned tap vector of masked slots.

    Args:
        config: shapes and conventions.
        mask_token_id: token whose embedding is the input of masked slots.
    """

    def __init__(self, config: EagleHeadConfig, mask_token_id: int) -> None:
        super().__init__(config)
        if not 0 <= mask_token_id < config.vocab_size:
            raise ValueError(f"mask_token_id={mask_token_id} is outside the embedding of {config.vocab_size} rows")
        self.mask_token_id = mask_token_id
        self.mask_hidden = nn.Parameter(torch.empty(1, 1, self.taps_size))

    def masked_features(self) -> Tensor:
        """Features that all masked slots share, [1, 1, H]."""
        return self.fuse(self.mask_hidden)


def read_parallel_config(
    checkpoint: OnePassCheckpoint, target_hidden_size: int, target_num_layers: int
) -> tuple[EagleHeadConfig, Layout, HeadConvention]:
    """The canonical config of a P-EAGLE head, the layout of its tensor names, and its likeliest convention.

    Raises:
        CheckpointError: a field is missing, not supported, or does not fit the target.
    """
    raw, shapes = checkpoint.raw, checkpoint.shapes
    body = raw.get("transformer_layer_config") or raw
    check_supported(raw, body, OnePassFamily.PEAGLE, shapes)
    sliding = [kind for kind in body.get("layer_types") or [] if kind != "full_attention"]
    if sliding:
        raise CheckpointError(f"a P-EAGLE head with layer_types={sliding[0]!r} is not supported")
    readings, layout = parallel_conventions(checkpoint, target_hidden_size, target_num_layers), _layout(checkpoint)
    return head_config(raw, layout, shapes, target_hidden_size, readings[0]), layout, readings[0]


def _layout(checkpoint: OnePassCheckpoint) -> Layout:
    written = SPECULATORS if "transformer_layer_config" in checkpoint.raw else MODELOPT
    # Tensor names are canonical at this point. The RoPE base is read from the config. Some older tools ignore the
    # config's base in training, but these tools do not write P-EAGLE heads.
    return replace(written, rope_theta=Theta.READ)


def parallel_conventions(
    checkpoint: OnePassCheckpoint, target_hidden_size: int, target_num_layers: int
) -> tuple[HeadConvention, ...]:
    """Conventions that a P-EAGLE head's files allow, most likely first; raises the errors of `conventions`."""
    layout = _layout(checkpoint)
    return conventions(checkpoint.raw, layout, checkpoint.shapes, target_num_layers, target_hidden_size)


def load_parallel_head(
    checkpoint: OnePassCheckpoint, target: TargetDescription, dtype: torch.dtype, device: str | torch.device
) -> ParallelEagleHead:
    """Load a P-EAGLE head in evaluation mode.

    Raises:
        CheckpointError: the config is not supported, or a tensor is missing, unexpected or mis-shaped.
    """
    tensors = checkpoint.canonical(read_tensors(checkpoint.folder))
    config, layout, convention = read_parallel_config(checkpoint, target.hidden_size, target.num_layers)
    with torch.device("meta"), fields_refused():
        head = ParallelEagleHead(config, mask_token_id(checkpoint.raw)).with_convention(convention)
    token_ids, borrowed = fit_vocabulary(tensors, config, target)
    state = in_turning_order(canonical_state(tensors, head, partial(file_tensors, layout, config)), config)
    placed: dict[str, Any] = {name: tensor.to(device, dtype) for name, tensor in state.items()}
    head.load_state_dict(placed | {"draft_token_ids": token_ids.to(device)}, assign=True)
    head.reset_rope(device)
    logger.info(
        "drafter %s: P-EAGLE, %d layers, taps enter layers %s, mask token %d, draft vocabulary %d of %d, "
        "norm_before_residual=%s, from the target: %s",
        Path(checkpoint.folder),
        head.config.num_layers,
        list(head.tap_layers),
        head.mask_token_id,
        head.config.draft_vocab_size,
        head.config.vocab_size,
        head.convention.norm_before_residual,
        ", ".join(borrowed) or "nothing",
    )
    return head.eval().requires_grad_(False)
