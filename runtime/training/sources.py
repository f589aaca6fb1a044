"""Sources of a drafter's training data: the verifier, which runs during training, or a recording of the verifier's
outputs.

For a step and a part of its batch, a source supplies the tensors of the loss: text, taps and distributions. A source
does not depend on the head.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from rich.progress import Progress
from torch import Tensor

from wingbeat.runtime.heads.fingerprint import checkpoint_fingerprint
from wingbeat.runtime.recordings.format import Record
from wingbeat.runtime.recordings.frozen_verifier import FrozenVerifier
from wingbeat.runtime.recordings.reader import RecordingBatch, RecordingReader
from wingbeat.runtime.recordings.token_windows import WindowSampler
from wingbeat.runtime.training.drafter_config import TrainDrafterConfig
from wingbeat.runtime.training.loop import Inputs
from wingbeat.runtime.training.losses import DenseTarget, TopTarget
from wingbeat.runtime.training.parallel import Part, Ranks
from wingbeat.runtime.training.rollouts import RowSampler, make_rollouts


class Source(Protocol):
    """Interface of training data."""

    def inputs(self, step: int, part: Part) -> Inputs:
        """Arguments of `DraftLoss` on the run's device; must be a pure function of step and part."""

    def token_weights(self) -> Tensor:
        """Weight of each token in the choice of a draft vocabulary -> [vocab_size].

        The weight is the number of the token's occurrences plus the sum of its recorded probabilities.
        """

    def judged_token_counts(self) -> Tensor:
        """Occurrences of each token in the text on which a head is measured -> int64 [vocab_size]."""


class LiveSource:
    """Source with the text of a corpus, and text that the verifier generated before training. Each step runs the
    verifier over the step's rows.
    """

    def __init__(
        self, config: TrainDrafterConfig, ranks: Ranks, verifier: FrozenVerifier, documents: list[Tensor]
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._verifier = verifier
        self._corpus = WindowSampler(documents, config.seed)
        self._rollouts = self._written(config, ranks)
        self._own_rows = round(config.batch_size * config.rollout_share) if config.rollout_rows else 0
        self._own_text = RowSampler(self._rollouts, config.seed)

    def inputs(self, step: int, part: Part) -> Inputs:
        """Inputs from the rows of a batch. The first rows of a batch are generated text, the other rows are text of the
        corpus.
        """
        config, own = self._config, self._own_rows
        rows = part.rows(config.batch_size)
        others = config.batch_size - own
        written = range(min(rows.start, own), min(rows.stop, own))
        found = range(max(rows.start, own) - own, max(rows.stop, own) - own)
        tokens = torch.cat(
            [
                self._own_text.rows(step * own, written),
                self._corpus.rows(step * others, found, config.sequence_length),
            ]
        ).to(self._ranks.device)
        seen = self._verifier.observe(tokens)
        return Inputs((tokens, seen.taps, DenseTarget(seen.logits)), tokens.numel())

    def token_weights(self) -> Tensor:
        """Token counts of the corpus and the generated text together."""
        vocab_size = self._verifier.embedding.shape[0]
        return self._corpus.token_counts(vocab_size) + torch.bincount(self._rollouts.flatten(), minlength=vocab_size)

    def judged_token_counts(self) -> Tensor:
        """Token counts of the generated text, or of the corpus if no text is generated."""
        if not self._own_rows:
            return self._corpus.token_counts(self._verifier.embedding.shape[0])
        return torch.bincount(self._rollouts.flatten(), minlength=self._verifier.embedding.shape[0])

    def _written(self, config: TrainDrafterConfig, ranks: Ranks) -> Tensor:
        if not ranks.is_first:
            # The first process reaches the barrier only after it has written the whole file of rollouts.
            ranks.wait_for_first()
        with Progress(disable=not ranks.is_first) as bar:
            task = bar.add_task("the verifier's own text", total=config.rollout_rows)
            rows = make_rollouts(
                self._verifier,
                self._corpus,
                config.output,
                num_rows=config.rollout_rows,
                length=config.sequence_length,
                greedy_fraction=config.greedy_fraction,
                temperature=config.temperature,
                seed=config.seed,
                on_rows=lambda count: bar.update(task, completed=count),
            )
        if ranks.is_first:
            ranks.wait_for_first()
        return rows


class RecordedSource:
    """Source with windows of a recording; the verifier is not run.

    Args:
        config: settings of the run.
        folder: folder of the recording.
        verifier: folder of the verifier.
        tap_layers: layers whose taps are read.
        device: device of the inputs.
        all_sequences: whether to train also on the sequences that would otherwise be held out; set for a recording that
            contains only training data.

    Raises:
        RecordingError: the recording cannot be read, or is of another verifier.
        ValueError: the recording lacks one of the taps.
    """

    def __init__(
        self,
        config: TrainDrafterConfig,
        folder: Path,
        verifier: Path,
        tap_layers: tuple[int, ...],
        device: torch.device,
        all_sequences: bool = False,
    ) -> None:
        self._reader = RecordingReader(folder, config.seed, held_out=None if all_sequences else False)
        self._reader.check_verifier(checkpoint_fingerprint(verifier))
        self._columns = tap_columns(self._reader, tap_layers)
        self._folder = folder
        self._batch_size, self._length = config.batch_size, config.sequence_length
        self._device = device

    def inputs(self, step: int, part: Part) -> Inputs:
        """Windows of the part's rows."""
        size = len(part.rows(self._batch_size))
        batch = self._reader.batch(step * part.count + part.index, size, self._length)
        taps = batch.taps if self._columns is None else batch.taps[..., self._columns]
        target = _target(batch)
        tensors = (batch.token_ids, taps, TopTarget(*(tensor.to(self._device) for tensor in target)), batch.loss_mask)
        moved = tuple(tensor.to(self._device) if isinstance(tensor, Tensor) else tensor for tensor in tensors)
        return Inputs(moved, int(batch.lengths.sum()))

    @cached_property
    def held_out(self) -> RecordingReader:
        """Reader of the held-out sequences."""
        return RecordingReader(self._folder, held_out=True)

    def judged(self, most: int) -> Iterator[Record]:
        """At most `most` held-out records, reduced to the taps that training uses."""
        for number in range(min(most, self.held_out.num_sequences)):
            record = self.held_out.record(number)
            yield record if self._columns is None else record._replace(taps=record.taps[:, self._columns])

    @property
    def num_sequences(self) -> int:
        """Number of recorded sequences."""
        return self._reader.num_sequences

    @property
    def num_tokens(self) -> int:
        """Number of recorded tokens."""
        return self._reader.num_tokens

    def token_weights(self) -> Tensor:
        """Weights of tokens from the recording's tokens and probabilities."""
        return self._reader.token_weights()

    def judged_token_counts(self) -> Tensor:
        """Token counts of the held-out answers."""
        counts = torch.zeros(self._reader.spec.vocab_size, dtype=torch.int64)
        for record in self.held_out.records():
            counts += torch.bincount(record.token_ids[record.loss_mask], minlength=len(counts))
        return counts


def tap_columns(reader: RecordingReader, tap_layers: tuple[int, ...]) -> Tensor | None:
    """Columns of a recording's taps that belong to `tap_layers`, lowest layer first; None if `tap_layers` are all
    tapped layers of the recording.

    Raises:
        ValueError: the recording lacks one of the layers.
    """
    recorded, width = reader.spec.tap_layers, reader.spec.hidden_size
    missing = [layer for layer in tap_layers if layer not in recorded]
    if missing:
        raise ValueError(
            f"the recording has taps {recorded} and lacks {', '.join(map(str, missing))} of tap_layers={tap_layers}"
        )
    if tap_layers == recorded:
        return None
    return torch.cat([torch.arange(width) + recorded.index(layer) * width for layer in tap_layers])


def _target(batch: RecordingBatch) -> TopTarget:
    """The recorded distributions; if none were recorded, the text's next token with probability 1."""
    if batch.target_top_ids is None or batch.target_top_logits is None or batch.logsumexp is None:
        following = batch.token_ids.roll(-1, dims=1).unsqueeze(-1)
        return TopTarget(following, torch.ones(following.shape))
    return TopTarget(batch.target_top_ids, (batch.target_top_logits - batch.logsumexp.unsqueeze(-1)).exp())
