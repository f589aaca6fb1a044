"""Checks whether a folder holds other weights of the served model, such as a trainer's next step.

The check runs as a separate process, because transformers builds the model on the meta device, which changes torch
settings and blocks the interpreter; both would disturb the serving process.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from wingbeat.runtime.tensor_files import ModelCheckpointError, read_fields, weight_files
from wingbeat.runtime.verifier.checkpoints.checkpoint import check_files, check_weights
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile, load_config
from wingbeat.runtime.verifier.checkpoints.digests import tokenizer_digest, weights_digest

MODULE = "wingbeat.runtime.successor"
GENERATION = "generation_config.json"
_FREE_FIELDS = frozenset({"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache"})
"""Config fields that may differ between copies of one model; the dtype is chosen in the settings."""


class Inspected(NamedTuple):
    """Result of inspecting a folder."""

    digest: str = ""
    """The folder's `weights_digest`."""
    problem: str | None = None
    """Reason why the folder cannot replace the served folder; None if it can."""


def inspect(folder: Path, served: Path) -> Inspected:
    """Compares a folder's configuration, tokenizer and tensors with those of the served folder."""
    try:
        new, old = ConfigFile.read(folder), ConfigFile.read(served)
        _check_config(new, old)
        if _ends(new) != _ends(old):
            raise ModelCheckpointError(
                f"{folder} ends texts with the tokens {_ends(new)}, the served model with {_ends(old)}"
            )
        if tokenizer_digest(folder) != tokenizer_digest(served):
            raise ModelCheckpointError(f"{folder} has another tokenizer than {served}, or none: copy its files")
        if (weights := weight_files(folder)[0]).suffix != ".safetensors":
            raise ModelCheckpointError(f"{weights} holds pickles: write safetensors")
        check_files(new)
        check_weights(new)
        return Inspected(weights_digest(folder))
    except (ValueError, OSError) as error:
        return Inspected(problem=" ".join(str(error).split()))


def _check_config(new: ConfigFile, old: ConfigFile) -> None:
    """Compares configs as transformers reads them, because transformers fills in fields that a file leaves out."""
    fields, served = (_kept(load_config(file).to_dict()) for file in (new, old))
    for name in sorted(fields.keys() | served.keys()):
        if fields.get(name) != served.get(name):
            raise ModelCheckpointError(
                f"{new.folder / 'config.json'}: {name} is {fields.get(name)!r}, that of the served model is "
                f"{served.get(name)!r}"
            )


def _kept(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _kept(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if name not in _FREE_FIELDS
    }


def _ends(config: ConfigFile) -> list[int]:
    """Returns the end-of-text ids, as `end_of_text_ids` does."""
    path = config.folder / GENERATION
    ends = read_fields(path).get("eos_token_id") if path.is_file() else None
    ends = config.text.get("eos_token_id") if ends is None else ends
    return sorted(ends) if isinstance(ends, list) else [] if ends is None else [ends]


if __name__ == "__main__":
    print(json.dumps(inspect(*map(Path, sys.argv[1:]))))
