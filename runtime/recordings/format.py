"""The files of a recording: which tensors a shard holds, and the index that says what all shards have in common."""

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
"""No less than a shard's bytes beside its tensors."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class RecordingError(ValueError):
    """A recording cannot be read or continued; the message names folder or file and says why."""


class Record(NamedTuple):
    """One recorded sequence, on the CPU."""

    token_ids: Tensor
    """int32 [num_tokens]"""
    taps: Tensor
    """[num_tokens, taps_size]: row i was tapped where the verifier read token i."""
    loss_mask: Tensor
    """bool [num_tokens]: whether predicting token i is to be learnt; False for what a user wrote."""
    position: int = 0
    """Of the first token in its text: above 0 where the beginning was not recorded."""
    top_ids: Tensor | None = None
    """int32 [num_tokens, top_k]: the verifier's likeliest next tokens at row i, likeliest first; None without top_k."""
    top_logits: Tensor | None = None
    """[num_tokens, top_k]: their logits."""
    logsumexp: Tensor | None = None
    """float32 [num_tokens]: over the whole vocabulary, so that exp(top_logits - logsumexp) are the probabilities."""
    adapter: str = ""
    """The LoRA adapter that the verifier had on top, `name@digest`; empty for none."""


class ShardInfo(BaseModel):
    """One complete shard."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    num_sequences: int = Field(ge=1)
    num_tokens: int = Field(ge=1)
    num_bytes: int = Field(ge=1, description="Of the file.")
    adapters: tuple[str, ...] = Field((), description="That its tensor `adapters` counts from 1 on; 0 is none.")


class RecordingSpec(BaseModel):
    """What all sequences of a recording have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    verifier: str = Field(description="Name of the verifier, for people.")
    fingerprint: str = Field(description="Of its weights: see `wingbeat.runtime.heads.fingerprint`.")
    tap_layers: tuple[int, ...] = Field(
        description="Layers whose input was tapped, ascending; the number of layers stands for the final norm's output."
    )
    hidden_size: int = Field(gt=0, description="Width of one tap.")
    num_layers: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    taps_dtype: FloatName
    top_k: int = Field(ge=0, description="Logits kept per token; 0 keeps none, nor their logsumexp.")
    logits_dtype: FloatName
    settings: dict[str, Any] = Field(description="Where the text came from; a run continues one with equal settings.")

    @property
    def taps_size(self) -> int:
        """Columns of the taps."""
        return len(self.tap_layers) * self.hidden_size

    @property
    def bytes_per_token(self) -> int:
        """Of a shard's tensors."""
        logits = self.top_k * (4 + DTYPES[self.logits_dtype].itemsize) + 4 if self.top_k else 0
        return 4 + 1 + self.taps_size * DTYPES[self.taps_dtype].itemsize + logits


class RecordingIndex(BaseModel):
    """The index file: it lists the shards that are complete, and nothing else in the folder counts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["wingbeat-capture"] = FORMAT
    version: int = VERSION
    spec: RecordingSpec
    shards: tuple[ShardInfo, ...] = ()
    complete: bool = Field(False, description="Whether all that was asked for is there.")

    @property
    def num_sequences(self) -> int:
        """In all shards."""
        return sum(shard.num_sequences for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """In all shards."""
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        """Of all shards."""
        return sum(shard.num_bytes for shard in self.shards)


def hashed_share(content: bytes) -> float:
    """A number from 0 to 1 that follows from some bytes alone, evenly spread: it chooses a share of all."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") / 2**64


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"shard-{number:05d}.safetensors"


def read_index(folder: Path) -> RecordingIndex:
    """The index of a recording whose listed shards are all there.

    Raises:
        RecordingError: there is none, it is of another format or version, or a shard is missing or cut short.
    """
    path = folder / INDEX_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecordingError(f"{folder} holds no recording: there is no {INDEX_FILE}") from None
    except ValueError as error:
        raise RecordingError(f"{path} is no JSON: {error}") from error
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
            raise RecordingError(f"{file} has {file.stat().st_size} bytes, not {shard.num_bytes}: it is cut short")
    return index


def write_index(folder: Path, index: RecordingIndex) -> None:
    """Replace the index of a folder."""
    text = index.model_dump_json(indent=1) + "\n"
    write_atomically(folder / INDEX_FILE, lambda path: path.write_text(text, encoding="utf-8"))


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file by another name and rename it: a kill at any moment leaves the old file, or none, or the new one."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    write(temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
