"""Prefixes on disk: `NAME.json` says what a prefix is, `NAME.safetensors` has what an engine computed of it.

Both are written whole or not at all, and have checksums. The first is enough to compute the second again.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from wingbeat.kernels.replaced_file import replacing
from wingbeat.runtime.prefixes.contents import Contents
from wingbeat.runtime.prefixes.saved_prefix import SavedPrefix, is_prefix_name
from wingbeat.runtime.scheduling.media import MediaInput
from wingbeat.runtime.scheduling.request import Variant

FORMAT = "1"
"""Of both files."""
MOST_RECORD_BYTES = 1 << 26
MOST_MEDIA_BYTES = 1 << 25
"""Of what was made of a prefix's images or audio, which a record has in base64."""


class PrefixFileError(ValueError):
    """A file is not taken; one line that names it and says why."""


def write_record(path: Path, prefix: SavedPrefix, tokenizer: str) -> None:
    """Write what a prefix is.

    Args:
        tokenizer: digest of what its tokens are those of.

    Raises:
        OSError: the disk refuses.
    """
    fields = {
        "format": FORMAT,
        "name": prefix.name,
        "version": prefix.version,
        "tokenizer": tokenizer,
        "adapter": None if prefix.variant is None else prefix.variant._asdict(),
        "conversation": prefix.conversation,
        "token_ids": list(prefix.token_ids),
    }
    if prefix.media:
        fields["media"] = [_media_fields(one) for one in prefix.media]
    fields["checksum"] = _checksum_of_fields(fields)
    with _replacing(path) as temporary:
        temporary.write_text(json.dumps(fields))


def read_record(path: Path, tokenizer: str) -> SavedPrefix:
    """What the prefix of a file is.

    Raises:
        PrefixFileError: it cannot be read, is damaged, or has tokens of another tokenizer.
    """
    try:
        if path.stat().st_size > MOST_RECORD_BYTES:
            raise PrefixFileError(f"{path} has more than {MOST_RECORD_BYTES} bytes")
        fields = json.loads(path.read_text())
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise PrefixFileError(f"{path} is not of format {FORMAT}")
        if fields.pop("checksum", None) != _checksum_of_fields(fields):
            raise PrefixFileError(f"{path} is damaged: its checksum is another one")
        if fields["tokenizer"] != tokenizer:
            raise PrefixFileError(f"{path} has tokens of another tokenizer")
        if fields["name"] != path.stem or not is_prefix_name(path.stem):
            raise PrefixFileError(f"{path} is of a prefix named {fields['name']!r}")
        adapter = None if fields["adapter"] is None else Variant(**fields["adapter"])
        media = tuple(_read_media(one) for one in fields.get("media", ()))
        token_ids = tuple(fields["token_ids"])
        return SavedPrefix(path.stem, fields["version"], token_ids, adapter, fields["conversation"], media)
    except PrefixFileError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise PrefixFileError(f"{path} cannot be read: {type(error).__name__}: {error}") from None


def write_contents(path: Path, prefix: SavedPrefix, identity: Mapping[str, str], contents: Contents) -> None:
    """Write what an engine computed of a prefix.

    Args:
        identity: of what computed it, by what each entry is.

    Raises:
        OSError: the disk refuses.
    """
    own = {**identity, "prefix": prefix_digest(prefix)}
    metadata = {"format": FORMAT, "identity": json.dumps(own), "checksum": _checksum(own, contents)}
    with _replacing(path) as temporary:
        try:
            save_file(contents, temporary, metadata=metadata)
        except SafetensorError as error:
            raise OSError(str(error)) from error
        temporary.chmod(0o600)


def read_contents(path: Path, prefix: SavedPrefix, identity: Mapping[str, str]) -> Contents:
    """The tensors of a prefix, on the host.

    Raises:
        PrefixFileError: it cannot be read, is damaged, or was computed by or for something else.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise PrefixFileError(f"{path} is not of format {FORMAT}")
            found, own = json.loads(metadata["identity"]), {**identity, "prefix": prefix_digest(prefix)}
            for what, value in own.items():
                if found.get(what) != value:
                    raise PrefixFileError(f"{path} has another {what}: {found.get(what)}, not {value}")
            contents = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if metadata["checksum"] != _checksum(own, contents):
                raise PrefixFileError(f"{path} is damaged: its checksum is another one")
            return contents
    except PrefixFileError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PrefixFileError(f"{path} cannot be read: {type(error).__name__}: {error}") from None


def prefix_digest(prefix: SavedPrefix) -> str:
    """Of what decides a prefix's keys and values beside the model: its tokens and its adapter."""
    return hashlib.sha256(json.dumps([prefix.variant_digest, prefix.hashed_ids]).encode()).hexdigest()[:32]


def _media_fields(one: MediaInput) -> dict[str, Any]:
    arrays = {
        name: [array.dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode()]
        for name, array in one.arrays.items()
    }
    return {"start": one.start, "length": one.length, "grid": one.grid, "kind": one.kind, "arrays": arrays}


def _read_media(fields: Mapping[str, Any]) -> MediaInput:
    """Raises ValueError, KeyError or TypeError where the fields are none of `_media_fields`."""
    arrays = {
        name: np.frombuffer(base64.b64decode(data, validate=True), np.dtype(dtype)).reshape(shape)
        for name, (dtype, shape, data) in fields["arrays"].items()
    }
    grid = None if fields["grid"] is None else tuple(fields["grid"])
    return MediaInput.of(fields["start"], fields["length"], arrays, grid, fields["kind"])


def _checksum_of_fields(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _checksum(identity: Mapping[str, str], contents: Contents) -> str:
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode())
    for name, part in sorted(contents.items()):
        digest.update(f"{name} {part.dtype} {list(part.shape)}".encode())
        digest.update(part.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file of this user alone to be written, which takes the place of another one when it is complete."""
    with replacing(path) as temporary:
        temporary.touch(0o600, exist_ok=False)
        yield temporary
