"""Writes sequences into shards: collects sequences in memory, writes a shard on demand, and limits the disk space."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from wingbeat.runtime.recordings.format import (
    DTYPES,
    HEADER_BYTES,
    INDEX_FILE,
    TEMPORARY_SUFFIX,
    Record,
    RecordingError,
    RecordingIndex,
    RecordingSpec,
    ShardInfo,
    read_index,
    shard_name,
    write_atomically,
    write_index,
)


class RecordingFull(Exception):
    """The next shard does not fit; the message names the limit."""


class RecordingWriter:
    """Owner of a recording's folder: creates the recording, or continues an existing one.

    A shard belongs to the recording once the index lists it. Shard and index are each written under a temporary name
    and then renamed, so that at most the sequences added since the last `flush` are lost if the process is killed.

    Args:
        max_bytes: maximum total bytes of all shards.

    Raises:
        RecordingError: the folder holds a recording of another verifier or of other settings; the message names the
            difference.
    """

    def __init__(self, folder: Path, spec: RecordingSpec, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self._records: list[Record] = []
        self._pending_tokens = 0
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / INDEX_FILE).exists():
            self.index = read_index(folder)
            _check_same(folder, self.index.spec, spec)
            self._remove_unlisted()
        else:
            self.index = RecordingIndex(spec=spec)
            write_index(folder, self.index)

    @property
    def num_sequences(self) -> int:
        """Number of sequences in complete shards."""
        return self.index.num_sequences

    @property
    def num_pending(self) -> int:
        """Number of added sequences that are not in a shard yet."""
        return len(self._records)

    @property
    def num_pending_bytes(self) -> int:
        """Bytes of the tensors of the sequences that are not in a shard yet."""
        return self._pending_tokens * self.index.spec.bytes_per_token

    def check_room(self, num_tokens: int, num_sequences: int, used_bytes: int | None = None) -> None:
        """Raises RecordingFull if a shard with these numbers of tokens and sequences would exceed `max_bytes` or the
        free disk space.

        Args:
            used_bytes: bytes that already count towards `max_bytes`; None means the bytes of this recording's shards.
        """
        used = self.index.num_bytes if used_bytes is None else used_bytes
        needed = num_tokens * self.index.spec.bytes_per_token + num_sequences * 12 + HEADER_BYTES
        if used + needed > self.max_bytes:
            raise RecordingFull(
                f"{self.folder} holds {used} bytes and the next shard needs {needed}: max_bytes is {self.max_bytes}"
            )
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise RecordingFull(f"the disk of {self.folder} has {free} bytes free and the next shard needs {needed}")

    def add(self, record: Record) -> None:
        """Adds a sequence to the next shard.

        Raises:
            ValueError: the sequence has no tokens, or a tensor's shape or dtype differs from the recording's; the
                message names the tensor.
        """
        for name, (shape, dtype) in _layout(self.index.spec, len(record.token_ids)).items():
            tensor = getattr(record, name)
            if tensor is None or tensor.shape != shape or tensor.dtype != dtype:
                got = "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                raise ValueError(f"{name} of a recorded sequence is {got}, not {dtype} {list(shape)}")
        if len(record.token_ids) == 0:
            raise ValueError("a recorded sequence has no tokens")
        self._records.append(record)
        self._pending_tokens += len(record.token_ids)

    def flush(self, used_bytes: int | None = None) -> None:
        """Writes the added sequences as one shard and lists the shard in the index; for `used_bytes` see `check_room`.

        Raises:
            RecordingFull: the shard does not fit; its sequences are dropped.
        """
        records, self._records = self._records, []
        num_tokens, self._pending_tokens = self._pending_tokens, 0
        if not records:
            return
        self.check_room(num_tokens, len(records), used_bytes)
        tensors = {
            name: torch.cat([getattr(record, name) for record in records]).contiguous()
            for name in _layout(self.index.spec, 0)
        }
        lengths = torch.tensor([0] + [len(record.token_ids) for record in records])
        tensors["offsets"] = lengths.cumsum(0)
        tensors["positions"] = torch.tensor([record.position for record in records], dtype=torch.int32)
        adapters = tuple(sorted({record.adapter for record in records} - {""}))
        if adapters:
            numbers = [("", *adapters).index(record.adapter) for record in records]
            tensors["adapters"] = torch.tensor(numbers, dtype=torch.int32)
        path = self.folder / shard_name(len(self.index.shards))
        write_atomically(path, lambda temporary: save_file(tensors, temporary))
        shard = ShardInfo(
            file=path.name,
            num_sequences=len(records),
            num_tokens=num_tokens,
            num_bytes=path.stat().st_size,
            adapters=adapters,
        )
        self.index = self.index.model_copy(update={"shards": (*self.index.shards, shard), "complete": False})
        write_index(self.folder, self.index)

    def _remove_unlisted(self) -> None:
        """Removes files left by a process that was killed after writing a shard and before writing the index."""
        listed = {shard.file for shard in self.index.shards}
        for path in (*self.folder.glob("shard-*.safetensors"), *self.folder.glob(f"*{TEMPORARY_SUFFIX}")):
            if path.name not in listed:
                path.unlink()

    def finish(self) -> None:
        """Marks the recording as complete in the index."""
        self.index = self.index.model_copy(update={"complete": True})
        write_index(self.folder, self.index)


def _layout(spec: RecordingSpec, num_tokens: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of the tensors that have one row per token."""
    layout = {
        "token_ids": ((num_tokens,), torch.int32),
        "taps": ((num_tokens, spec.taps_size), DTYPES[spec.taps_dtype]),
        "loss_mask": ((num_tokens,), torch.bool),
    }
    if spec.top_k:
        layout |= {
            "top_ids": ((num_tokens, spec.top_k), torch.int32),
            "top_logits": ((num_tokens, spec.top_k), DTYPES[spec.logits_dtype]),
            "logsumexp": ((num_tokens,), torch.float32),
        }
    return layout


def _check_same(folder: Path, there: RecordingSpec, wanted: RecordingSpec) -> None:
    """Raises RecordingError for the first difference between two specs."""
    old, new = there.model_dump(mode="json"), wanted.model_dump(mode="json")
    # The verifier's name is not compared, because a copy of the verifier's folder has another name.
    pairs = [(name, old[name], new[name]) for name in new if name not in ("settings", "verifier")]
    names = sorted(old["settings"].keys() | new["settings"].keys())
    pairs += [(name, old["settings"].get(name), new["settings"].get(name)) for name in names]
    for name, before, now in pairs:
        if before != now:
            raise RecordingError(
                f"{folder} holds a recording with {name} {before}, not {now}: continue it with the same settings, "
                "or write to another folder"
            )
