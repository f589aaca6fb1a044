"""Writes one-pass heads as checkpoints: DFlash's layout and its derivatives; P-EAGLE in the speculators layout."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wingbeat.runtime.heads.conventions import state
from wingbeat.runtime.heads.layouts import SPECULATORS, file_tensors
from wingbeat.runtime.heads.save import check_turning, decoder_fields, speculators_fields, token_map, write_checkpoint
from wingbeat.runtime.one_pass.config import OnePassConfig, Slots
from wingbeat.runtime.one_pass.families import OnePassFamily
from wingbeat.runtime.one_pass.head import OnePassHead
from wingbeat.runtime.one_pass.load import names_in_file
from wingbeat.runtime.one_pass.parallel_eagle import ParallelEagleHead

_ARCHITECTURES = {
    OnePassFamily.DFLASH: "DFlashDraftModel",
    OnePassFamily.JETSPEC: "DFlashDraftModel",
    OnePassFamily.DSPARK: "Qwen3DSparkModel",
    OnePassFamily.DFLASH2: "DFlash2DraftModel",
}


def save_one_pass_head(head: OnePassHead, path: str | Path, *, target_num_layers: int) -> None:
    """Write config.json and model.safetensors (bfloat16), as the family's own tool does.

    The embedding is omitted, and so is the output matrix of a head that drafts the whole vocabulary, because they equal
    the target's and a loader borrows them from the target.

    Raises:
        ValueError: the layout cannot represent this head; the message names the fields.
    """
    config = head.config
    _check_writable(config)
    left_out = {"draft_token_ids", "embed_tokens.weight"}
    if config.draft_vocab_size == config.vocab_size:
        left_out.add("lm_head.weight")
    tensors: dict[str, Tensor] = {}
    for canonical, whole in head.state_dict().items():
        if canonical not in left_out:
            names = names_in_file(canonical, config)
            parts = whole.unbind() if canonical == "key_norms" else whole.chunk(len(names))
            tensors |= {name: part.to("cpu", torch.bfloat16) for name, part in zip(names, parts, strict=True)}
    if "lm_head.weight" not in left_out:
        tensors |= token_map(head.draft_token_ids, config.vocab_size)
    write_checkpoint(Path(path), tensors, _raw_config(config, target_num_layers) | state(head.convention))


def save_parallel_head(head: ParallelEagleHead, path: str | Path, *, verifier: str | None = None) -> None:
    """Write a P-EAGLE head in speculators layout: config.json, and model.safetensors (bfloat16) without embedding.

    Args:
        head: the head.
        path: folder to write.
        verifier: folder or hub name of the target, recorded in the config.

    Raises:
        ValueError: the layout cannot represent this head; the message names the fields.
    """
    config = head.config
    check_turning(config)
    tensors = {
        name: part.to("cpu", torch.bfloat16)
        for canonical, tensor in head.state_dict().items()
        if canonical not in ("draft_token_ids", "embed_tokens.weight")
        for name, part in file_tensors(SPECULATORS, config, canonical, tensor).items()
    }
    tensors |= token_map(head.draft_token_ids, config.vocab_size)
    raw = speculators_fields(config, verifier, "peagle") | {
        "architectures": ["PEagleSpeculator"],
        "mask_token_id": head.mask_token_id,
    }
    raw["transformer_layer_config"]["num_hidden_layers"] = config.num_layers
    write_checkpoint(Path(path), tensors, raw | state(head.convention._replace(rope_theta=None)))


def _check_writable(config: OnePassConfig) -> None:
    shifted = config.family is OnePassFamily.DSPARK
    lacking = {
        "mask_token_id": config.mask_token_id is None,
        "output_bias": config.output_bias != config.attention_bias,
        "slots": config.slots is not (Slots.SHIFT if shifted else Slots.FILL_IN),
        "rotary_dim": config.rotary_dim is not None,
        "rope_interleaved": config.rope_interleaved,
        "masks": any(mask != config.masks[0] for mask in config.masks),
    }
    wrong = [name for name, seen in lacking.items() if seen]
    if wrong:
        raise ValueError(
            f"{config.family}'s layout cannot express this {', '.join(wrong)}: other engines would read the head wrong"
        )


def _raw_config(config: OnePassConfig, target_num_layers: int) -> dict[str, Any]:
    """Config fields, nested as the family's own tool nests them; taps are listed by the layers whose outputs are
    tapped.
    """
    raw = {
        "architectures": [_ARCHITECTURES[config.family]],
        **decoder_fields(config, "qwen3"),
        "num_hidden_layers": config.num_layers,
        "dtype": "bfloat16",
        "block_size": config.block_size,
        "num_target_layers": target_num_layers,
        "target_hidden_size": config.target_hidden_size,
        "draft_vocab_size": config.draft_vocab_size,
    }
    own = {"target_layer_ids": [layer - 1 for layer in config.tap_layers], "mask_token_id": config.mask_token_id}
    causal, window = config.masks[0]
    if causal:
        raw["is_causal"] = True
    if window is not None:
        own |= {"use_swa": True, "swa_window_size": window}
    scales = {"input_embedding_scale": config.embedding_scale, "output_multiplier": config.logit_scale}
    own |= {name: scale for name, scale in scales.items() if scale != 1.0}
    if config.logit_softcap is not None:
        own["final_logit_softcapping"] = config.logit_softcap
    if config.family is OnePassFamily.JETSPEC:
        own["causal_head"] = True
    if config.markov is not None:
        rank, kind, has_confidence, reads_token = config.markov
        return (
            raw
            | own
            | {
                "markov_rank": rank,
                "markov_head_type": str(kind),
                "enable_confidence_head": has_confidence,
                "confidence_head_with_markov": reads_token,
            }
        )
    if config.lattice is not None:
        taps, group, rank, top_k = config.lattice
        own |= {"conv_kernel_size": taps, "conv_group_size": group, "selector_rank": rank, "selector_top_k": top_k}
    return raw | {"dflash_config": own}
