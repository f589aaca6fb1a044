"""Findings of `wingbeat inspect` about an engine directory."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from wingbeat.runtime.tensorrt.engine_config import GraphConfig
from wingbeat.runtime.tensorrt.engine_directory import BASE_CONFIG, DRAFT_TO_TARGET, EngineDirectory


def is_engine_directory(folder: Path) -> bool:
    """Return whether a folder is an engine directory."""
    return (folder / BASE_CONFIG).is_file()


def show_engines(folder: Path, as_json: bool) -> None:
    """Check each file of an engine directory against the file's recorded digest, then print the directory's content.

    Raises:
        EngineDirectoryError: a file or a field is wrong.
    """
    directory = EngineDirectory(folder)
    directory.check_files()
    found = engine_findings(directory)
    if as_json:
        print(json.dumps(found))
        return
    console = Console()
    for part in ("base", "draft"):
        if found[part] is not None:
            console.print(_table(f"{folder}: {part}", found[part]))


def engine_findings(directory: EngineDirectory) -> dict[str, Any]:
    """Return the content of an engine directory as one object."""
    base, draft = directory.base, directory.draft
    kv_numbers = sum(layer.attention().kv_size for layer in base.layers)
    itemsize = base.torch_dtype.itemsize
    return {
        "path": str(directory.folder),
        "kind": "engines",
        "runs_on": ["cpu"] if base.builder is None else ["cpu", "cuda"],
        "limits": base.limits.model_dump(),
        "kv_bytes_per_token": kv_numbers * itemsize,
        "base": _common(base)
        | {
            "hidden_size": base.hidden_size,
            "vocab_size": base.vocab_size,
            "windows": [window for window in base.windows if window],
            "is_vlm": base.is_vlm,
            "tap_layers": list(base.tap_layers),
        },
        "draft": None
        if draft is None
        else _common(draft)
        | {
            "hidden_size": draft.draft_model_hidden_size,
            "vocab_size": draft.draft_vocab_size,
            "tap_layers": list(draft.tap_layers),
            "block_size": None if draft.block is None else draft.block.size,
            "media": {"num_axes": draft.num_axes, "width": draft.media_width},
            "token_map": DRAFT_TO_TARGET,
        },
    }


def _common(config: GraphConfig) -> dict[str, Any]:
    return {
        "name": config.name,
        "dtype": config.dtype,
        "opset": config.opset,
        "layers": config.num_decoder_layers,
        "builder": config.builder,
        "compute_capabilities": list(config.compute_capabilities),
        "tools": config.tools,
        "weights_fingerprint": config.weights_fingerprint,
        "files": sorted(config.files),
    }


def _table(title: str, fields: dict[str, Any]) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in fields.items():
        shown = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        shown = ", ".join(map(str, shown)) if isinstance(shown, list) else shown
        table.add_row(name.replace("_", " "), "none" if shown in (None, "") else str(shown))
    return table
