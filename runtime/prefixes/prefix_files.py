"""Prefixes on disk: `NAME.json` says what a prefix is, `NAME.safetensors` has what an engine computed of it.

Both are written whole or not at all, and have checksums. The first is enough to compute the second again.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from wingbeat.kernels.replaced_file import replacing
from wingbeat.runtime.parts import first
from wingbeat.runtime.prefixes.contents import Contents
from wingbeat.runtime.prefixes.saved_prefix import SavedPrefix, is_prefix_name
from wingbeat.runtime.scheduling.prompt_spans import PromptSpan
from wingbeat.runtime.scheduling.request import Variant

FORMAT = "1"
"""Of both files."""
MOST_RECORD_BYTES = 1 << 26
MOST_SPAN_BYTES = 1 << 25
"""Content of a prefix's spans, which a record has in base64."""


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
    if prefix.spans:
        fields["media"] = [span.as_fields() for span in prefix.spans]
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
        spans = tuple(map(_read_span, fields.get("media", ())))
        token_ids = tuple(fields["token_ids"])
        return SavedPrefix(path.stem, fields["version"], token_ids, adapter, fields["conversation"], spans)
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


def _read_span(fields: Mapping[str, Any]) -> PromptSpan:
    """Raises ValueError, KeyError or TypeError where the fields are none of `PromptSpan.as_fields`."""
    span = first("read_span", fields)
    if span is None:
        raise ValueError("nothing here reads its spans")
    return span


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
