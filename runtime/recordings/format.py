"""File format of recordings: the tensors of a shard; and the index, which lists the shards and contains their common
properties.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from wingbeat.runtime.config import FloatName

FORMAT = "wingbeat-capture"
VERSION = 1
INDEX_FILE = "index.json"
TEMPORARY_SUFFIX = ".tmp"
HEADER_BYTES = 4096
"""Upper bound of the bytes that a shard has in addition to its tensors."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class RecordingError(ValueError):
    """A recording cannot be read or continued; the message names the folder or file and the reason."""


class Record(NamedTuple):
    """Recorded sequence, on the CPU."""

    token_ids: Tensor
    """Tokens of the sequence, int32 [num_tokens]."""
    taps: Tensor
    """[num_tokens, taps_size]: row i contains the taps that the verifier computed at token i."""
    loss_mask: Tensor
    """bool [num_tokens]: whether the prediction of token i is trained; False for a user's text."""
    position: int = 0
    """Position of the first token in its text; above 0 if the beginning was not recorded."""
    top_ids: Tensor | None = None
    """int32 [num_tokens, top_k]: the verifier's most likely next tokens at row i, best first; None if `top_k` is 0."""
    top_logits: Tensor | None = None
    """[num_tokens, top_k]: logits of `top_ids`."""
    logsumexp: Tensor | None = None
    """float32 [num_tokens]: logsumexp over the whole vocabulary, so that exp(top_logits - logsumexp) are
    probabilities.
    """
    adapter: str = ""
    """LoRA adapter of the verifier, as `name@digest`; empty if no adapter was used."""


class ShardInfo(BaseModel):
    """Index entry of a complete shard."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    num_sequences: int = Field(ge=1)
    num_tokens: int = Field(ge=1)
    num_bytes: int = Field(ge=1, description="Size of the file.")
    adapters: tuple[str, ...] = Field(
        (), description="Adapters that the shard's tensor `adapters` numbers from 1 on; 0 is none."
    )


class RecordingSpec(BaseModel):
    """Properties common to all sequences of a recording."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    verifier: str = Field(description="Display name of the verifier.")
    fingerprint: str = Field(
        description="Fingerprint of the verifier's weights: see `wingbeat.runtime.heads.fingerprint`."
    )
    tap_layers: tuple[int, ...] = Field(
        description="Layers whose input was tapped, ascending; the number of layers stands for the final norm's output."
    )
    hidden_size: int = Field(gt=0, description="Width of one tap.")
    num_layers: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    taps_dtype: FloatName
    top_k: int = Field(ge=0, description="Logits kept per token; 0 keeps none, nor their logsumexp.")
    logits_dtype: FloatName
    settings: dict[str, Any] = Field(
        description="Source of the text; a recording is continued only with equal settings."
    )

    @property
    def taps_size(self) -> int:
        """Number of columns of the taps."""
        return len(self.tap_layers) * self.hidden_size

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a shard's tensors per token."""
        logits = self.top_k * (4 + DTYPES[self.logits_dtype].itemsize) + 4 if self.top_k else 0
        return 4 + 1 + self.taps_size * DTYPES[self.taps_dtype].itemsize + logits


class RecordingIndex(BaseModel):
    """Index file: lists the complete shards; other files in the folder are ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["wingbeat-capture"] = FORMAT
    version: int = VERSION
    spec: RecordingSpec
    shards: tuple[ShardInfo, ...] = ()
    complete: bool = Field(False, description="Whether all requested sequences are recorded.")

    @property
    def num_sequences(self) -> int:
        """Number of sequences in all shards."""
        return sum(shard.num_sequences for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all shards."""
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        """Total size of all shards in bytes."""
        return sum(shard.num_bytes for shard in self.shards)


def hashed_share(content: bytes) -> float:
    """Hash of bytes, uniform in [0, 1). To select a share of items reproducibly, select those whose hash is below the
    share.
    """
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") / 2**64


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"shard-{number:05d}.safetensors"


def read_index(folder: Path) -> RecordingIndex:
    """Reads the index of a recording and checks that all listed shards exist.

    Raises:
        RecordingError: there is no index, it has another format or version, or a shard is missing or truncated.
    """
    path = folder / INDEX_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecordingError(f"{folder} holds no recording: there is no {INDEX_FILE}") from None
    except ValueError as error:
        raise RecordingError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RecordingError(f"{path} is not the index of a recording")
    if content.get("version") != VERSION:
        raise RecordingError(
            f"{path} has format version {content.get('version')}: this program reads version {VERSION}"
        )
    try:
        index = RecordingIndex.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise RecordingError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    for shard in index.shards:
        file = folder / shard.file
        if not file.is_file():
            raise RecordingError(f"{file} is missing, though {INDEX_FILE} lists it")
        if file.stat().st_size != shard.num_bytes:
            raise RecordingError(f"{file} has {file.stat().st_size} bytes, not {shard.num_bytes}: it is truncated")
    return index


def write_index(folder: Path, index: RecordingIndex) -> None:
    """Replaces the index of a folder."""
    text = index.model_dump_json(indent=1) + "\n"
    write_atomically(folder / INDEX_FILE, lambda path: path.write_text(text, encoding="utf-8"))


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file under a temporary name and renames it.

    If the process is killed, the old file (if there was one) or the complete new file remains, but never an incomplete
    file.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    write(temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
