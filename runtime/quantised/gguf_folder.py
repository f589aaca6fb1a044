"""Presents a GGUF file as a Hugging Face folder: config.json and tokenizer from the file's metadata, and a link to the
file.

Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path

from wingbeat.kernels.disk_cache import cache_dir
from wingbeat.runtime.folder_kinds import gguf_problem
from wingbeat.runtime.quantised.gguf_config import HEAD, config_of
from wingbeat.runtime.quantised.gguf_file import parts_of, read_gguf
from wingbeat.runtime.quantised.gguf_tokenizer import write_tokenizer
from wingbeat.runtime.tensor_files import GGUF_FILE, ModelCheckpointError

logger = logging.getLogger(__name__)
_FORMAT = 3
"""Version of the generated folders; folders of earlier versions are generated again."""
_ENDS = ("eos", "eot", "eom")
"""Metadata names of the tokens that end a text."""


def gguf_in(source: Path) -> Path | None:
    """The GGUF file of a path: the path itself, or the only GGUF file of a folder without config.json; else None.

    The parts of a split model count as one file, represented by the first part.
    """
    if source.suffix == ".gguf" and source.is_file():
        return source
    if not source.is_dir() or (source / "config.json").exists():
        return None
    found = sorted(source.glob("*.gguf"))
    return found[0] if len(found) == 1 or (found and set(found) <= set(parts_of(found[0]))) else None


def folder_of(source: Path) -> Path | None:
    """The generated folder of a GGUF file in this machine's cache, created on demand; None for other sources.

    Raises:
        ModelCheckpointError: the file is damaged or not supported; the message is one line with file and reason.
    """
    file = gguf_in(source)
    if file is None:
        return None
    check_readable(file)
    status = file.stat()
    key = f"{file.resolve()} {status.st_size} {status.st_mtime_ns} {_FORMAT}"
    made = cache_dir() / "gguf" / f"{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if (made / "config.json").is_file():
        return made
    logger.info("Reading the metadata of %s", file)
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
        folder = Path(scratch) / "folder"
        folder.mkdir()
        (folder / GGUF_FILE).symlink_to(file.resolve())
        try:
            _write_metadata(file, folder)
        except ModelCheckpointError:
            raise
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            ArithmeticError,
        ) as error:
            raise ModelCheckpointError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
        try:
            os.replace(folder, made)
        except OSError:  # another process on this machine, such as a router, created the folder first
            if not (made / "config.json").is_file():
                raise
    return made


def files_of(folder: Path) -> list[Path] | None:
    """The GGUF file, or all parts of it, to which a folder made by `folder_of` links; None for other folders."""
    link = folder / GGUF_FILE
    return (parts_of(link.resolve()) or [link.resolve()]) if link.exists() else None


def check_readable(file: Path) -> None:
    """Raise an error for a path that is not a readable GGUF file.

    Raises:
        ModelCheckpointError: the file is missing or cannot be read; the message is one line that says what to do.
    """
    if (problem := gguf_problem(file)) is not None:
        raise ModelCheckpointError(problem)


def _write_metadata(file: Path, folder: Path) -> None:
    found = read_gguf(file)
    metadata = found.fields
    name = f"{file.name} ({metadata.get('general.architecture')})"
    if metadata.get("general.architecture") == HEAD:
        from wingbeat.runtime.quantised.gguf_head import head_fields

        (folder / "config.json").write_text(json.dumps(head_fields(found, name)))
        return
    config = config_of(found, name)
    ids = {end: metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("bos", *_ENDS)}
    ends = sorted({ids[end] for end in _ENDS} - {None})
    generation = {"eos_token_id": ends or None, "bos_token_id": ids["bos"]}
    config |= {"eos_token_id": ids["eos"], "bos_token_id": ids["bos"]}
    config |= {"dtype": "float32", "quantization_config": {"quant_method": "gguf"}}
    write_tokenizer(metadata, folder, name)
    (folder / "generation_config.json").write_text(json.dumps({k: v for k, v in generation.items() if v is not None}))
    (folder / "config.json").write_text(json.dumps(config))
