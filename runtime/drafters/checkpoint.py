"""Checkpoints of EAGLE-3 heads: every readable format becomes one canonical head, or an error that names what is wrong.

Reads the layouts of SafeAILab and SpecForge (same tensors, other conventions), writes SpecForge's. Nothing is guessed
in silence: unknown, missing and mis-shaped tensors are errors, and one log line states the resolved convention.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save_file
from torch import Tensor

from wingbeat.runtime.drafters.conventions import candidates, state, stated
from wingbeat.runtime.drafters.draft_head import HeadConvention
from wingbeat.runtime.drafters.eagle_head import EagleHead, EagleHeadConfig
from wingbeat.runtime.drafters.target import TargetDescription

logger = logging.getLogger(__name__)

_LAYER = "midlayer."
_PLAIN = {
    "hidden_norm.weight": f"{_LAYER}hidden_norm.weight",
    "input_layernorm.weight": f"{_LAYER}input_layernorm.weight",
    "post_attention_layernorm.weight": f"{_LAYER}post_attention_layernorm.weight",
    "o_proj.weight": f"{_LAYER}self_attn.o_proj.weight",
    "o_proj.bias": f"{_LAYER}self_attn.o_proj.bias",
    "down_proj.weight": f"{_LAYER}mlp.down_proj.weight",
}
_SAFE_TENSORS, _TORCH_FILE = "model.safetensors", "pytorch_model.bin"


class CheckpointError(ValueError):
    """A drafter checkpoint cannot be read; the message names the tensor or the config field."""


def load_eagle_head(
    path: str | Path,
    *,
    target_hidden_size: int,
    target_num_layers: int,
    target_vocab_size: int,
    target_embedding: Tensor | None = None,
    target_lm_head: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    convention: HeadConvention | None = None,
) -> EagleHead:
    """Read an EAGLE-3 head, in evaluation mode, from a folder or a hub name.

    Args:
        target_embedding: [target_vocab_size, target_hidden_size], used (not copied) when the file has no embedding.
        target_lm_head: [target_vocab_size, hidden_size], used when the file has no lm_head and drafts every token.
        convention: how to read it where the files leave that open, one of `head_conventions`; None takes the first.

    Raises:
        CheckpointError: an unsupported family, a bad config, or a missing, unexpected or mis-shaped tensor.
    """
    folder = _folder(path)
    raw = _read_config(folder)
    tensors = _read_tensors(folder)
    _refuse_other_families(raw, tensors)
    convention = convention or _conventions(raw, target_num_layers)[0]
    config = _head_config(raw, tensors, target_hidden_size, convention)
    if config.vocab_size != target_vocab_size:
        raise CheckpointError(f"vocab_size={config.vocab_size} differs from the target's {target_vocab_size}")
    with torch.device("meta"):
        head = EagleHead(config)
    token_ids = _draft_token_ids(tensors, config)
    borrowed = _borrow(tensors, config, target_embedding, target_lm_head)
    state = _canonical(tensors, head)
    # `assign` keeps a borrowed embedding shared with the target.
    head.load_state_dict(
        {k: v.to(device, dtype) for k, v in state.items()} | {"draft_token_ids": token_ids}, assign=True
    )
    logger.info(
        "drafter %s: %s layout, taps enter layers %s (%s), draft vocabulary %d of %d, norm_output=%s, "
        "norm_before_residual=%s, from the target: %s",
        path,
        "SpecForge" if "eagle_config" in raw else "SafeAILab",
        list(config.tap_layers),
        "from the config" if _aux_layer_ids(raw) is not None else "by default: the config has none",
        config.draft_vocab_size,
        config.vocab_size,
        config.norm_output,
        config.norm_before_residual,
        ", ".join(borrowed) or "nothing",
    )
    head.reset_rope(device)
    return head.to(device).eval().requires_grad_(False)


def save_eagle_head(head: EagleHead, path: str | Path, *, with_embedding: bool = True) -> None:
    """Write config.json and model.safetensors (bfloat16) in SpecForge's layout.

    Args:
        with_embedding: False leaves `embed_tokens` out; a loader then takes the target's.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    config = head.config
    tensors = {
        name: part.detach().to("cpu", torch.bfloat16).contiguous()
        for canonical, tensor in head.state_dict().items()
        if canonical != "draft_token_ids" and (with_embedding or canonical != "embed_tokens.weight")
        for name, part in _split(canonical, tensor, config).items()
    }
    token_ids = head.draft_token_ids.cpu()
    tensors["d2t"] = token_ids - torch.arange(config.draft_vocab_size)
    tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, token_ids, True)
    for name, write in {
        _SAFE_TENSORS: lambda file: save_file(tensors, file, metadata={"format": "pt"}),
        "config.json": lambda file: file.write_text(json.dumps(_raw_config(config), indent=2) + "\n"),
    }.items():
        temporary = folder / f"{name}.tmp"
        write(temporary)
        temporary.replace(folder / name)


def _folder(path: str | Path) -> Path:
    if Path(path).is_dir():
        return Path(path)
    if Path(path).is_absolute() or str(path).startswith("."):
        raise CheckpointError(f"{path} is not a folder")
    return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors", "*.bin"]))


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{folder} has no config.json")
    return json.loads(file.read_text())


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    for name in (_SAFE_TENSORS, _TORCH_FILE):
        files = [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards = json.loads(index.read_text())["weight_map"].values()
            files = [folder / shard for shard in sorted(set(shards))]
        if not all(file.is_file() for file in files):
            continue
        read = load_file if name == _SAFE_TENSORS else _read_torch_file
        tensors = {key: tensor for file in files for key, tensor in read(file).items()}
        # Frequencies are computed from the config; old files carry them as buffers.
        return {key: tensor for key, tensor in tensors.items() if not key.endswith("rotary_emb.inv_freq")}
    raise CheckpointError(f"{folder} has neither {_SAFE_TENSORS} nor {_TORCH_FILE}, whole or in shards")


def _read_torch_file(file: Path) -> dict[str, Tensor]:
    return torch.load(file, map_location="cpu", weights_only=True)


def _refuse_other_families(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    family = _other_family(raw, tensors)
    if family:
        raise CheckpointError(f"{family} checkpoints are not supported; EAGLE-3 of SafeAILab or SpecForge is")


def _other_family(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str | None:
    architecture = " ".join(raw.get("architectures") or [])
    kind = str(raw.get("speculators_model_type") or "").lower()
    eagle_config = raw.get("eagle_config") or {}
    has_hidden_norm = any(name.endswith("hidden_norm.weight") for name in tensors)
    signs = {
        "EAGLE-4": "Eagle4" in architecture or any(name.startswith("efficient_lm_head") for name in tensors),
        "DFlash": "dflash" in architecture.lower() or kind == "dflash",
        "P-EAGLE": "peagle" in architecture.lower()
        or kind in ("peagle", "p_eagle", "p-eagle")
        or (eagle_config.get("parallel_draft_step") or 1) > 1,
        "EAGLE-3 with MLA attention": "Eagle3DeepseekV2" in architecture
        or any(".kv_a_proj" in name or ".q_a_proj" in name for name in tensors),
        "speculators": bool(kind) or "transformer_layer_config" in raw,
        "ModelOpt EAGLE-3": has_hidden_norm and any(name.startswith("layers.0.") for name in tensors),
        "EAGLE-1/2": not has_hidden_norm and any(name.startswith("layers.0.") for name in tensors),
    }
    return next((family for family, seen in signs.items() if seen), None)


def _aux_layer_ids(raw: Mapping[str, Any]) -> list[int] | None:
    return (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")


def head_conventions(path: str | Path, target: TargetDescription) -> tuple[HeadConvention, ...]:
    """Readings of a head that its files leave open, the likeliest first; one where nothing is ambiguous.

    Raises:
        CheckpointError: an unsupported family or a bad config.
    """
    return _conventions(_read_config(_folder(path)), target.num_layers)


def _conventions(raw: Mapping[str, Any], num_layers: int) -> tuple[HeadConvention, ...]:
    given = stated(raw)
    if given is not None:
        return (given,)
    ids, norm_output = _aux_layer_ids(raw), raw.get("norm_output")
    found = candidates(
        num_layers,
        ids,
        ids_name_outputs=True,
        norm_output=(False,) if norm_output is None else (bool(norm_output), not norm_output),
        norm_before_residual=(bool(raw.get("norm_before_residual", False)),),
    )
    if not found:
        source = "eagle_aux_hidden_state_layer_ids" if ids is not None else "no eagle_aux_hidden_state_layer_ids:"
        raise CheckpointError(f"{source} {ids or ''} names no layers ascending in 0..{num_layers - 1}")
    return found


def _head_config(
    raw: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    target_hidden_size: int,
    convention: HeadConvention,
) -> EagleHeadConfig:
    stated = raw.get("target_hidden_size") or target_hidden_size
    if stated != target_hidden_size:
        raise CheckpointError(f"target_hidden_size={stated} differs from the target's {target_hidden_size}")
    try:
        heads = raw["num_attention_heads"]
        return EagleHeadConfig(
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            target_hidden_size=target_hidden_size,
            vocab_size=raw["vocab_size"],
            draft_vocab_size=raw.get("draft_vocab_size") or raw["vocab_size"],
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_parameters=_rope_parameters(raw),
            max_position_embeddings=raw.get("max_position_embeddings", 2048),
            **convention._asdict(),
            fc_norm=bool(raw.get("fc_norm", False)) or "fc_norm.0.weight" in tensors,
            attention_bias=bool(raw.get("attention_bias", False)),
        )
    except KeyError as error:
        raise CheckpointError(f"config.json has no field {error.args[0]!r}") from error
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from error


def _rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    rope.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    return rope


def _draft_token_ids(tensors: dict[str, Tensor], config: EagleHeadConfig) -> Tensor:
    """Take d2t and t2d out of the tensors -> int64 [draft_vocab_size], the target id of each draft id."""
    size = config.draft_vocab_size
    offsets, mask = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if offsets is None:
        if size != config.vocab_size:
            raise CheckpointError(f"missing tensor d2t: draft_vocab_size={size} of vocab_size={config.vocab_size}")
        offsets = torch.zeros(size, dtype=torch.int64)
    _check_shape("d2t", offsets, (size,))
    token_ids = offsets.long() + torch.arange(size)
    if bool(((token_ids < 0) | (token_ids >= config.vocab_size)).any()):
        raise CheckpointError(f"d2t leads outside the target's vocabulary of {config.vocab_size}")
    if len(token_ids.unique()) != size:
        raise CheckpointError("d2t leads two draft ids to the same target id")
    if mask is not None:
        _check_shape("t2d", mask, (config.vocab_size,))
        if not torch.equal(mask.bool().nonzero().flatten(), token_ids.sort().values):
            raise CheckpointError("t2d marks other target ids than d2t leads to")
    return token_ids


def _borrow(
    tensors: dict[str, Tensor], config: EagleHeadConfig, embedding: Tensor | None, lm_head: Tensor | None
) -> list[str]:
    """Fill in what the file leaves to the target; the names of what was taken."""
    borrowed = []
    full_vocabulary = config.draft_vocab_size == config.vocab_size
    for name, tensor, allowed in (
        ("embed_tokens.weight", embedding, True),
        ("lm_head.weight", lm_head, full_vocabulary),
    ):
        if name not in tensors and tensor is not None and allowed:
            tensors[name] = tensor.detach()
            borrowed.append(name)
    return borrowed


def _canonical(tensors: dict[str, Tensor], head: EagleHead) -> dict[str, Tensor]:
    """File tensors -> the head's state, without the token map. Every tensor must be used, every shape must fit."""
    state = {}
    unused = set(tensors)
    for canonical, expected in head.state_dict().items():
        if canonical == "draft_token_ids":
            continue
        parts = []
        for name, part in _split(canonical, expected, head.config).items():
            if name not in tensors:
                raise CheckpointError(f"missing tensor {name}")
            _check_shape(name, tensors[name], tuple(part.shape))
            unused.discard(name)
            parts.append(tensors[name])
        state[canonical] = parts[0] if len(parts) == 1 else torch.cat(parts)
    if unused:
        raise CheckpointError(f"unexpected tensor {', '.join(sorted(unused))}")
    return state


def _split(canonical: str, tensor: Tensor, config: EagleHeadConfig) -> dict[str, Tensor]:
    """A tensor of the head -> the tensors of the file that it is made of."""
    kind = canonical.rpartition(".")[2]
    if canonical.startswith("qkv_proj."):
        key_value = config.num_key_value_heads * config.head_dim
        parts = tensor.split([config.num_attention_heads * config.head_dim, key_value, key_value])
        return {f"{_LAYER}self_attn.{n}_proj.{kind}": part for n, part in zip("qkv", parts, strict=True)}
    if canonical.startswith("gate_up_proj."):
        gate, up = tensor.chunk(2)
        return {f"{_LAYER}mlp.gate_proj.{kind}": gate, f"{_LAYER}mlp.up_proj.{kind}": up}
    return {_PLAIN.get(canonical, canonical): tensor}


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise CheckpointError(f"tensor {name} has shape {tuple(tensor.shape)}, expected {expected}")


def _raw_config(config: EagleHeadConfig) -> dict[str, Any]:
    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    same += ("target_hidden_size", "draft_vocab_size", "rms_norm_eps", "max_position_embeddings", "attention_bias")
    same += ("norm_before_residual", "norm_output", "fc_norm")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **{name: getattr(config, name) for name in same},
        "rope_parameters": dict(config.rope_parameters),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in config.tap_layers],
        },
        **state(HeadConvention(config.tap_layers, config.norm_output, config.norm_before_residual)),
    }
