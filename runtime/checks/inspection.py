"""What a checkpoint folder holds, for people and programs: a draft head's or a whole model's format, shapes and memory.

Reads configs and the shapes of tensors; only a model's probe loads weights.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.heads.conventions import stated
from wingbeat.runtime.heads.files import read_shapes
from wingbeat.runtime.heads.head_config import aux_layer_ids, is_text_rope
from wingbeat.runtime.heads.layouts import Family
from wingbeat.runtime.heads.load import HeadCheckpoint, read_checkpoint
from wingbeat.runtime.heads.mtp_loader import num_mtp_modules
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.kv.pool import LayerAttention
from wingbeat.runtime.verifier.loader import load_model

_TOKEN_MAPS = ("d2t", "t2d")
_LENT = ("embed_tokens.weight", "lm_head.weight")
_DEFAULT_NUM_TAPS = 3
_DEEP = 1024
"""Layers of a verifier that is not known: more than any has, so that all readings of ids are possible."""


@dataclass(frozen=True)
class Convention:
    """How a head's weights are read, as far as its files say."""

    likeliest: Mapping[str, Any]
    """Fields of `HeadConvention`; tap_layers is None where only the verifier's depth tells."""
    open_fields: tuple[str, ...] = ()
    """Those that the files leave open."""
    readings: tuple[HeadConvention, ...] = ()
    """All that are possible for the verifier; empty without one."""
    source: str = ""
    """Where the taps come from."""


@dataclass(frozen=True)
class Memory:
    """What serving takes in one dtype."""

    dtype: str
    weights_bytes: int
    kv_bytes_per_token: int


@dataclass(frozen=True)
class Inspection:
    """A folder's content."""

    path: str
    kind: str
    """`eagle` or `model`."""
    format: str
    shapes: Mapping[str, Any]
    parameters: int
    """Of the files' tensors."""
    file_bytes: int
    memory: Memory
    convention: Convention | None = None
    """Of heads."""
    from_verifier: tuple[str, ...] = ()
    """Tensors that a head leaves out and takes from its verifier."""
    probe: Mapping[str, Any] | None = None
    """Of models: whether one can be the verifier, and what its layers' attention is."""
    mtp: Mapping[str, int] | None = None
    """Of models: multi-token-prediction modules in the checkpoint."""
    notes: tuple[str, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        fields = asdict(self)
        if self.convention is not None:
            fields["convention"]["readings"] = [reading._asdict() for reading in self.convention.readings]
        return fields


def inspect_head(folder: Path, target: TargetDescription | None, dtype: torch.dtype) -> Inspection:
    """Look into a draft head's folder.

    Args:
        target: its verifier, which settles what its config leaves to it.
        dtype: it would be served in.

    Raises:
        CheckpointError: it cannot be read, is of a family that is not supported, or does not fit the verifier.
    """
    checkpoint = read_checkpoint(folder)
    hidden_size = target.hidden_size if target is not None else _target_hidden_size(checkpoint)
    if target is not None:
        readings = checkpoint.conventions(target.num_layers, hidden_size)
        convention = _convention(checkpoint, readings)
    else:
        readings, convention = (), _convention_alone(checkpoint, hidden_size)
    placeholder = HeadConvention(tuple(range(_num_taps(checkpoint))))
    config = checkpoint.config(hidden_size, readings[0] if readings else placeholder)
    shapes = {
        name: getattr(config, name)
        for name in (
            *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
            *("target_hidden_size", "vocab_size", "draft_vocab_size", "max_position_embeddings", "num_taps"),
        )
    }
    tensors = {name: shape for name, shape in checkpoint.shapes.items() if name not in _TOKEN_MAPS}
    return Inspection(
        path=str(folder),
        kind="eagle",
        format=f"{checkpoint.layout.family} in {checkpoint.layout.name} layout",
        shapes=shapes | {"rope_type": config.rope_parameters.get("rope_type", "default")},
        parameters=_count(tensors.values()),
        file_bytes=_file_bytes(folder),
        memory=Memory(
            _name(dtype),
            _count(tensors.values()) * dtype.itemsize,
            2 * config.num_key_value_heads * config.head_dim * dtype.itemsize,
        ),
        convention=convention,
        from_verifier=tuple(name for name in _LENT if name not in checkpoint.shapes),
        notes=("m-RoPE is read as for text",) if is_text_rope(checkpoint.raw) else (),
    )


def inspect_model(folder: Path, dtype: torch.dtype, device: torch.device) -> Inspection:
    """Look into a causal LM's folder, and load it to probe its attention.

    Raises:
        CheckpointError: its tensors cannot be read.
        ValueError, OSError: transformers does not know its config.
    """
    target = TargetDescription.from_checkpoint(folder)
    # As a dictionary: some configs refuse to name one value for what differs from layer to layer.
    config, tensors = target.config.to_dict(), read_shapes(folder)
    probe, layers = _probe(folder, dtype, device)
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    names += ("intermediate_size", "vocab_size", "max_position_embeddings")
    known = {name: config[name] for name in names if config.get(name) is not None}
    num_modules = num_mtp_modules(target)
    in_modules = _count(shape for name, shape in tensors.items() if _is_mtp(name, target)) if num_modules else 0
    whole = AutoConfig.from_pretrained(folder, local_files_only=True)
    return Inspection(
        path=str(folder),
        kind="model",
        format=(getattr(whole, "architectures", None) or [type(whole).__name__])[0],
        shapes=known,
        parameters=_count(tensors.values()),
        file_bytes=_file_bytes(folder),
        memory=Memory(
            _name(dtype),
            (_count(tensors.values()) - in_modules) * dtype.itemsize,
            sum(layer.kv_size for layer in layers) * dtype.itemsize,
        ),
        probe=probe,
        mtp={"modules": num_modules, "parameters": in_modules} if num_modules else None,
    )


def _convention(checkpoint: HeadCheckpoint, readings: tuple[HeadConvention, ...]) -> Convention:
    differing = tuple(
        name for name in HeadConvention._fields if len({getattr(reading, name) for reading in readings}) > 1
    )
    return Convention(readings[0]._asdict(), differing, readings, _source(checkpoint))


def _convention_alone(checkpoint: HeadCheckpoint, target_hidden_size: int) -> Convention:
    """What can be said without the verifier: the number of its layers decides what ids and defaults mean."""
    given = stated(checkpoint.raw)
    if given is not None:
        return Convention(given._asdict(), source=_source(checkpoint))
    ids, name_outputs = aux_layer_ids(checkpoint.raw)
    taps = None if ids is None else tuple(layer + name_outputs for layer in ids)
    readings = checkpoint.conventions(_DEEP, target_hidden_size)
    found = _convention(checkpoint, readings)
    return Convention({**found.likeliest, "tap_layers": taps}, found.open_fields, source=found.source)


def _source(checkpoint: HeadCheckpoint) -> str:
    ids, name_outputs = aux_layer_ids(checkpoint.raw)
    if checkpoint.layout.family is Family.EAGLE1:
        return "the output of the verifier's final norm"
    if stated(checkpoint.raw) is not None:
        return "stated by the file"
    if ids is None:
        return "no ids in the config: layers 2, n // 2 and n - 3 of n are usual"
    return f"ids {list(ids)} in the config, counted by the layer they {'leave' if name_outputs else 'enter'}"


def _num_taps(checkpoint: HeadCheckpoint) -> int:
    if checkpoint.layout.family is Family.EAGLE1:
        return 1
    given, (ids, _) = stated(checkpoint.raw), aux_layer_ids(checkpoint.raw)
    if given is not None:
        return len(given.tap_layers)
    return _DEFAULT_NUM_TAPS if ids is None else len(ids)


def _target_hidden_size(checkpoint: HeadCheckpoint) -> int:
    """From what `fc` reads: the taps, or a token's embedding and one hidden state."""
    width = checkpoint.shapes.get("fc.weight", (0, 0))[-1]
    return width // (2 if checkpoint.layout.family is Family.EAGLE1 else _num_taps(checkpoint))


def _probe(folder: Path, dtype: torch.dtype, device: torch.device) -> tuple[dict[str, Any], list[LayerAttention]]:
    try:
        loaded = load_model(folder, dtype, device)
    except ValueError as error:  # an UnsupportedModelError, or transformers has no causal LM of this kind
        return {"can_be_verifier": False, "reason": str(error).strip().splitlines()[0]}, []
    groups: list[dict[str, Any]] = []
    for index, layer in enumerate(loaded.layers):
        described = asdict(layer)
        if groups and {name: groups[-1][name] for name in described} == described:
            groups[-1]["last"] = index
        else:
            groups.append({"first": index, "last": index, **described})
    return {
        "can_be_verifier": True,
        "max_model_len": loaded.max_position_embeddings,
        "eos_token_ids": sorted(loaded.eos_token_ids),
        "layers": groups,
    }, loaded.layers


def _is_mtp(name: str, target: TargetDescription) -> bool:
    if name.startswith("mtp."):
        return True
    _, found, rest = name.partition("layers.")
    number = rest.partition(".")[0]
    return bool(found) and number.isdigit() and int(number) >= target.num_layers


def _count(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _file_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.suffix in (".safetensors", ".bin"))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
