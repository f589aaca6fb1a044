"""Whether a folder has other weights of the model that is served, such as those of a trainer's next step.

A process of its own: transformers builds the model on the meta device for it, and what it sets for torch meanwhile, and
the interpreter that it keeps, would be the serving process's.
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
"""Of a config: what changes from copy to copy and leaves the model as it is; dtypes are the settings' matter."""


class Inspected(NamedTuple):
    """What was found in a folder."""

    digest: str = ""
    """`weights_digest` of it."""
    problem: str | None = None
    """Why it cannot take the place of the one that is served."""


def inspect(folder: Path, served: Path) -> Inspected:
    """Hold a folder's configuration, tokenizer and tensors against those of the folder that is served."""
    try:
        new, old = ConfigFile.read(folder), ConfigFile.read(served)
        _check_config(new, old)
        if _ends(new) != _ends(old):
            raise ModelCheckpointError(
                f"{folder} ends texts by the tokens {_ends(new)}, the served model by {_ends(old)}"
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
    """As transformers reads them, which fills in what a file leaves out."""
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
    """As `end_of_text_ids`."""
    path = config.folder / GENERATION
    ends = read_fields(path).get("eos_token_id") if path.is_file() else None
    ends = config.text.get("eos_token_id") if ends is None else ends
    return sorted(ends) if isinstance(ends, list) else [] if ends is None else [ends]


if __name__ == "__main__":
    print(json.dumps(inspect(*map(Path, sys.argv[1:]))))
