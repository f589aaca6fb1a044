"""Reads recordings as training data: batches of fixed-length windows from memory-mapped shards, selected by step
number.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from wingbeat.runtime.recordings.format import (
    INDEX_FILE,
    Record,
    RecordingError,
    RecordingSpec,
    hashed_share,
    read_index,
)

HELD_OUT_SHARE = 1 / 32
"""Share of the sequences that are not used in training, so that drafters can be measured on them."""
_PROMPT_TOKENS = 32


class RecordingBatch(NamedTuple):
    """Windows of recorded sequences, on the CPU; windows of shorter sequences are padded with zeros."""

    token_ids: Tensor
    """Tokens of the windows, int64 [batch, length]."""
    taps: Tensor
    """[batch, length, taps_size], in the recording's dtype: row i contains the taps that the verifier computed at token
    i.
    """
    loss_mask: Tensor
    """bool [batch, length]: whether the prediction of token i is trained; False in prompts and padding."""
    lengths: Tensor
    """int64 [batch]: number of tokens of the window, without padding."""
    positions: Tensor
    """int64 [batch]: position of the window's first token in its text."""
    target_top_ids: Tensor | None
    """int64 [batch, length, top_k]: the verifier's most likely tokens after token i; None if logits were not
    recorded."""
    target_top_logits: Tensor | None
    """Logits of `target_top_ids`, float32 [batch, length, top_k]."""
    logsumexp: Tensor | None
    """float32 [batch, length], over the whole vocabulary, so that exp(top_logits - logsumexp) are exact probabilities.
    The remaining probability belongs to all other tokens. In padding, top_logits are 0 and logsumexp is infinite, so
    probabilities are 0.
    """


class _Windows(NamedTuple):
    """Windows of an epoch in reading order: int64 [num_windows]."""

    sequences: np.ndarray
    begins: np.ndarray
    """Index of the window's first token in its sequence."""


class RecordingReader:
    """Data set in a recording's folder, or in a folder of recordings (one for each server that wrote live traffic).

    Args:
        adapter: `name@digest` of the sequences to read; sequences of other adapters are skipped, because they come from
            another model.
        held_out: True reads the held-out sequences, False the training sequences, None all. Whether a sequence is held
            out depends on its prompt alone. Sequences with equal prompts are therefore on the same side, and no
            sequence changes sides while a recording grows.

    Raises:
        RecordingError: there is no recording, it is damaged or empty, or several recordings do not belong together.
    """

    def __init__(self, folder: str | Path, seed: int = 0, adapter: str = "", held_out: bool | None = None) -> None:
        folders = _recording_folders(Path(folder))
        indices = [read_index(one) for one in folders]
        self.spec: RecordingSpec = indices[0].spec
        for one, index in zip(folders[1:], indices[1:], strict=True):
            _check_together(folders[0], self.spec, one, index.spec)
        self.seed = seed
        self.adapter = adapter
        shards = [(one, shard) for one, index in zip(folders, indices, strict=True) for shard in index.shards]
        self._files = [one / shard.file for one, shard in shards]
        if not self._files:
            raise RecordingError(f"{folder} holds no sequences yet")
        self._open: dict[int, Any] = {}
        offsets, positions, kept = [], [], []
        for number in range(len(self._files)):
            shard = self._shard(number)
            offsets.append(shard.get_tensor("offsets").numpy())
            positions.append(shard.get_tensor("positions").numpy())
            names = ("", *shards[number][1].adapters)
            numbers = shard.get_tensor("adapters").numpy() if len(names) > 1 else np.zeros(len(positions[-1]), int)
            kept.append(numbers == (names.index(adapter) if adapter in names else -1))
        self._shard_of = np.repeat(np.arange(len(offsets)), [len(one) - 1 for one in offsets])
        self._begins = np.concatenate([one[:-1] for one in offsets])
        self._lengths = np.concatenate([np.diff(one) for one in offsets])
        self._positions = np.concatenate(positions)
        chosen = np.concatenate(kept)
        if not chosen.any():
            raise RecordingError(f"{folder} holds no sequences of {adapter or 'the model without adapters'}")
        self._choose(chosen)
        self._epoch: tuple[tuple[int, int], _Windows] | None = None
        if held_out is not None:
            side = np.array([self._is_held_out(number) == held_out for number in range(self.num_sequences)], dtype=bool)
            self._choose(side)

    def _choose(self, chosen: np.ndarray) -> None:
        """Drops all but the chosen sequences."""
        self._shard_of, self._begins, self._lengths, self._positions = (
            of_all[chosen] for of_all in (self._shard_of, self._begins, self._lengths, self._positions)
        )

    def _is_held_out(self, sequence: int) -> bool:
        shard, first = self._shard(int(self._shard_of[sequence])), int(self._begins[sequence])
        rows = slice(first, first + int(self._lengths[sequence]))
        learnt = shard.get_slice("loss_mask")[rows].nonzero()
        num_prompt = int(learnt[0]) if len(learnt) else 0
        prompt = shard.get_slice("token_ids")[rows][: num_prompt or _PROMPT_TOKENS]
        return hashed_share(prompt.numpy().tobytes()) < HELD_OUT_SHARE

    @property
    def num_sequences(self) -> int:
        """Number of sequences in all shards."""
        return len(self._lengths)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all shards."""
        return int(self._lengths.sum())

    def num_windows(self, length: int) -> int:
        """Number of windows of `length` tokens in one epoch."""
        return int(np.maximum(1, self._lengths // length).sum())

    def batch(self, step: int, batch_size: int, length: int) -> RecordingBatch:
        """Reads `batch_size` windows, the first of which has the number `step * batch_size`. The result is a pure
        function of recording, seed and arguments.

        In each epoch, each sequence is cut into windows beginning at a random offset, and the windows of all sequences
        are shuffled. A sequence shorter than `length` is one window.
        """
        per_epoch = self.num_windows(length)
        rows = []
        for number in range(step * batch_size, (step + 1) * batch_size):
            windows = self._epoch_windows(number // per_epoch, length)
            rows.append((int(windows.sequences[number % per_epoch]), int(windows.begins[number % per_epoch])))
        return self._read(rows, length)

    def token_weights(self) -> Tensor:
        """Weight of each token as a training target, float64 [vocab_size]: its number of occurrences plus the sum of
        its recorded probabilities.

        Because of the probabilities, tokens that did not occur in the recorded texts but could have occurred have
        weight too.
        """
        size = self.spec.vocab_size
        weights = torch.zeros(size, dtype=torch.float64)
        for number in range(self.num_sequences):
            record = self.record(number)
            weights += torch.bincount(record.token_ids[record.loss_mask], minlength=size)
            if record.top_ids is not None and record.top_logits is not None and record.logsumexp is not None:
                likely = (record.top_logits.double() - record.logsumexp[:, None]).exp()
                weights += torch.bincount(record.top_ids.flatten(), likely.flatten(), minlength=size)
        return weights

    def records(self) -> Iterator[Record]:
        """All sequences as recorded, in order."""
        return map(self.record, range(self.num_sequences))

    def token_ids(self, sequence: int) -> Tensor:
        """Token ids int32 [num_tokens] of a sequence; `sequence` is its number, from 0."""
        begin = int(self._begins[sequence])
        rows = slice(begin, begin + int(self._lengths[sequence]))
        return self._shard(int(self._shard_of[sequence])).get_slice("token_ids")[rows]

    def record(self, sequence: int) -> Record:
        """A sequence as recorded; `sequence` is its number, from 0."""
        parts = self._slices(sequence, 0, int(self._lengths[sequence]))
        return Record(**parts, position=int(self._positions[sequence]), adapter=self.adapter)

    def check_verifier(self, fingerprint: str) -> None:
        """Raises RecordingError if the recording belongs to another verifier, because taps of another verifier cannot
        be used.

        Args:
            fingerprint: `wingbeat.runtime.heads.fingerprint.checkpoint_fingerprint` of the verifier's folder.
        """
        if fingerprint != self.spec.fingerprint:
            raise RecordingError(
                f"the recording is of verifier {self.spec.verifier} ({self.spec.fingerprint}), not of this one "
                f"({fingerprint})"
            )

    def _read(self, rows: list[tuple[int, int]], length: int) -> RecordingBatch:
        spec, shape = self.spec, (len(rows), length)
        parts = [self._slices(sequence, begin, begin + length) for sequence, begin in rows]
        lengths = [len(part["token_ids"]) for part in parts]

        def padded(name: str, dtype: torch.dtype, *width: int, fill: float = 0) -> Tensor:
            full = torch.full(shape + width, fill, dtype=dtype)
            for row, part in enumerate(parts):
                full[row, : lengths[row]] = part[name]
            return full

        has_logits = spec.top_k > 0
        return RecordingBatch(
            token_ids=padded("token_ids", torch.int64),
            taps=padded("taps", parts[0]["taps"].dtype, spec.taps_size),
            loss_mask=padded("loss_mask", torch.bool, fill=False),
            lengths=torch.tensor(lengths),
            positions=torch.tensor([int(self._positions[sequence]) + begin for sequence, begin in rows]),
            target_top_ids=padded("top_ids", torch.int64, spec.top_k) if has_logits else None,
            target_top_logits=padded("top_logits", torch.float32, spec.top_k) if has_logits else None,
            logsumexp=padded("logsumexp", torch.float32, fill=float("inf")) if has_logits else None,
        )

    def _slices(self, sequence: int, begin: int, end: int) -> dict[str, Tensor]:
        """Rows `begin` to `end` of one sequence, by tensor name; fewer rows if the sequence ends before `end`."""
        shard, first = self._shard(int(self._shard_of[sequence])), int(self._begins[sequence])
        rows = slice(first + begin, first + min(end, int(self._lengths[sequence])))
        names = ["token_ids", "taps", "loss_mask"]
        if self.spec.top_k:
            names += ["top_ids", "top_logits", "logsumexp"]
        return {name: shard.get_slice(name)[rows] for name in names}

    def _shard(self, number: int) -> Any:
        """The file of a shard, opened once and memory-mapped."""
        if number not in self._open:
            try:
                self._open[number] = safe_open(self._files[number], framework="pt")
            except Exception as error:  # safetensors' own exception class is not derived from OSError
                raise RecordingError(f"{self._files[number]} cannot be read: {error}") from error
        return self._open[number]

    def _epoch_windows(self, epoch: int, length: int) -> _Windows:
        if self._epoch is None or self._epoch[0] != (epoch, length):
            self._epoch = ((epoch, length), self._cut(epoch, length))
        return self._epoch[1]

    def _cut(self, epoch: int, length: int) -> _Windows:
        rng = np.random.default_rng((self.seed, epoch, length))
        counts = np.maximum(1, self._lengths // length)
        slack = np.maximum(0, self._lengths - counts * length)
        offsets = rng.integers(0, slack + 1)
        sequences = np.repeat(np.arange(len(counts)), counts)
        firsts = np.repeat(counts.cumsum() - counts, counts)
        begins = offsets[sequences] + (np.arange(len(sequences)) - firsts) * length
        order = rng.permutation(len(sequences))
        return _Windows(sequences[order], begins[order])


def _recording_folders(folder: Path) -> list[Path]:
    if (folder / INDEX_FILE).is_file():
        return [folder]
    below = sorted(path.parent for path in folder.glob(f"*/{INDEX_FILE}"))
    if not below:
        raise RecordingError(f"{folder} holds no recording: there is no {INDEX_FILE} in it or one level below")
    return below


def _check_together(first: Path, spec: RecordingSpec, other: Path, other_spec: RecordingSpec) -> None:
    for name in RecordingSpec.model_fields:
        if name not in ("verifier", "settings") and getattr(spec, name) != getattr(other_spec, name):
            raise RecordingError(
                f"{other} does not belong to {first}: {name} is {getattr(other_spec, name)}, not {getattr(spec, name)}"
            )
