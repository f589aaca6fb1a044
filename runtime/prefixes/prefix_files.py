"""Files of a prefix: `NAME.json` holds its definition, `NAME.safetensors` the contents that an engine computed.

Both files are replaced atomically and have checksums. The contents can be recomputed from the definition.
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
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.prefixes.contents import Contents
from wingbeat.runtime.prefixes.saved_prefix import SavedPrefix, is_prefix_name
from wingbeat.runtime.scheduling.prompt_spans import PromptSpan
from wingbeat.runtime.scheduling.request import Variant

FORMAT = "1"
"""Format version of both files."""
MOST_RECORD_BYTES = 1 << 26
MOST_SPAN_BYTES = 1 << 25
"""Maximum number of bytes of the contents of a prefix's spans, which the definition holds in base64."""


class PrefixFileError(ValueError):
    """A file cannot be used. The message is one line that names the file and the reason."""


def write_record(path: Path, prefix: SavedPrefix, tokenizer: str) -> None:
    """Writes the definition of a prefix.

    Args:
        tokenizer: digest of the tokenizer.

    Raises:
        OSError: the file cannot be written.
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
    """Reads the definition of a prefix.

    Raises:
        PrefixFileError: the file cannot be read, is damaged, or belongs to another tokenizer.
    """
    try:
        if path.stat().st_size > MOST_RECORD_BYTES:
            raise PrefixFileError(f"{path} has more than {MOST_RECORD_BYTES} bytes")
        fields = json.loads(path.read_text())
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise PrefixFileError(f"{path} is not of format {FORMAT}")
        if fields.pop("checksum", None) != _checksum_of_fields(fields):
            raise PrefixFileError(f"{path} is damaged: its checksum does not match")
        if fields["tokenizer"] != tokenizer:
            raise PrefixFileError(f"{path} has tokens of another tokenizer")
        if fields["name"] != path.stem or not is_prefix_name(path.stem):
            raise PrefixFileError(f"{path} holds a prefix named {fields['name']!r}")
        adapter = None if fields["adapter"] is None else Variant(**fields["adapter"])
        spans = tuple(map(_read_span, fields.get("media", ())))
        token_ids = tuple(fields["token_ids"])
        return SavedPrefix(path.stem, fields["version"], token_ids, adapter, fields["conversation"], spans)
    except PrefixFileError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise PrefixFileError(f"{path} cannot be read: {type(error).__name__}: {error}") from None


def write_contents(path: Path, prefix: SavedPrefix, identity: Mapping[str, str], contents: Contents) -> None:
    """Writes the contents of a prefix.

    Args:
        identity: identity of the engine that computed the contents, as entries by name.

    Raises:
        OSError: the file cannot be written.
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
    """Reads the contents of a prefix, as tensors on the host.

    Raises:
        PrefixFileError: the file cannot be read, is damaged, or belongs to another identity or prefix.
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
                raise PrefixFileError(f"{path} is damaged: its checksum does not match")
            return contents
    except PrefixFileError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PrefixFileError(f"{path} cannot be read: {type(error).__name__}: {error}") from None


def prefix_digest(prefix: SavedPrefix) -> str:
    """Returns a digest of tokens, spans and adapter, which together with the model determine a prefix's KV."""
    return hashlib.sha256(json.dumps([prefix.variant_digest, prefix.hashed_ids]).encode()).hexdigest()[:32]


def _read_span(fields: Mapping[str, Any]) -> PromptSpan:
    """Restores a span from its fields.

    Raises ValueError, KeyError or TypeError if the fields are not those of `PromptSpan.as_fields`.
    """
    span = first_result("read_span", fields)
    if span is None:
        raise ValueError("this server cannot read its spans")
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
    """Context manager that yields a temporary file, which replaces `path` when the block ends.

    Only this user can read the file.
    """
    with replacing(path) as temporary:
        temporary.touch(0o600, exist_ok=False)
        yield temporary
