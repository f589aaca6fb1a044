"""`wingbeat inspect`: shows what a checkpoint folder or an engine directory contains, and how well a drafter in it
drafts for a verifier.

The command reads configs and tensor shapes. Weights are loaded only to probe a model and to test a drafter.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging

from wingbeat.deployments.cli.options import UserError
from wingbeat.deployments.inspection.advice import advice_tables, advise
from wingbeat.deployments.inspection.options import InspectConfig
from wingbeat.deployments.inspection.tables import Findings, layers_table, readings_table, self_test_table
from wingbeat.deployments.local.engine import LocalConfig, OpenEngine, check_device
from wingbeat.deployments.options.model_options import LoadOptions
from wingbeat.deployments.parts import first_result
from wingbeat.kernels.parts import load_function
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.drafters.choice import KINDS
from wingbeat.runtime.folder_kinds import folder_problem
from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.heads.conventions import stated
from wingbeat.runtime.heads.files import read_shapes
from wingbeat.runtime.heads.head_config import aux_layer_ids, has_axes
from wingbeat.runtime.heads.layouts import Family
from wingbeat.runtime.heads.load import HeadCheckpoint, is_head_folder, read_checkpoint
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.hub import checkpoint_folder
from wingbeat.runtime.hugging_face import read_config
from wingbeat.runtime.parts import hooks
from wingbeat.runtime.verifier.loading.loader import load_model

_TOKEN_MAPS = ("d2t", "t2d")
_LENT = ("embed_tokens.weight", "lm_head.weight")
_DEFAULT_NUM_TAPS = 3
_DEEP = 1024
"""Number of layers assumed for an unknown verifier. No model has so many layers, so no interpretation of layer ids is
excluded.
"""
_OF_MODULES = [kind for kind in KINDS.values() if kind.modules is not None]
"""Kinds of drafters whose weights are modules in a verifier's checkpoint."""
_AT_ONCE = 16
"""Number of sequences that the self-test's engine runs at once."""


def inspect_command(config: InspectConfig, folder: Path, as_json: bool, open_engine: OpenEngine) -> None:
    """Print the content of a folder.

    Raises:
        UserError: the folder is not a checkpoint, is not supported, or does not fit the verifier.
    """
    check_device(config.device)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        if first_result("inspects", folder, as_json):
            return
        if (problem := folder_problem(folder)) is not None:
            raise UserError(f"{problem}; give a checkpoint's folder, or an engine directory")
        folder = checkpoint_folder(folder)
        dtype = getattr(torch, config.resolved_dtype(folder))
        target = None if config.model is None else TargetDescription.from_checkpoint(config.model_dir())
        if (findings := first_result("head_findings", folder, target)) is not None:
            own, parameters, kv_numbers = findings
            found = _common(folder, dtype, parameters, parameters, kv_numbers) | own
        elif is_head_folder(folder):
            found = inspect_head(folder, target, dtype)
        else:
            found = inspect_model(folder, dtype, torch.device(config.resolved_device()), config.rounds_weights())
        found |= {"verifier": None, "drafter": None, "measured_convention": None, "self_test": None}
        if target is not None:
            found |= _try(config, folder, found, target, open_engine)
    except (ValueError, OSError) as error:
        raise UserError((str(error).strip().splitlines() or [type(error).__name__])[0]) from error
    if as_json:
        print(json.dumps(found))
        return
    for table in _tables(found):
        Console().print(table)


def advise_command(config: InspectConfig, source: Path, as_json: bool) -> None:
    """Print the drafters that exist for a model, and the speeds to expect.

    Raises:
        UserError: the model's configuration cannot be read.
    """
    try:
        found = advise(source, torch.device(config.resolved_device()))
    except (ValueError, OSError) as error:
        raise UserError((str(error).strip().splitlines() or [type(error).__name__])[0]) from error
    if as_json:
        print(json.dumps(found))
        return
    for table in advice_tables(found):
        Console().print(table)


def inspect_head(folder: Path, target: TargetDescription | None, dtype: torch.dtype) -> Findings:
    """Return findings about a draft head's folder.

    Args:
        target: description of the verifier, from which details that the head's config does not specify are derived;
            None if the verifier is unknown.
        dtype: dtype in which the head would be served.

    Raises:
        CheckpointError: the head cannot be read, its family is not supported, or it does not fit the verifier.
    """
    checkpoint = read_checkpoint(folder)
    hidden_size = target.hidden_size if target is not None else _target_hidden_size(checkpoint)
    readings = () if target is None else checkpoint.conventions(target.num_layers, hidden_size)
    placeholder = HeadConvention(tuple(range(_num_taps(checkpoint))))
    config = checkpoint.config(hidden_size, readings[0] if readings else placeholder)
    names = (
        *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("target_hidden_size", "vocab_size", "draft_vocab_size", "max_position_embeddings", "num_taps"),
    )
    shapes = {name: getattr(config, name) for name in names}
    parameters = _count(shape for name, shape in checkpoint.shapes.items() if name not in _TOKEN_MAPS)
    kv_numbers = config.kv_numbers
    return _common(folder, dtype, parameters, parameters, kv_numbers) | {
        "kind": "eagle",
        "format": f"{checkpoint.layout.family} in {checkpoint.layout.name} layout",
        "shapes": shapes | {"rope_type": config.rope_parameters.get("rope_type", "default")},
        "convention": _convention(checkpoint, readings) if readings else _convention_alone(checkpoint, hidden_size),
        "from_verifier": [name for name in _LENT if name not in checkpoint.shapes],
        "notes": ["rotary positions on three axes"] if has_axes(checkpoint.raw) else [],
    }


def inspect_model(folder: Path, dtype: torch.dtype, device: torch.device, eight_bits: bool = False) -> Findings:
    """Return findings about a causal LM's folder; loads the model to probe its attention.

    Args:
        eight_bits: as for `load_model`.

    Raises:
        CheckpointError: the tensors cannot be read.
        ValueError, OSError: transformers does not know the config.
    """
    target = TargetDescription.from_checkpoint(folder)
    # The config is read as a dictionary, because some config classes raise an error for attributes that differ from
    # layer to layer.
    config, tensors = target.config.to_dict(), read_shapes(folder)
    probe, kv_numbers, held = _probe(folder, dtype, device, eight_bits)
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    names += ("intermediate_size", "vocab_size", "max_position_embeddings")
    modules, parameters = _modules(tensors, target.num_layers), _count(tensors.values())
    in_modules = sum(own["parameters"] for own in modules.values() if own is not None)
    whole = read_config(folder)
    found = _common(folder, dtype, parameters, parameters - in_modules, kv_numbers)
    # Sizes are taken from file headers only for unquantized weights, because headers do not describe quantized weights.
    found["memory"] |= {"weights_bytes": held} if held and (eight_bits or target.quantization) else {}
    return found | {
        "kind": "model",
        "format": (getattr(whole, "architectures", None) or [type(whole).__name__])[0],
        "shapes": {name: config[name] for name in names if config.get(name) is not None},
        "probe": probe,
        **modules,
    }


def _modules(tensors: Mapping[str, tuple[int, ...]], num_layers: int) -> dict[str, Findings | None]:
    """Return the drafting modules in a verifier's checkpoint, by kind of drafter; None for a kind without modules."""
    found: dict[str, Findings | None] = {}
    for kind in _OF_MODULES:
        modules = load_function(kind.modules)(tensors, num_layers)
        parameters = _count(tensors[name] for names in modules for name in names)
        found[kind.name] = {"modules": len(modules), "parameters": parameters} if modules else None
    return found


def _common(folder: Path, dtype: torch.dtype, parameters: int, num_served: int, kv_numbers: int) -> Findings:
    """Return the findings that heads and models have in common.

    Args:
        parameters, num_served: number of parameters in the files, and number of parameters in memory when served.
        kv_numbers: how many numbers a token takes in the KV cache.
    """
    memory = {
        "dtype": str(dtype).removeprefix("torch."),
        "weights_bytes": num_served * dtype.itemsize,
        "kv_bytes_per_token": kv_numbers * dtype.itemsize,
    }
    files = [file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin", ".gguf")]
    return {
        "path": str(folder),
        "parameters": parameters,
        "file_bytes": sum(file.stat().st_size for file in files),
        "memory": memory,
        **{"convention": None, "from_verifier": [], "probe": None},
        **dict.fromkeys(kind.name for kind in _OF_MODULES),
        "notes": [],
    }


def _convention(checkpoint: HeadCheckpoint, readings: tuple[HeadConvention, ...]) -> Findings:
    """Return findings about the readings (interpretations of the head's weights, see `HeadConvention`) that the head's
    files allow. The first of `readings` is the likeliest.
    """
    fields = HeadConvention._fields
    return {
        "likeliest": readings[0]._asdict(),
        "open_fields": [name for name in fields if len({getattr(reading, name) for reading in readings}) > 1],
        "readings": [reading._asdict() for reading in readings],
        "source": _source(checkpoint),
    }


def _convention_alone(checkpoint: HeadCheckpoint, target_hidden_size: int) -> Findings:
    """Return the findings about readings of the head's weights if the verifier is unknown.

    The meaning of layer ids and of defaults depends on the verifier's number of layers, so more readings are possible
    than for a known verifier.
    """
    given = stated(checkpoint.raw)
    if given is not None:
        return _convention(checkpoint, (given,)) | {"readings": []}
    ids, name_outputs = aux_layer_ids(checkpoint.raw)
    taps = None if ids is None else tuple(layer + name_outputs for layer in ids)
    found = _convention(checkpoint, checkpoint.conventions(_DEEP, target_hidden_size))
    return found | {"likeliest": found["likeliest"] | {"tap_layers": taps}, "readings": []}


def _source(checkpoint: HeadCheckpoint) -> str:
    """Return a text that states where the tapped layers are specified."""
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
    """Return the hidden size of the verifier, computed from the width of `fc`.

    The input of `fc` is either the tapped hidden states, or a token's embedding and one hidden state.
    """
    width = checkpoint.shapes.get("fc.weight", (0, 0))[-1]
    return width // (2 if checkpoint.layout.family is Family.EAGLE1 else _num_taps(checkpoint))


def _probe(folder: Path, dtype: torch.dtype, device: torch.device, eight_bits: bool) -> tuple[Findings, int, int]:
    """Probe whether a model can be the verifier.

    Returns the findings with runs of equal layers, the count of numbers that a token takes in the KV cache, and the
    bytes of the weights. The last two are 0 if the model cannot be a verifier.
    """
    try:
        loaded = load_model(folder, dtype, device, eight_bits=eight_bits)
    except ValueError as error:  # for example an UnsupportedModelError, or transformers has no causal LM of this kind
        return {"can_be_verifier": False, "reason": str(error).strip().splitlines()[0]}, 0, 0
    for extend in hooks("extend_model"):  # may change what layers store
        extend(loaded, EngineConfig())
    groups: list[Findings] = []
    for index, layer in enumerate(loaded.layers):
        described = asdict(layer)
        if groups and {name: groups[-1][name] for name in described} == described:
            groups[-1]["last"] = index
        else:
            groups.append({"first": index, "last": index, **described})
    return (
        {
            "can_be_verifier": True,
            "max_model_len": loaded.max_position_embeddings,
            "eos_token_ids": sorted(loaded.eos_token_ids),
            "layers": groups,
            "takes": loaded.takes,
        },
        sum(layer.kv_size for layer in loaded.layers),
        loaded.weights_bytes,
    )


def _count(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _try(
    config: InspectConfig, folder: Path, found: Findings, target: TargetDescription, open_engine: OpenEngine
) -> Findings:
    """Test the folder as a drafter of the verifier and return findings. The test is made even if the drafter may not
    suit the verifier.
    """
    drafter, kind = str(folder), "draft_model" if found["kind"] == "model" else found["kind"]
    if folder.resolve() == target.path.resolve():
        own = next((kind.name for kind in _OF_MODULES if found[kind.name] is not None), None)
        if own is None:
            raise UserError(f"--model {target.path}: the model has no prediction modules to try; give another drafter")
        drafter = kind = own
    shared = {name: getattr(config, name) for name in LoadOptions.model_fields}
    llm = open_engine(LocalConfig(**shared, drafter=drafter, allow_bad_drafter=True, adaptive=False), _AT_ONCE)
    choice, test = llm.convention_choice, llm.self_test
    return {
        "verifier": str(target.path),
        "drafter": kind,
        "measured_convention": choice and {"chosen": choice.best.convention._asdict(), **choice.as_dict()},
        "self_test": test and test.as_dict(),
    }


def _tables(found: Findings) -> Iterator[Table]:
    """Yield tables of the folder's content, its layers, the measured readings, and the self-test."""
    content = Table(title=found["path"], show_header=False, title_justify="left")
    for row in _content(found):
        content.add_row(*row)
    yield content
    if found["probe"] is not None and "layers" in found["probe"]:
        yield layers_table(found["probe"]["layers"])
    if found["measured_convention"] is not None:
        yield readings_table(**found["measured_convention"])
    if found["self_test"] is not None:
        yield self_test_table(found["self_test"], found["verifier"])


def _content(found: Findings) -> Iterator[tuple[str, str]]:
    yield "format", found["format"]
    yield from ((name, str(value)) for name, value in found["shapes"].items())
    memory = found["memory"]
    yield "parameters", f"{found['parameters']:,}"
    yield "files", _bytes(found["file_bytes"])
    packed = ", packed matrices included" if memory["weights_bytes"] < found["parameters"] * 2 else ""
    yield f"weights in {memory['dtype']}{packed}", _bytes(memory["weights_bytes"])
    if memory["kv_bytes_per_token"]:
        yield f"KV per token in {memory['dtype']}", _bytes(memory["kv_bytes_per_token"])
    if found["convention"] is not None:
        yield from _convention_rows(found["convention"])
        yield "from the verifier", ", ".join(found["from_verifier"]) or "nothing"
    if found["probe"] is not None:
        refusal = f"refused: {found['probe'].get('reason')}"
        agrees = "its attention agrees with transformers' own"
        yield "as a verifier", agrees if found["probe"]["can_be_verifier"] else refusal
        yield from found["probe"].get("takes", {}).items()
        for kind in _OF_MODULES:
            modules = found[kind.name]
            text = "none" if modules is None else f"{modules['modules']} of {modules['parameters']:,} parameters"
            yield kind.modules_title, text
    yield from (("note", note) for note in found["notes"])


def _convention_rows(convention: Findings) -> Iterator[tuple[str, str]]:
    fields, open_fields = dict(convention["likeliest"]), ", ".join(convention["open_fields"])
    taps = fields.pop("tap_layers")
    layers = "those of the verifier's depth" if taps is None else str(list(taps))
    yield "taps enter layers", f"{layers} ({convention['source']})"
    yield from ((name, "as in the config" if value is None else str(value)) for name, value in fields.items())
    if open_fields and convention["readings"]:
        yield "left open by the files", f"{open_fields}: {len(convention['readings'])} readings"
    elif open_fields:
        yield "to be confirmed with --model", open_fields


def _bytes(number: int) -> str:
    size, unit = float(number), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
